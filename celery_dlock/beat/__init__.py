"""Celery beat that says for which tick a message is: the name of the entry and when it was due.

``celery beat -S celery_dlock.beat:DLockScheduler``, or, for another scheduler::

    class Scheduler(TickScheduler, RedBeatScheduler): ...
"""

from __future__ import annotations

import heapq
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, cast

from celery.beat import PersistentScheduler, Scheduler, event_t
from celery.schedules import schedstate
from celery.utils.imports import symbol_by_name
from celery.utils.time import maybe_make_aware

from ..messaging.ticks import header_for
from ..utils.log import logger
from .schedules import adjacent_due_times, is_ours, latest_by_search, now_of

if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object

__all__ = ["DLockScheduler", "TickScheduler"]


#: So long before a due time Celery is asked as if an entry had run then; longer than a day and any change of a clock.
_LONG_BEFORE = timedelta(hours=27)


class TickScheduler(_Base):
    """A mix-in for a scheduler of Celery beat, to stand before it among the bases.

    Every beat finds an entry due at the same instants, whatever its start time: an interval at the multiples of it
    since the epoch, a crontab at the minutes that it names (:func:`~celery_dlock.beat.schedules.adjacent_due_times`).
    Each message carries the entry's name and its due time, by which a task with ``once_per="tick"`` runs once for
    each. After a stop, an entry is sent once, for its latest due time.

    A message that cannot be published is not sent again for that tick, which is Celery's own way: another beat sends
    it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: What entries were found due for, until their message is sent; by name.
        self._due: dict[str, datetime] = {}
        super().__init__(*args, **kwargs)

    def is_due(self, entry: Any) -> Any:
        self._due.pop(entry.name, None)
        plan, last = entry.schedule, entry.last_run_at
        last = None if last is None else maybe_make_aware(last, timezone.utc)
        now = now_of(plan)
        if not is_ours(plan):
            state = super().is_due(entry)
            if state[0]:
                self._due[entry.name] = latest_by_search(plan, now, last)
            return state
        latest, following = adjacent_due_times(plan, now)
        wait: float = cast("float", self.max_interval) if following is None else (following - now).total_seconds()
        if latest is None or (last is not None and latest <= last):
            return schedstate(is_due=False, next=wait)
        state = self._asked(entry, latest)
        if not state[0]:
            return state  # it is disabled, has not begun, or beat_cron_starting_deadline has passed
        self._due[entry.name] = latest
        return schedstate(is_due=True, next=wait)

    def _asked(self, entry: Any, latest: datetime) -> Any:
        """Whether Celery lets the entry run now, had it run long before ``latest``."""
        kept = entry.last_run_at
        entry.last_run_at = latest - _LONG_BEFORE - getattr(entry.schedule, "run_every", timedelta(0))
        try:
            return super().is_due(entry)
        finally:
            entry.last_run_at = kept

    def reserve(self, entry: Any) -> Any:
        moved: Any = super().reserve(entry)
        due = self._due.get(entry.name)
        if due is None or not is_ours(entry.schedule):
            return moved
        # Celery notes the time of sending, from which it would count on: a little later each time.
        moved.last_run_at = due
        if hasattr(moved, "model"):  # django-celery-beat keeps it there
            moved.model.last_run_at = _as_django_keeps(due)
        elif hasattr(moved, "reschedule"):  # redbeat keeps it in Redis
            moved = moved._next_instance(last_run_at=due, only_update_last_run_at=True)  # noqa: SLF001  # no other way
        return moved

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002  # Celery's signature
        if advance:
            entry = self.reserve(entry)
        due = self._due.pop(entry.name, None)
        if due is None:
            return super().apply_async(entry, producer=producer, advance=False, **kwargs)
        options = entry.options
        stamp = header_for(entry.task, entry.name, due.timestamp())
        # Only while it is sent: beats compare the options of entries to see whether the schedule has changed.
        entry.options = {**options, "headers": {**(options.get("headers") or {}), **stamp}}
        try:
            return super().apply_async(entry, producer=producer, advance=False, **kwargs)
        finally:
            entry.options = options

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        super().populate_heap(*args, **kwargs)
        # Celery asks the entries themselves, which count from when they ran last.
        self._heap: Any = [self._first_look(event) for event in self._heap or ()]
        heapq.heapify(self._heap)

    def _first_look(self, event: Any) -> Any:
        entry = event[2]
        try:
            due, wait = self.is_due(entry)
        except Exception:
            logger.exception("beat cannot tell when %r is due", entry.name)
            return event
        when: Any = self._when  # type: ignore[attr-defined]  # not in the stubs
        return event_t(when(entry, 0 if due else wait) or 0, event[1], entry)

    def maybe_due(self, entry: Any, **kwargs: Any) -> Any:
        """What redbeat does at each of its ticks, but that it asks the scheduler and not the entry."""
        due, wait = self.is_due(entry)
        if due:
            logger.info("Scheduler: Sending due task %s (%s)", entry.name, entry.task)
            try:
                self.apply_async(entry, **kwargs)
            except Exception:
                logger.exception("beat could not send %s", entry.name)
        return wait


def _as_django_keeps(due: datetime) -> datetime:
    """Without time zones (``USE_TZ=False``) Django stores no aware time; django-celery-beat then reads naive UTC."""
    return due if symbol_by_name("django.conf:settings").USE_TZ else due.astimezone(timezone.utc).replace(tzinfo=None)


class DLockScheduler(TickScheduler, PersistentScheduler):
    """Celery's own scheduler, with ticks: ``celery beat -S celery_dlock.beat:DLockScheduler``."""
