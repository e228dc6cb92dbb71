"""The recorder: counts in the table of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
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

__all__ = ["COUNTING_ERRORS", "Counted", "Recorder", "kind_of_error", "lease_hooks", "log_failed_count"]

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

    #: When the lock was taken, on the monotonic clock.
    taken_at: float | None


#: The errors that a wrong name or label raises. Others are not caught: a soft time limit may be raised in this code,
#: and must reach the task.
COUNTING_ERRORS: Final = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


def log_failed_count(name: str) -> None:
    """Log, once for each metric and process, that it is not counted. Call this in the handler of the error."""
    if name not in _failed:
        _failed.add(name)
        logger.exception(  # noqa: LOG004  # the caller is the handler
            "the metric %s is not counted; this changes no lock", name
        )


_failed: Final[set[str]] = set()


def kind_of_error(error: StoreUnavailable) -> str:
    """Return the value of the label ``kind`` for an error of the store."""
    return next(kind for type_, kind in _KINDS if isinstance(error, type_))  # the last one fits each


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
        except COUNTING_ERRORS:
            log_failed_count(name)

    def observe(self, name: str, seconds: float, task: str | None = None, value: str = "") -> None:
        """Add an observation to a histogram. The arguments are those of :meth:`count`."""
        try:
            start = self._rows.start + self._layout.cell(name, task, value)
            self.table.words[start + bucket_of(name)(seconds)] += 1
            self.table.floats[start + self._layout.sum_cell(metric(name))] += seconds
        except COUNTING_ERRORS:
            log_failed_count(name)

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
        kind = "skipped" if error is None else kind_of_error(error)
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

    def lease_hooks(
        self, filters: Sequence[Callable[[Any], object]], sample: Callable[[], object]
    ) -> tuple[Callable[[Any], bool], Callable[[Any], bool]]:
        """Return the two functions that :func:`lease_hooks` returns while metrics are on.

        Every run of a task calls both, so they do not call :meth:`Layout.cell`. They rely on the layout: a task's first
        cell is its counter ``acquired``, and its buckets of ``held_seconds`` follow.

        Args:
            filters: For each listener, a function that returns whether it wants this kind of event.
            sample: Starts to time the next commands.
        """
        rows, words = self._rows, self.table.words
        sums = self.table.floats[self._layout.sum_cell(metric("held_seconds")) :]
        # map() over the filters saves one Python call for each event, compared with `wants`.
        about_acquired, about_released = methodcaller("__call__", "acquired"), methodcaller("__call__", "released")
        sample()

        def taken(lease: Counted) -> bool:
            cell = rows.bases[lease.task]
            words[cell] = number = words[cell] + 1
            lease.taken_at = _now()
            if not number % _SAMPLE_EVERY:
                sample()
            return any(map(about_acquired, filters))

        def released(lease: Counted) -> bool:
            held = 0.0 if lease.taken_at is None else _now() - lease.taken_at
            cell = rows.bases[lease.task]
            words[cell + _held_bucket(held)] += 1
            sums[cell] = sums[cell] + held  # not +=, which costs two more bytecode instructions
            return any(map(about_released, filters))

        return taken, released


def _asking(kind: str, filters: Sequence[Callable[[Any], object]]) -> Callable[[Any], bool]:
    """Return a function of a lease, which returns whether a listener wants this kind of event."""
    about_kind = methodcaller("__call__", kind)  # as in Recorder.lease_hooks
    return lambda _lease: any(map(about_kind, filters))


def lease_hooks(
    recorder: Recorder | None,
    filters: Sequence[Callable[[Any], object]],
    time_next: Callable[[int, Callable[[str, float], object]], object],
) -> tuple[Callable[[Any], bool], Callable[[Any], bool]]:
    """Return the functions to call when a lock was taken, and when its holder has released it.

    Each gets the lease, and returns whether a listener wants the event. While metrics are off, both only ask the
    filters, so metrics then cost nothing.

    Args:
        recorder: The recorder of this process; None while metrics are off.
        filters: For each listener, a function that returns whether it wants this kind of event.
        time_next: Times the next store commands: gets their number, and the function that records each time.
    """
    if recorder is None:
        return _asking("acquired", filters), _asking("released", filters)
    return recorder.lease_hooks(filters, partial(time_next, 2, recorder.store_took))
