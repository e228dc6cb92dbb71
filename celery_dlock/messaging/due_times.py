"""The due times of a schedule: the same instants for every beat, whatever its start time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone, tzinfo
from typing import Any, Final, NamedTuple, cast

from celery.schedules import crontab, schedule
from celery.utils.time import maybe_make_aware
from celery.utils.time import timezone as zones

__all__ = ["DueTimes", "adjacent_due_times", "is_ours", "latest_by_search", "now_of"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NO_TIME, _SECOND, _HOUR, _DAY = timedelta(0), timedelta(seconds=1), timedelta(hours=1), timedelta(days=1)
_HOURS: Final = 24
#: A clock change, as at the start of summer time, moves a zone's clock by less than this.
_MAX_SHIFT: Final = 3 * _HOUR
#: Days to search: a crontab for the 29th of February is due every eight years at worst.
_HORIZON: Final = 8 * 366 + 1
#: The highest number of due times that :func:`_walk` goes through, one by one.
_MAX_WALK: Final = 1000


class DueTimes(NamedTuple):
    """The due times next to an instant, in UTC; None where there is none.

    Args:
        latest: The last due time at or before the instant.
        following: The first due time after it.
    """

    latest: datetime | None
    following: datetime | None


def now_of(plan: Any) -> datetime:
    """Return the time of the schedule's own clock, in UTC."""
    return maybe_make_aware(plan.now(), timezone.utc).astimezone(timezone.utc)


def is_ours(plan: Any) -> bool:
    """Return whether this module computes the schedule's due times. For solar and clocked ones, only Celery can."""
    return isinstance(plan, crontab) or (isinstance(plan, schedule) and cast("Any", plan).run_every > _NO_TIME)


def adjacent_due_times(plan: Any, now: datetime) -> DueTimes:
    """Return the due times next to ``now``, which is in UTC.

    An interval is due at its multiples since the epoch: in UTC, or in local time if it is relative. A crontab is due
    at the whole minutes that it names on its zone's clock.

    Clock changes: a minute that the clock leaves out in spring is due later by the length of the gap. A minute that
    the clock shows twice in autumn is due the first time. If the crontab names every hour, it is due both times.
    """
    if isinstance(plan, crontab):
        return DueTimes(_first(plan, now, -1), _first(plan, now, 1))
    latest = _on_grid(plan, now)
    # If the clock is put back during a relative interval, the interval ends later than computed here. Beat then wakes
    # too early, and asks again a second later.
    return DueTimes(latest, max(latest + plan.run_every, now + _SECOND) if plan.relative else latest + plan.run_every)


def _on_grid(plan: Any, now: datetime) -> datetime:
    if not plan.relative:
        return _EPOCH + _floor(now - _EPOCH, plan.run_every)
    shown = now.astimezone(_zone(plan))
    epoch = _EPOCH.replace(tzinfo=None)
    wall = epoch + _floor(shown.replace(tzinfo=None) - epoch, plan.run_every)
    # In an hour that the clock shows twice, only intervals up to an hour are due twice.
    fold = shown.fold if plan.run_every <= _HOUR else 0
    latest = wall.replace(tzinfo=shown.tzinfo, fold=fold).astimezone(timezone.utc)
    if latest > now:
        # The clock skips this wall time in spring, so it converts to an instant after `now`. Go back by as many whole
        # intervals as it takes to reach `now` or earlier.
        wall += _floor(now - latest, plan.run_every)
        latest = wall.replace(tzinfo=shown.tzinfo).astimezone(timezone.utc)
    return latest


def _floor(since: timedelta, step: timedelta) -> timedelta:
    # timedelta counts whole microseconds. Floating seconds could round differently in two beats.
    return since // step * step


def _zone(plan: Any) -> tzinfo:
    zone: tzinfo = zones.get_timezone(plan.tz)
    return zone


# -- crontab


