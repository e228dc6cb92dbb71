"""The only place that reads time."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the rest of the package knows of time, in seconds."""

    def monotonic(self) -> float:
        """A clock that never steps; equal in all processes of one machine, so that deadlines can be shared."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for what people read and for ETAs; never for deciding who holds a lock."""
        ...


class SystemClock:
    """The machine's own clocks."""

    # The C functions themselves: the hot path reads the time four times per task.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
