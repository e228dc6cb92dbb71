"""A clock that a test moves."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["TravellingClock"]


class TravellingClock:
    """The clock of an app's leases (:class:`~celery_dlock.utils.clock.Clock`).

    Args:
        also: Moves the other clocks of the test by so many seconds.
    """

    def __init__(self, also: Callable[[float], None]) -> None:
        self._also = also
        self._ahead = 0.0

    def travel(self, seconds: float) -> None:
        """Move this clock and the others forward."""
        self._ahead += seconds
        self._also(seconds)

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def wall(self) -> float:
        return time.time() + self._ahead
