"""Locks under load while their servers fail over, and what that cost; see docs/contributing/fault-injection.md."""
