"""Waits for the release of a lock in MySQL or MariaDB (:mod:`celery_dlock.store.sql.listener`)."""

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
        sql, wake = self._sql, {"name": self._key, "wakes": 1, "kept_us": WAKE_US}
        with suppress(StoreUnavailable), self._pool.lent() as connection:
            connection.run(
                (sql.begin, ()), (sql.make, (self._key,)), (sql.keep_wake, wake), (sql.wake, wake), ("COMMIT", ())
            )

    def _begin(self) -> int | None:
        sql, key = self._sql, self._key
        with self._pool.lent() as connection:
            # The lock of the row orders this call and a release: the later one sees the earlier one.
            _, _, kept, added, _ = connection.run(
                (sql.begin, ()), (sql.make, (key,)), (sql.take_wake, (key,)), (sql.begin_to_wait, (key, ALIVE_US)),
                ("COMMIT", ()),
            )  # fmt: skip
        if not kept.changed:
            return added.number
        self._end(added.number)
        return None

    def _look(self, number: int, *, say: bool) -> bool:
        sql, call = self._sql, (self._key, number)
        with self._pool.lent() as connection:
            if say:
                connection.ask(sql.still_waits, (ALIVE_US, *call))
            found = connection.ask(sql.waits, call).rows
        return not found or bool(found[0][0])

    def _end(self, number: int) -> bool:
        sql, call = self._sql, (self._key, number)
        with suppress(StoreUnavailable), self._pool.lent() as connection:
            found = connection.run((sql.begin, ()), (sql.waits_locked, call), (sql.end_to_wait, call), ("COMMIT", ()))
            return bool(found[1].rows and found[1].rows[0][0])
        return False
