"""The last ticks of each entry of the beat schedule (``once_per="tick"``): whether a worker ran them, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from celery.beat import ScheduleEntry

from ..errors import DLockError
from ..keys.lock_name import LockName, name_from_text
from ..messaging.due_times import adjacent_due_times, is_ours, now_of
from ..messaging.tick_header import Tick
from ..options.durations import as_seconds
from ..store.operator_model import RunView

if TYPE_CHECKING:
    from celery import Celery

    from ..store.operator import OperatorStore

__all__ = ["TickView", "ticks"]

_JUST_BEFORE: Final = timedelta(microseconds=1)

TickState = Literal["used", "running", "unknown", "open", "missed", "past", ""]


@dataclass(frozen=True, slots=True)
class TickView:
    """A due time of an entry of the beat schedule.

    Args:
        entry: The name of the entry.
        task: The name of its task.
        name: The lock name of its call; "" if it has none.
        due: The due time, in seconds since the epoch by this host's clock; 0.0 if there is none.
        state: ``"used"``: a run succeeded. ``"running"``: its body has not ended. ``"unknown"``: its process died.
            ``"open"``: no run has succeeded, and a message for it would still run. ``"missed"``: no run has succeeded,
            and a message would be too late (``misfire_grace``). ``"past"``: runs of that time are not remembered any
            more. "" if there is a ``problem``.
        run: The run; None if the state is ``"open"``, ``"missed"``, ``"past"`` or "".
        problem: The reason for which the state is not known; "" if it is.
    """

    entry: str
    task: str
    name: str
    due: float
    state: TickState
    run: RunView | None = None
    problem: str = ""


def ticks(app: Celery, store: OperatorStore, recent: int) -> Iterator[TickView]:
    """Yield the last ticks of each entry of ``beat_schedule`` whose task has ``once_per="tick"``, the newest first."""
    for name, given in sorted((app.conf.beat_schedule or {}).items()):
        entry: Any = given
        if not isinstance(given, ScheduleEntry):
            entry = ScheduleEntry(**{**given, "name": name, "app": app})
        options = getattr(app.tasks.get(entry.task), "lock_options", None)
        if options is not None and options.once_per == "tick":
            yield from _ticks_of(app.tasks[entry.task], entry, store, recent)


def _ticks_of(task: Any, entry: Any, store: OperatorStore, recent: int) -> Iterator[TickView]:
    def unknown(problem: str) -> TickView:
        return TickView(entry.name, entry.task, "", 0.0, "", problem=problem)

    plan = entry.schedule
    if not is_ours(plan):
        yield unknown("only beat can tell when a schedule of this kind is due")
        return
    try:
        name = name_from_text(task.lock_name(*(entry.args or ()), **(entry.kwargs or {})))
    except DLockError as error:
        yield unknown(f"its call has no lock name: {error}")
        return
    now = now_of(plan)
    due = adjacent_due_times(plan, now).latest
    if due is None:
        yield unknown("it has not been due yet")
    for _ in range(recent):
        if due is None:
            return
        yield _tick(task, entry, name, due, now, store)
        due = adjacent_due_times(plan, due - _JUST_BEFORE).latest


def _tick(task: Any, entry: Any, name: LockName, due: datetime, now: datetime, store: OperatorStore) -> TickView:
    at, age = due.timestamp(), (now - due).total_seconds()
    run = store.describe(name, Tick(entry.name, at).digest).run
    options = task.lock_options
    state: TickState = "open"
    if run is not None:
        state = run.state
    elif age > (options.once_seconds or 0.0):
        state = "past"
    elif age > as_seconds(options.misfire_grace):
        state = "missed"
    return TickView(entry.name, entry.task, name.text, at, state, run)
