"""A tick: one due time of one schedule entry, as the message that beat sends for it carries it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import InvalidTick
from ..options.lock_options import SKEW

__all__ = [
    "HEADER",
    "Tick",
    "header_for",
    "tick_of",
    "unstamped",
]

#: The message's header. Celery copies it into the task's own retries, which are for the same tick.
HEADER: Final = "dlock_tick"
#: The header by which Celery's beat, from 5.7 on, marks whatever it sends.
_BEATS: Final = "celery_beat_task"


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
        """What tells this tick from all others of its lock name; an entry's name never becomes part of a key."""
        text = f"{round(self.due * 1e6)}:{self.entry}"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def header_for(task: str, entry: str, due: float) -> dict[str, dict[str, Any]]:
    """The header of a message that is sent for a tick. A body may hand its headers on, so it names its task."""
    return {HEADER: {"task": task, "entry": entry, "due": due}}


def tick_of(task: str, headers: Mapping[str, Any] | None, now: float) -> Tick | None:
    """The tick for which a message was sent; None where it was sent for none, or for one of another task.

    Args:
        task: The task's name.
        headers: The message's headers.
        now: Seconds since the epoch by the worker's clock.

    Raises:
        InvalidTick: The header was not made by a :class:`~celery_dlock.beat.TickScheduler`, or its tick lies ahead.
    """
    header = (headers or {}).get(HEADER)
    if header is None:
        return None
    # Whoever may publish chooses what stands there, so the values are not shown.
    if not isinstance(header, Mapping) or not isinstance(header.get("task"), str):
        raise _invalid(task, "it was not made by celery_dlock.beat")
    if header["task"] != task:
        return None
    entry, due = header.get("entry"), header.get("due")
    if not isinstance(entry, str) or not entry:
        raise _invalid(task, "'entry' is not the name of a schedule entry")
    if not isinstance(due, int | float) or isinstance(due, bool) or not due > 0:  # NaN is not greater either
        raise _invalid(task, "'due' is not a number of seconds since the epoch")
    if due > now + SKEW:
        raise _invalid(
            task, f"'due' is more than {SKEW:g} s ahead of this worker's clock; allowed: clocks that differ by less"
        )
    return Tick(entry, float(due))


def unstamped(headers: Mapping[str, Any] | None) -> bool:
    """Was the message sent by a beat that stamps none? It is for a tick then, and nobody can tell for which."""
    headers = headers or {}
    return headers.get(_BEATS) is True and HEADER not in headers


def _invalid(task: str, why: str) -> InvalidTick:
    return InvalidTick(f"task {task!r}: the header {HEADER!r} is not allowed: {why}")
