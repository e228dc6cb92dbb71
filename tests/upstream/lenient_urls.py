"""redis-py: a URL whose database is no number means database 0, without an error."""

from __future__ import annotations

from typing import Any

from redis.connection import ConnectionPool


def fault() -> str:
    try:
        pool: Any = ConnectionPool.from_url("redis://locks.example/two")
    except ValueError:
        return ""
    return f"redis://locks.example/two is read as database {pool.connection_kwargs.get('db', 0)}"
