"""The recorder: counts in the table of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, Protocol

from ..errors import (
    NotConfirmed,
    ReplyLost,
    ReplyTimeout,
    StoreNotReady,
    StoreQuarantined,
    StoreRefused,
    StoreUnavailable,
)
from ..utils.clock import SystemClock
from ..utils.log import logger
from .catalog import metric
from .table import CounterTable, Layout, bucket_of, thread_rows

__all__ = ["Counted", "Recorder"]

#: The values of the label of ``store_errors``, by exception. The first match counts, so subclasses come first.
_KINDS: Final = (
    (ReplyTimeout, "timeout"),
    (ReplyLost, "reply_lost"),
    (NotConfirmed, "not_confirmed"),
    (StoreQuarantined, "quarantined"),
    (StoreRefused, "refused"),
    (StoreNotReady, "not_ready"),
    (StoreUnavailable, "unreachable"),
)
#: At every 32nd acquisition of a task in a thread, the next two commands are timed.
_SAMPLE_EVERY: Final = 32

_held_bucket: Final = bucket_of("held_seconds")
_now: Final = SystemClock.monotonic


class Counted(Protocol):
    """The part of a lease that is counted."""

    @property
    def task(self) -> str | None: ...

    #: When the lock was taken, on the monotonic clock; 0 before :meth:`Recorder.taken`.
    taken_at: float


#: The errors that a wrong name or label raises. Others are not caught: a soft time limit may be raised in this code,
#: and must reach the task.
_COUNTING_ERRORS: Final = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


def _log_failed(name: str) -> None:
    """Log, once for each metric and process, that it is not counted. Call this in the handler of the error."""
    if name not in _failed:
        _failed.add(name)
        logger.exception(  # noqa: LOG004  # the caller is the handler
            "the metric %s is not counted; this changes no lock", name
        )


_failed: Final[set[str]] = set()


class Recorder:
    """The counters of one process.

    Args:
        layout: The cells of each row.
        table: The table of this process.
    """

    def __init__(self, layout: Layout, table: CounterTable) -> None:
        self.pid = os.getpid()
        self.table = table
        self._layout = layout
        self._rows = thread_rows(table, layout)
        self._words = table.words
        self._held_sums = table.floats[layout.sum_cell(metric("held_seconds")) :]

    def count(self, name: str, task: str | None = None, value: str = "") -> None:
        """Add 1 to a counter.

        Args:
            name: The name of the metric in the catalog.
            task: The name of the task, or None.
            value: The value of the metric's other label.
        """
        # The watchdog counts in its rounds, which an error must not break.
        try:
            self.table.words[self._rows.start + self._layout.cell(name, task, value)] += 1
        except _COUNTING_ERRORS:
            _log_failed(name)

    def observe(self, name: str, seconds: float, task: str | None = None, value: str = "") -> None:
        """Add an observation to a histogram. The arguments are those of :meth:`count`."""
        try:
            start = self._rows.start + self._layout.cell(name, task, value)
            self.table.words[start + bucket_of(name)(seconds)] += 1
            self.table.floats[start + self._layout.sum_cell(metric(name))] += seconds
        except _COUNTING_ERRORS:
            _log_failed(name)

    def waited(self, task: str | None, seconds: float, *, conflict: bool = True) -> None:
        """Count a call that waited in its pool slot and then took the lock.

        Args:
            task: The name of its task, or None.
            seconds: How long it waited.
            conflict: Whether the call may have waited for a body that ran. False if it only waited for the release of a
                holder whose body had already ended.
        """
        self.observe("wait_seconds", seconds, task)
        if conflict:
            self.count("conflicts", task, "waited")

    def store_failed(self, error: StoreUnavailable | None) -> None:
        """Count a command that the store did not carry out; None: it was not sent."""
        kind = "skipped" if error is None else next(kind for type_, kind in _KINDS if isinstance(error, type_))
        self.count("store_errors", value=kind)

    def store_took(self, command: str, seconds: float) -> None:
        """Count the time of a command."""
        self.observe("store_seconds", seconds, value=command)

    def timed(self, command: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its times measured and its errors counted."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = _now()
            try:
                answer = call(*args, **kwargs)
            except StoreUnavailable as error:
                self.store_failed(error)
                raise
            self.observe("store_seconds", _now() - began, value=command)
            return answer

        return measured

    def taken(self, lease: Counted) -> bool:
        """Count an acquisition. Return whether the next two commands of the store are to be timed.

        A task's first cell is its counter ``acquired``, and its buckets of ``held_seconds`` follow.
        """
        words, cell = self._words, self._rows.bases[lease.task]
        words[cell] = number = words[cell] + 1
        lease.taken_at = _now()
        return not number % _SAMPLE_EVERY

    def released(self, lease: Counted) -> None:
        """Count a release by the holder, and for how long it has held the lock."""
        held = _now() - lease.taken_at if lease.taken_at else 0.0  # 0: an exception struck before `taken`
        cell = self._rows.bases[lease.task]
        self._words[cell + _held_bucket(held)] += 1
        self._held_sums[cell] += held
