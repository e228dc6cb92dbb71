"""Values that follow from the options of a task, for the rest of the library."""

from __future__ import annotations

import functools
from typing import Final, Literal

from .durations import FOREVER, Seconds, as_seconds

__all__ = ["SKEW", "DerivedOptions", "StopReason", "tick_mark_ttl"]

#: Seconds by which any two clocks of beats, workers and the store may differ.
SKEW: Final = 60.0
#: Seconds added to the skew, because a mark is written a little after its body has begun.
_MARGIN: Final = 60.0

#: Why a body is to be stopped: its lease is lost, or a newer call replaces it.
StopReason = Literal["lost", "replaced"]


class DerivedOptions:
    """The base class of :class:`~celery_dlock.LockOptions`, which has the fields that these properties read."""

    min_hold: Seconds
    max_hold: Seconds | None
    keep_on_retry: bool
    wait: Seconds
    on_conflict: str
    queue_limit: int | None
    queue_overflow: str
    stop: Seconds | str
    debounce: Seconds | tuple[Seconds, Seconds] | None
    unique: str | None
    once_per: Seconds | str | None
    misfire_grace: Seconds
    on_lost: str
    on_store_error: str

    @property
    def once_seconds(self) -> float | None:
        """Seconds that a name stays used; None if names are never used."""
        if self.once_per == "tick":
            return tick_mark_ttl(as_seconds(self.misfire_grace))
        if isinstance(self.once_per, str):
            return FOREVER
        return None if self.once_per is None else as_seconds(self.once_per)

    @property
    def claims(self) -> bool:
        """Whether a call claims its name when it is published."""
        return self.unique is not None

    # Cached, because each run of a task reads these four.

    @functools.cached_property
    def is_simple(self) -> bool:
        """Whether a run only takes its lock before the body and releases it afterwards, as by default.

        If so, the run skips each step that some other option adds.
        """
        return not (
            self.parks
            or self.claims
            or self.wait
            or self.once_per is not None
            or self.min_hold
            or self.max_hold is not None
            or self.keep_on_retry
            or self.on_store_error == "local"
        )

    @functools.cached_property
    def parks(self) -> bool:
        """Whether a call whose lock is held waits in the lock store."""
        return self.on_conflict in ("queue", "replace")

    @functools.cached_property
    def is_stoppable(self) -> bool:
        """Whether a body may be stopped before its end."""
        return self.on_lost == "abort" or self.replaces

    @functools.cached_property
    def marks_release(self) -> bool:
        """Whether a release tells the store how the body has ended."""
        return self.once_per is not None or self.replaces

    @property
    def replaces(self) -> bool:
        """Whether a newer call stops the running one."""
        return self.on_conflict == "replace"

    @property
    def stop_reasons(self) -> tuple[StopReason, ...]:
        """The reasons for which the worker raises an exception in the body."""
        lost: tuple[StopReason, ...] = ("lost",) if self.on_lost == "abort" else ()
        return (*lost, "replaced") if self.replaces and self.stop != "ask" else lost

    @property
    def kill_after(self) -> float | None:
        """Seconds after which a replaced body that has not ended is killed; None if it is never killed."""
        return self.stop if self.replaces and isinstance(self.stop, float) else None

    @property
    def loses_published_calls(self) -> bool:
        """Whether a call that is published while the first one runs will be skipped."""
        return self.unique == "queued" and self.on_conflict == "skip"

    @property
    def debounce_ms(self) -> tuple[int, int]:
        """``debounce`` and the longest delay in milliseconds; (0, 0) if calls are not debounced."""
        if self.debounce is None:
            return 0, 0
        wait, longest = self.debounce if isinstance(self.debounce, tuple) else (self.debounce, 10 * self.debounce)
        return round(as_seconds(wait) * 1000), round(as_seconds(longest) * 1000)


def tick_mark_ttl(misfire_grace: float) -> float:
    """Return the seconds for which a tick's run is remembered, counted from its success.

    A later message of the same tick must find the mark or be a misfire. Otherwise the tick would run twice. Two clocks
    differ by at most the skew. A run starts at ``due - skew`` of its worker's clock at the earliest, because the worker
    refuses an earlier message. By the store's clock that is ``due - 2 skew``, and the mark is written later. A message
    that is no misfire starts at ``due + misfire_grace`` of its worker's clock at the latest: ``due + misfire_grace +
    skew`` by the store's clock. The difference is ``misfire_grace + 3 skew``.
    """
    return misfire_grace + 3 * SKEW + _MARGIN
