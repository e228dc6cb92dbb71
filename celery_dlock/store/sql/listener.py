"""Waits for the release of a lock: a row in the line of its name, which the call looks at again and again.

A release wakes the call that has waited for the longest time. A call whose process has died is passed over, because it
does not look any more. Nothing depends on a wake-up: see :mod:`celery_dlock.locking.waiting`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Final

__all__ = ["ALIVE_US", "WAKE_US", "PollingListener"]

#: Microseconds for which a wake-up is kept for a call that begins to wait after the release.
WAKE_US: Final = 2_000_000
#: Microseconds after which a call that does not look any more is passed over.
ALIVE_US: Final = 3_000_000
#: Seconds between two times at which a call says that it still waits.
_SAY_SECONDS: Final = 1.0
#: Seconds between two looks: the first pause and the longest one.
_LOOK: Final = 0.002, 0.02


class PollingListener(ABC):
    """A call that waits for releases of one lock, in its thread or greenlet."""

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

    @abstractmethod
    def _begin(self) -> int | None:
        """Return the number in the line; None if a wake-up is there already."""

    @abstractmethod
    def _look(self, number: int, *, say: bool) -> bool:
        """Return whether a release has woken this call, or others count it as dead. ``say``: it still waits."""

    @abstractmethod
    def _end(self, number: int) -> bool:
        """Leave the line. Return whether a release has woken this call in this moment."""

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
