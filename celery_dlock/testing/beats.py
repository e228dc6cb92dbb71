"""Celery beat in fast motion: all due times of the schedule, sent by several beats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import states
from celery.schedules import maybe_schedule

from ..errors import DLockError
from ..messaging.due_times import adjacent_due_times, is_ours
from ..messaging.tick_header import header_for
from ..runtime import Runtime
from .clock import TravellingClock

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["SentTick", "run_beats"]


class SentTick(NamedTuple):
    """One due time of a schedule's entry.

    Args:
        entry: The name of the entry.
        due: The due time.
        states: The state of the call of each beat.
    """

    entry: str
    due: datetime
    states: tuple[str, ...]

    @property
    def runs(self) -> int:
        """The number of calls that ran and succeeded."""
        return self.states.count(states.SUCCESS)


def run_beats(app: Celery, n: int = 2, hours: float = 24) -> list[SentTick]:
    """Run the app's beat schedule in fast motion with several beats, and fail unless each tick ran once.

    A tick is a due time of an entry whose task has ``once_per="tick"``. Other entries are sent too, and not checked.
    The clocks of the fixture ``dlock`` travel to each due time.

    Args:
        app: The app, within the fixture ``dlock``, with eager calls.
        n: The number of beats.
        hours: Hours of the schedule, from now.

    Returns:
        All due times, in their order.
    """
    clock = Runtime.of(app).clock
    if not isinstance(clock, TravellingClock):
        raise DLockError("the clocks of this app cannot be moved: expected run_beats() within the fixture dlock")
    start = datetime.fromtimestamp(clock.wall(), timezone.utc)
    entries = dict(app.conf.beat_schedule)
    planned = sorted(
        (due, name) for name, entry in entries.items() for due in _due_times(entry["schedule"], start, hours)
    )
    sent = []
    for due, name in planned:
        clock.travel(max(0.0, due.timestamp() - clock.wall()))
        sent.append(SentTick(name, due, tuple(_send(app, name, entries[name], due) for _ in range(n))))
    ticks = [tick for tick in sent if _once_per_tick(app, entries[tick.entry]["task"])]
    wrong = [tick for tick in ticks if tick.runs != 1]
    assert not wrong, f"{len(wrong)} of {len(ticks)} ticks did not run once, the first of them: {wrong[0]}"
    return sent


def _due_times(given: Any, start: datetime, hours: float) -> Iterator[datetime]:
    plan: Any = maybe_schedule(given)
    if not is_ours(plan):
        raise DLockError(f"cannot run {given!r} in fast motion: expected an interval or a crontab")
    at, end = start, start + timedelta(hours=hours)
    while (following := adjacent_due_times(plan, at).following) is not None and following <= end:
        yield following
        at = following


def _send(app: Celery, name: str, entry: Any, due: datetime) -> str:
    headers = header_for(entry["task"], name, due.timestamp())
    task: Any = app.tasks[entry["task"]]
    result = task.apply_async(entry.get("args") or (), entry.get("kwargs") or {}, headers=headers)
    return str(result.state)


def _once_per_tick(app: Celery, name: str) -> bool:
    options = getattr(app.tasks[name], "lock_options", None)
    return options is not None and options.once_per == "tick"
