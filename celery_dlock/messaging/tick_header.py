"""Ticks in message headers: the due times of schedule entries for which beat sends messages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import InvalidTick
from ..options.derived import SKEW

__all__ = [
    "HEADER",
    "Tick",
    "header_for",
    "tick_of",
    "unstamped",
]

#: The message's header. Celery copies it into the task's own retries, which are for the same tick.
HEADER: Final = "dlock_tick"
#: The header with which Celery's beat, from 5.7 on, marks every message that it sends.
_BEAT_HEADER: Final = "celery_beat_task"


class Tick(NamedTuple):
    """One due time of one schedule entry.

    Args:
        entry: The entry's name.
        due: Seconds since the epoch, exact to the microsecond.
    """

    entry: str
    due: float

    @property
    def digest(self) -> str:
        """The digest that identifies this tick among all ticks of its lock name. It hides the entry's name."""
        text = f"{round(self.due * 1e6)}:{self.entry}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def header_for(task: str, entry: str, due: float) -> dict[str, dict[str, Any]]:
    """Return the header of a message that is sent for a tick.

    The header names the task, because a body may pass its headers on to other tasks, for which the tick does not count.
    """
    return {HEADER: {"task": task, "entry": entry, "due": due}}


def tick_of(task: str, headers: Mapping[str, Any] | None, now: float) -> Tick | None:
    """Return the tick for which a message was sent; None if there is none, or if it is another task's.

    Args:
        task: The task's name.
        headers: The message's headers.
        now: Seconds since the epoch by the worker's clock.

    Raises:
        InvalidTick: The header was not made by a :class:`~celery_dlock.beat.TickScheduler`, or its tick is more than
            ``SKEW`` in the future.
    """
    header = (headers or {}).get(HEADER)
    if header is None:
        return None
    # Any publisher can write this header, so errors must not show its values.
    if not isinstance(header, Mapping) or not isinstance(header.get("task"), str):
        raise _invalid(task, "expected the header that celery_dlock.beat makes; start beat with its scheduler")
    if header["task"] != task:
        return None
    entry, due = header.get("entry"), header.get("due")
    if not isinstance(entry, str) or not entry:
        raise _invalid(task, "expected the name of a schedule entry as 'entry'")
    if not isinstance(due, int | float) or isinstance(due, bool) or not due > 0:  # NaN is not greater either
        raise _invalid(task, "expected seconds since the epoch as 'due'")
    if due > now + SKEW:
        raise _invalid(
            task, f"'due' is more than {SKEW:g} s ahead of this worker's clock; expected clocks that differ by less"
        )
    return Tick(entry, float(due))


def unstamped(headers: Mapping[str, Any] | None) -> bool:
    """Return whether beat sent the message for a tick but without the tick's header, so the tick is unknown."""
    headers = headers or {}
    return headers.get(_BEAT_HEADER) is True and HEADER not in headers


def _invalid(task: str, reason: str) -> InvalidTick:
    return InvalidTick(f"task {task!r}: invalid header {HEADER!r}: {reason}")
