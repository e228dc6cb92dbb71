"""The times of the latest lost leases, in memory that the processes of a worker share."""

from __future__ import annotations

import mmap
from typing import Final

from ..utils.clock import SystemClock

__all__ = ["KEPT", "RecentLosses"]

#: Losses that are kept.
KEPT: Final = 1000


class RecentLosses:
    """The times of the latest lost leases of a process, and of all processes that are forked from it later.

    It has no lock, because a process could die while it holds one. If two processes report a loss at the same moment,
    one of the two may be missing.
    """

    def __init__(self) -> None:
        # The view keeps the memory alive. Its last word is the index of the next time.
        self._words = memoryview(mmap.mmap(-1, (KEPT + 1) * 8)).cast("d")

    def add(self) -> None:
        """Add a loss that is reported now."""
        index = int(self._words[KEPT]) % KEPT
        self._words[index] = SystemClock.monotonic()
        self._words[KEPT] = (index + 1) % KEPT

    def within(self, seconds: float) -> int:
        """Return the number of losses of the last seconds, at most :data:`KEPT`."""
        # Unused words are 0, which is earlier than every loss.
        start = max(0.0, SystemClock.monotonic() - seconds)
        return sum(time > start for time in self._words[:KEPT])
