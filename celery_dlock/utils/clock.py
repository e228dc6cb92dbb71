"""The clocks. What decides about a lease reads the time through them, so that a test can move it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """The times that the package uses, in seconds."""

    def monotonic(self) -> float:
        """Return the time of a clock that never steps. All processes of a machine share it."""
        ...

    def wall(self) -> float:
        """Return the seconds since the epoch, for display and for ETAs. They never decide about a lock."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    # The C functions, without a wrapper: each task reads the time four times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
