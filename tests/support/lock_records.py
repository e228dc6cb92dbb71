"""The records of a lock store, read and removed past the library: in Redis, or in the store of DLOCK_TEST_STORE."""

from __future__ import annotations

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.redis.keys import LockKeys
from tests.support.servers import Server

__all__ = ["claimed_by", "dead_letters", "forget", "held", "key", "life_ms", "records"]


def key(server: Server, name: LockName, db: int = 0) -> str:
    """Return the Redis key of a lock, or the name of its row."""
    tables = server.lock_tables(db)
    return tables.row(name) if tables else LockKeys.of("dlock", name).lock


def records(server: Server, db: int = 0) -> list[str]:
    """Return the Redis keys, or the names of the rows, of all that is kept but marks of what has ended."""
    if tables := server.lock_tables(db):
        return tables.names()
    with server.client(db) as client:
        return list(client.scan_iter("dlock*"))


def held(server: Server, db: int = 0) -> list[str]:
    """Return the key of each lock that is held."""
    if tables := server.lock_tables(db):
        return [lock.name for lock in tables.held()]
    with server.client(db) as client:
        return list(client.scan_iter("dlock*:lock:*"))


def life_ms(server: Server, found: str, db: int = 0) -> int:
    """Return how many milliseconds a lock is held without a renewal, by its key; -2 if it is free."""
    if tables := server.lock_tables(db):
        return next((lock.left_ms for lock in tables.held(found)), -2)
    with server.client(db) as client:
        return int(client.pttl(found))


def forget(server: Server, found: str, db: int = 0) -> int:
    """Remove a lock by its key, as a store does that loses its data. Return 1; 0 if there was none."""
    if tables := server.lock_tables(db):
        return tables.forget(found)
    with server.client(db) as client:
        return int(client.delete(found))


def dead_letters(server: Server, name: LockName, db: int = 0) -> int:
    """Return the number of dead letters of a lock."""
    if tables := server.lock_tables(db):
        return sum(word == "dead" for word, _ in tables.parked(tables.row(name)))
    with server.client(db) as client:
        return int(client.hlen(LockKeys.of("dlock", name).named("dead")))


def claimed_by(server: Server, name: LockName, db: int = 0) -> str | None:
    """Return the id of the call that has claimed the name."""
    if tables := server.lock_tables(db):
        return tables.claimed_by(tables.row(name))
    with server.client(db) as client:
        found: str | None = client.hget(f"dlock:{{{name.bucket:03x}}}:claim:{name.text}", "id")
        return found
