"""The lock store in PostgreSQL."""
