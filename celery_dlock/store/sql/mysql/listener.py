"""Waits for the release of a lock in MySQL or MariaDB: a row of the call, at which it looks again and again.

A release wakes the call that has waited for the longest time. A call whose process has died is passed over, because it
does not look any more. Nothing depends on a wake-up: see :mod:`celery_dlock.locking.waiting`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from ....errors import StoreUnavailable
from ..rows import WAKE_US
from .connection import ConnectionPool
from .statements import Statements

__all__ = ["Listener"]

#: Microseconds after which a call that does not look any more is passed over.
_ALIVE_US: Final = 3_000_000
#: Seconds between two times at which a call says that it still waits.
_SAY_SECONDS: Final = 1.0
#: Seconds between two looks: the first pause and the longest one.
_LOOK: Final = 0.002, 0.02


class Listener:
    """A call that waits for releases of one lock, in its thread or greenlet.

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

    def wait(self, timeout: float) -> bool:
        number = self._begin()
        if number is None:
            return True
        woken = False
        try:
            woken = self._woken(number, time.monotonic() + timeout)
        finally:
            woken = self._end(number) or woken
        return woken

    def _begin(self) -> int | None:
        """Return the number in the line; None if a wake-up is there already."""
        sql, key = self._sql, self._key
        with self._pool.lent() as connection:
            # The lock of the row orders this call and a release: the later one sees the earlier one.
            _, _, kept, added, _ = connection.run(
                (sql.begin, ()), (sql.make, (key,)), (sql.take_wake, (key,)), (sql.begin_to_wait, (key, _ALIVE_US)),
                ("COMMIT", ()),
            )  # fmt: skip
        if not kept.changed:
            return added.number
        self._end(added.number)
        return None

    def _look(self, number: int, *, say: bool) -> bool:
        """Return whether a release has woken this call, or others count it as dead. ``say``: it still waits."""
        sql, call = self._sql, (self._key, number)
        with self._pool.lent() as connection:
            if say:
                connection.ask(sql.still_waits, (_ALIVE_US, *call))
            found = connection.ask(sql.waits, call).rows
        return not found or bool(found[0][0])

    def _end(self, number: int) -> bool:
        """Leave the line. Return whether a release has woken this call in this moment."""
        sql, call = self._sql, (self._key, number)
        with suppress(StoreUnavailable), self._pool.lent() as connection:
            found = connection.run((sql.begin, ()), (sql.waits_locked, call), (sql.end_to_wait, call), ("COMMIT", ()))
            return bool(found[1].rows and found[1].rows[0][0])
        return False

    def _woken(self, number: int, end: float) -> bool:
        said, pause = time.monotonic(), _LOOK[0]
        while (left := end - time.monotonic()) > 0:
            # Python's sleep, which gevent patches.
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK[1])
            say = time.monotonic() > said + _SAY_SECONDS
            if say:
                said = time.monotonic()
            if self._look(number, say=say):
                return True
        return False
