"""Waits for the release of a lock: a row in the line of its name, which the call looks at again and again.

A release wakes the call that has waited for the longest time. A call whose process has died is passed over, because it
does not look any more. Nothing depends on a wake-up: see :mod:`celery_dlock.locking.waiting`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from ....errors import StoreUnavailable
from .connection import ConnectionPool
from .statements import Statements

__all__ = ["WAKE_US", "Listener"]

#: Microseconds for which a wake-up is kept for a call that begins to wait after the release.
WAKE_US: Final = 2_000_000
#: Microseconds after which a call that does not look any more is passed over.
ALIVE_US: Final = 3_000_000
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

    def wait(self, timeout: float) -> bool:
        place = self._begin()
        if place is None:
            return True
        woken = False
        try:
            woken = self._woken(place, time.monotonic() + timeout)
        finally:
            woken = self._end(place) or woken
        return woken

    def pass_on(self) -> None:
        with suppress(StoreUnavailable), self._pool.lent() as connection, connection.pipeline():
            connection.execute(self._sql.begin)
            connection.execute(self._sql.lock, (self._key,))
            connection.execute(self._sql.keep_wake, (WAKE_US, self._key, 1, self._key))
            connection.execute(self._sql.wake, (self._key, 1))
            connection.execute("COMMIT")

    def _begin(self) -> int | None:
        """Return the place in the line; None if a wake-up is there already."""
        with self._pool.lent() as connection, connection.pipeline():
            connection.execute(self._sql.make, (self._key,))
            # The lock of the row orders this call and a release: the later one sees the earlier one.
            connection.execute(self._sql.begin)
            connection.execute(self._sql.lock, (self._key,))
            kept = connection.execute(self._sql.take_wake, (self._key,))
            place = connection.execute(self._sql.begin_to_wait, (self._key, ALIVE_US))
            connection.execute("COMMIT")
        number = int(place.fetchall()[0][0])
        if kept.fetchone() is None:
            return number
        self._end(number)
        return None

    def _woken(self, place: int, end: float) -> bool:
        said, pause = time.monotonic(), _LOOK[0]
        while (left := end - time.monotonic()) > 0:
            # Python's sleep, which gevent patches.
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK[1])
            with self._pool.lent() as connection:
                if time.monotonic() > said + _SAY_SECONDS:
                    said = time.monotonic()
                    found = connection.execute(self._sql.still_waits, (ALIVE_US, place)).fetchone()
                else:
                    found = connection.execute(self._sql.waits, (place,)).fetchone()
            if found is None or found[0]:
                return True
        return False

    def _end(self, place: int) -> bool:
        """Leave the line. Return whether a release has woken this call in this moment."""
        with suppress(StoreUnavailable), self._pool.lent() as connection:
            found = connection.execute(self._sql.end_to_wait, (place,)).fetchone()
            return found is not None and bool(found[0])
        return False
