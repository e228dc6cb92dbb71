"""The lock store in MySQL and MariaDB."""
