"""Schedulers for Celery beat that stamp each message with its tick: the entry's name and due time.

Start beat with ``celery beat -S celery_dlock.beat:DLockScheduler``. To stamp the messages of another scheduler,
combine it with the mix-in::

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

from ..messaging.due_times import adjacent_due_times, is_ours, latest_by_search, now_of
from ..messaging.tick_header import header_for
from ..utils.log import logger

if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object

__all__ = ["DLockScheduler", "TickScheduler"]


#: `_ask_celery` pretends that the last run was this long before the due time: longer than a day and any clock change.
_LONG_BEFORE = timedelta(hours=27)


class TickScheduler(_Base):
    """A mix-in for schedulers of Celery beat. Put it before the scheduler among the bases.

    Each message carries the entry's name and its due time. A task with ``once_per="tick"`` runs once for each of them,
    however many beats send it.

    All beats find an entry due at the same instants, whatever their start time. An interval is due at its multiples
    since the epoch, a crontab at the minutes that it names. After a pause, an entry is sent once, for its latest due
    time.

    If a message cannot be published, this beat does not send that tick again, as in Celery. Another beat
    that reaches the broker sends it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: The due time of each entry that is due and not sent yet, by the entry's name.
        self._due: dict[str, datetime] = {}
        super().__init__(*args, **kwargs)

    def is_due(self, entry: Any) -> Any:
        self._due.pop(entry.name, None)
        plan, last = entry.schedule, _last_run(entry)
        now = now_of(plan)
        if not is_ours(plan):
            entry.last_run_at = last
            state = super().is_due(entry)
            if state[0]:
                self._due[entry.name] = latest_by_search(plan, now, last)
            return state
        latest, following = adjacent_due_times(plan, now)
        wait: float = cast("float", self.max_interval) if following is None else (following - now).total_seconds()
        if latest is None or (last is not None and latest <= last):
            return schedstate(is_due=False, next=wait)
        state = self._ask_celery(entry, latest)
        if not state[0]:
            return state  # disabled, before its start time, or past beat_cron_starting_deadline
        self._due[entry.name] = latest
        return schedstate(is_due=True, next=wait)

    def _ask_celery(self, entry: Any, latest: datetime) -> Any:
        """Return Celery's own answer, as if the entry had last run long before ``latest``."""
        last_run_at = entry.last_run_at
        entry.last_run_at = latest - _LONG_BEFORE - getattr(entry.schedule, "run_every", timedelta(0))
        try:
            return super().is_due(entry)
        finally:
            entry.last_run_at = last_run_at

    def reserve(self, entry: Any) -> Any:
        following: Any = super().reserve(entry)
        due = self._due.get(entry.name)
        if due is None:
            return following
        if not is_ours(entry.schedule):
            if hasattr(following, "model"):
                # Celery set the time of sending, with a time zone. Without USE_TZ, Django cannot store that.
                following.model.last_run_at = _for_django(maybe_make_aware(following.model.last_run_at, timezone.utc))
            return following
        # Celery records the time of sending and computes the next due time from it, so due times would drift.
        following.last_run_at = due
        if hasattr(following, "model"):  # an entry of django-celery-beat
            following.model.last_run_at = _for_django(due)
        elif hasattr(following, "reschedule"):  # an entry of redbeat
            following = following._next_instance(last_run_at=due, only_update_last_run_at=True)  # noqa: SLF001  # no other way
        return following

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002  # Celery's signature
        if advance:
            entry = self.reserve(entry)
        due = self._due.pop(entry.name, None)
        if due is None:
            return super().apply_async(entry, producer=producer, advance=False, **kwargs)
        options = entry.options
        stamp = header_for(entry.task, entry.name, due.timestamp())
        # Restore the options after sending: beats compare them to see whether the schedule has changed.
        entry.options = {**options, "headers": {**(options.get("headers") or {}), **stamp}}
        try:
            return super().apply_async(entry, producer=producer, advance=False, **kwargs)
        finally:
            entry.options = options

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        super().populate_heap(*args, **kwargs)
        # Celery asks the entries themselves, and these compute their due times from their last run.
        self._heap: Any = [self._rescheduled(event) for event in self._heap or ()]
        heapq.heapify(self._heap)

    def _rescheduled(self, event: Any) -> Any:
        entry = event[2]
        try:
            due, wait = self.is_due(entry)
        except Exception:
            logger.exception("Beat entry %s: cannot compute its due time, keeping that of Celery", entry.name)
            return event
        when: Any = self._when  # type: ignore[attr-defined]  # not in the stubs
        return event_t(when(entry, 0 if due else wait) or 0, event[1], entry)

    def maybe_due(self, entry: Any, **kwargs: Any) -> Any:
        """Send the entry if it is due. Unlike redbeat's own method, ask the scheduler and not the entry."""
        due, wait = self.is_due(entry)
        if due:
            logger.info("Scheduler: Sending due task %s (%s)", entry.name, entry.task)
            try:
                self.apply_async(entry, **kwargs)
            except Exception:
                logger.exception("Beat entry %s: cannot send task %s, skipping this tick", entry.name, entry.task)
        return wait


def _last_run(entry: Any) -> datetime | None:
    """Return the time of an entry's last run, with a time zone; None if the entry has no such time."""
    last: datetime | None = entry.last_run_at
    if last is None or last.tzinfo is not None:
        return last
    if last == getattr(getattr(entry, "model", None), "date_changed", None):
        # It has not run yet, so django-celery-beat uses `date_changed`. Without USE_TZ, Django writes `date_changed` in
        # local time. Read as UTC, it could lie hours ahead, and the entry would not be due until then.
        return last.astimezone()
    return maybe_make_aware(last, timezone.utc)


def _for_django(due: datetime) -> datetime:
    """Return a due time in the form of the column ``last_run_at``: naive UTC if ``USE_TZ`` is False."""
    return due if symbol_by_name("django.conf:settings").USE_TZ else due.astimezone(timezone.utc).replace(tzinfo=None)


class DLockScheduler(TickScheduler, PersistentScheduler):
    """Celery's default scheduler with ticks. Start it with ``celery beat -S celery_dlock.beat:DLockScheduler``."""
