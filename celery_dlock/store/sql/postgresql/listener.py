"""Waits for the release of a lock in PostgreSQL (:mod:`celery_dlock.store.sql.listener`)."""

from __future__ import annotations

from contextlib import suppress

from ....errors import StoreUnavailable
from ..listener import ALIVE_US, WAKE_US, PollingListener
from .connection import ConnectionPool
from .statements import Statements

__all__ = ["Listener"]


class Listener(PollingListener):
    """A call that waits for releases of one lock.

    Args:
        pool: The connections.
        sql: The statements.
        key: The name of the row.
    """

    def __init__(self, pool: ConnectionPool, sql: Statements, key: str) -> None:
        self._pool, self._sql, self._key = pool, sql, key

    def pass_on(self) -> None:
        with suppress(StoreUnavailable), self._pool.lent() as connection, connection.pipeline():
            connection.execute(self._sql.begin)
            connection.execute(self._sql.lock, (self._key,))
            wake = {"name": self._key, "wakes": 1, "kept_us": WAKE_US}
            connection.execute(self._sql.keep_wake, wake)
            connection.execute(self._sql.wake, wake)
            connection.execute("COMMIT")

    def _begin(self) -> int | None:
        with self._pool.lent() as connection, connection.pipeline():
            connection.execute(self._sql.make, (self._key,))
            # The lock of the row orders this call and a release: the later one sees the earlier one.
            connection.execute(self._sql.begin)
            connection.execute(self._sql.lock, (self._key,))
            kept = connection.execute(self._sql.take_wake, (self._key,))
            added = connection.execute(self._sql.begin_to_wait, (self._key, ALIVE_US))
            connection.execute("COMMIT")
        number = int(added.fetchall()[0][0])
        if kept.fetchone() is None:
            return number
        self._end(number)
        return None

    def _look(self, number: int, *, say: bool) -> bool:
        with self._pool.lent() as connection:
            if say:
                found = connection.execute(self._sql.still_waits, (ALIVE_US, number)).fetchone()
            else:
                found = connection.execute(self._sql.waits, (number,)).fetchone()
        return found is None or bool(found[0])

    def _end(self, number: int) -> bool:
        with suppress(StoreUnavailable), self._pool.lent() as connection:
            found = connection.execute(self._sql.end_to_wait, (number,)).fetchone()
            return found is not None and bool(found[0])
        return False