def _first(plan: Any, now: datetime, way: int) -> datetime | None:
    """Return the nearest due time: backwards from ``now``, ``now`` included (``way`` -1), or forwards (1)."""
    zone = _zone(plan)
    day = now.astimezone(zone).date()
    for _ in range(_HORIZON):
        if _falls_on(plan, day):
            found = [at for at in _of_day(plan, day, zone, now) if (at <= now if way < 0 else at > now)]
            if found:
                return max(found) if way < 0 else min(found)
        day += way * _DAY
    return None


def _falls_on(plan: Any, day: date) -> bool:
    return day.month in plan.month_of_year and day.day in plan.day_of_month and day.isoweekday() % 7 in plan.day_of_week


def _of_day(plan: Any, day: date, zone: tzinfo, now: datetime) -> Iterator[datetime]:
    """Yield the due times of a day that can be the nearest to ``now``.

    In an hour that does not contain ``now``, only the first or the last of them can be the nearest. So most hours yield
    two due times. An hour near ``now``, or in which the clock changes, yields all of them.
    """
    hourly = len(plan.hour) == _HOURS
    minutes = sorted(plan.minute)
    before, after = (now - _MAX_SHIFT).astimezone(zone), (now + _MAX_SHIFT).astimezone(zone)
    steady = before.utcoffset() == after.utcoffset()
    for hour in sorted(plan.hour):
        about = datetime(day.year, day.month, day.day, hour, tzinfo=zone)
        near = abs(about.astimezone(timezone.utc) - now) < (_HOUR if steady else _MAX_SHIFT)
        # The clock changes in this hour, so its minutes may not be due in order. Pacific/Chatham skips 2:45 to 3:45:
        # 3:10 is due when the clock shows 4:10, which is after 3:50.
        uneven = about.utcoffset() != about.replace(minute=59).utcoffset()
        for minute in minutes if near or uneven else (minutes[0], minutes[-1]):
            shown = about.replace(minute=minute)
            yield shown.astimezone(timezone.utc)
            again = shown.replace(fold=1)
            if hourly and (again.utcoffset() or _NO_TIME) < (shown.utcoffset() or _NO_TIME):
                yield again.astimezone(timezone.utc)


# -- any other schedule


def latest_by_search(plan: Any, now: datetime, last: datetime | None) -> datetime:
    """Return the last due time at or before ``now``, for a schedule that only computes the next one after an instant.

    The cost grows with the logarithm of the time since ``last``. The result is rounded to a whole second,
    because the answers of such a schedule may vary slightly with the instant where the search began.

    Args:
        plan: A schedule that is due at ``now``.
        now: The current time.
        last: The time of the entry's last run.
    """
    clock, plan.nowfun = plan.nowfun, lambda: now
    try:
        found = _search(lambda at: _next(plan, at, now), now, min(last or now, now) - _DAY)
    finally:
        plan.nowfun = clock
    return _EPOCH + round((found - _EPOCH) / _SECOND) * _SECOND


def _next(plan: Any, at: datetime, now: datetime) -> datetime | None:
    remaining: timedelta | None = plan.remaining_estimate(at)
    return None if remaining is None else now + remaining


def _search(following: Callable[[datetime], datetime | None], now: datetime, since: datetime) -> datetime:
    def due_after(at: datetime) -> datetime | None:
        found = following(at)
        return found if found is not None and found <= now else None

    step, start = timedelta(minutes=1), now
    while (found := due_after(start)) is None:
        if start <= since:
            return now  # no due time found since the last run, although the schedule is due
        start, step = max(since, now - step), 2 * step
    late = min(now, start + step)
    while late - start > _SECOND:
        middle = start + (late - start) / 2
        if (at := due_after(middle)) is None:
            late = middle
        else:
            start, found = middle, at
    return _walk(due_after, found)


def _walk(due_after: Callable[[datetime], datetime | None], found: datetime) -> datetime:
    """Return the last due time. Search again from one hour before the full hour of ``found``: for 10:20, from 9:00.

    The schedule's answers may depend on where a search begins. Here all beats begin at the same hour, so that all find
    the same due time.
    """
    at, latest = _EPOCH + ((found - _EPOCH) // _HOUR - 1) * _HOUR, found
    for _ in range(_MAX_WALK):
        later = due_after(at)
        if later is None or later - at < _SECOND:
            return latest
        at = latest = later
    return found
