"""Due times of schedules: the same instants for every beat."""

from __future__ import annotations

import time
from bisect import bisect_right
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule

from celery_dlock.messaging.due_times import adjacent_due_times, is_ours, latest_by_search

APP = Celery("due", set_as_current=False, timezone="Europe/Berlin")


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def next_to(plan, now):
    return tuple(at and at.isoformat().removesuffix("+00:00") for at in adjacent_due_times(plan, utc(now)))


def dues(plan, start, end, step):
    """Return the due times that a beat finds by checking every `step`, in order."""
    found, now = [], utc(start)
    while now < utc(end):
        latest = adjacent_due_times(plan, now).latest
        if latest is not None and (not found or found[-1] != latest):
            found.append(latest)
        now += step
    return found


@pytest.mark.invariant("beats-share-ticks")
@pytest.mark.core
@pytest.mark.parametrize(
    ("seconds", "now", "latest", "following"),
    [
        (1, "2026-01-01T00:00:00.999999", "2026-01-01T00:00:00", "2026-01-01T00:00:01"),
        (1, "2026-01-01T00:00:01", "2026-01-01T00:00:01", "2026-01-01T00:00:02"),
        (3600, "2026-01-01T10:59:59", "2026-01-01T10:00:00", "2026-01-01T11:00:00"),
        (0.1, "2026-01-01T00:00:00.350000", "2026-01-01T00:00:00.300000", "2026-01-01T00:00:00.400000"),
        (86400, "2026-03-29T12:00", "2026-03-29T00:00:00", "2026-03-30T00:00:00"),
    ],
)
def test_an_interval_is_due_at_its_multiples_since_the_epoch(seconds, now, latest, following):
    assert next_to(schedule(seconds, app=APP), now) == (latest, following)


def test_an_interval_that_divides_no_day_is_due_at_its_multiples_all_the_same():
    latest = adjacent_due_times(schedule(7, app=APP), utc("2026-01-01T00:00:05")).latest
    assert latest.timestamp() % 7 == 0


@pytest.mark.parametrize(
    ("now", "latest"),
    [
        ("2026-03-28T12:00", "2026-03-27T23:00:00"),
        ("2026-03-29T12:00", "2026-03-28T23:00:00"),  # the clock is put forward on this day
        ("2026-03-30T12:00", "2026-03-29T22:00:00"),
        ("2026-10-25T00:30", "2026-10-24T22:00:00"),
        ("2026-10-25T12:00", "2026-10-24T22:00:00"),  # and back on this one
        ("2026-10-26T12:00", "2026-10-25T23:00:00"),
    ],
)
def test_a_relative_day_begins_at_midnight_where_the_app_lives(now, latest):
    assert next_to(schedule(timedelta(days=1), relative=True, app=APP), now)[0] == latest


@pytest.mark.parametrize(
    ("zone", "minutes", "now", "latest"),
    [
        ("Europe/Berlin", 40, "2026-03-29T01:00", "2026-03-29T01:00:00"),  # the clock leaves out 2:40
        ("Europe/Berlin", 40, "2026-03-29T01:20", "2026-03-29T01:20:00"),
        ("Pacific/Chatham", 60, "2026-09-26T14:00", "2026-09-26T13:15:00"),  # and 3:00
        ("Pacific/Chatham", 60, "2026-09-26T14:15", "2026-09-26T14:15:00"),
    ],
)
def test_relative_interval_is_never_due_ahead_of_now(zone, minutes, now, latest):
    app = Celery("zone", set_as_current=False, timezone=zone)
    assert next_to(schedule(timedelta(minutes=minutes), relative=True, app=app), now)[0] == latest


NIGHTLY = {"minute": 30, "hour": 2}
HALF_HOURLY = {"minute": "*/30"}


@pytest.mark.invariant("beats-share-ticks")
@pytest.mark.core
@pytest.mark.parametrize(
    ("fields", "start", "end", "expected"),
    [
        # 2:30 is not shown on the 29th of March: it comes an hour later.
        (NIGHTLY, "2026-03-28T01", "2026-03-31T00", ["27T01:30", "28T01:30", "29T01:30", "30T00:30"]),
        # 2:30 is shown twice on the 25th of October: the first one counts.
        (NIGHTLY, "2026-10-24T00:30", "2026-10-27T00", ["24T00:30", "25T00:30", "26T01:30"]),
        # What runs all day goes on with the time: none left out, none twice.
        (HALF_HOURLY, "2026-03-29T00:30", "2026-03-29T02:01", ["29T00:30", "29T01:00", "29T01:30", "29T02:00"]),
        (
            HALF_HOURLY,
            "2026-10-25T00:00",
            "2026-10-25T02:01",
            ["25T00:00", "25T00:30", "25T01:00", "25T01:30", "25T02:00"],
        ),
    ],
    ids=["nightly-spring", "nightly-autumn", "half-hourly-spring", "half-hourly-autumn"],
)
def test_a_crontab_where_clocks_change(fields, start, end, expected):
    found = dues(crontab(**fields, app=APP), start, end, timedelta(minutes=1))
    assert [at.strftime("%dT%H:%M") for at in found] == expected


@pytest.mark.invariant("beats-share-ticks")
@pytest.mark.parametrize(
    ("zone", "start"),
    [
        ("Europe/Berlin", "2026-03-28T23:00"),
        ("Europe/Berlin", "2026-10-24T23:00"),
        ("Australia/Lord_Howe", "2026-04-04T13:00"),  # by half an hour
        ("Australia/Lord_Howe", "2026-10-03T13:00"),
        ("America/Sao_Paulo", "2018-02-18T00:00"),  # at midnight
        ("America/Sao_Paulo", "2018-11-04T01:00"),
        ("Asia/Kathmandu", "2026-10-24T23:00"),
    ],
)
@pytest.mark.parametrize("fields", [NIGHTLY, HALF_HOURLY, {"minute": "5,50", "hour": "0,1,3,23"}], ids=str)
def test_beats_checking_at_different_times_agree_on_due_times(zone, start, fields):
    plan = crontab(**fields, app=Celery("zone", set_as_current=False, timezone=zone))
    end = (utc(start) + timedelta(hours=5)).replace(tzinfo=None).isoformat()
    seldom, often = (dues(plan, start, end, timedelta(minutes=minutes)) for minutes in (10, 5))
    assert seldom == often
    assert all(earlier < later for earlier, later in pairwise(often))
    assert [adjacent_due_times(plan, at).following for at in often[:-1]] == often[1:]


#: Where a clock is changed in the middle of an hour, by two hours, around midnight, and as late as 22:00.
ODD_CHANGES = [
    ("Pacific/Chatham", "2026-09-26"),
    ("Pacific/Chatham", "2026-04-04"),
    ("Australia/Lord_Howe", "2026-10-03"),
    ("Antarctica/Troll", "2026-03-29"),
    ("America/Nuuk", "2026-03-28"),
    ("America/Scoresbysund", "2026-03-28"),
    ("America/Sao_Paulo", "2018-11-03"),
]
CRONTABS = [
    {"minute": "10,46,50,58", "hour": "3"},
    {"minute": "0,44-46,59", "hour": "1-3"},
    {"minute": "*/7"},
    {"minute": "30", "hour": "0,2,22,23"},
]


def every_due(plan, zone, around_day):
    """All due times of the days about a change, by the rules alone: each minute of each day is looked at."""
    first = datetime.fromisoformat(around_day)
    for minutes in range(-3 * 1440, 4 * 1440):
        shown = (first + timedelta(minutes=minutes)).replace(tzinfo=zone)
        if shown.minute not in plan.minute or shown.hour not in plan.hour:
            continue
        yield shown.astimezone(timezone.utc)
        again = shown.replace(fold=1)
        if len(plan.hour) == 24 and again.utcoffset() < shown.utcoffset():
            yield again.astimezone(timezone.utc)


@pytest.mark.parametrize("fields", CRONTABS, ids=str)
@pytest.mark.parametrize(("zone", "day"), ODD_CHANGES)
def test_crontab_due_times_at_a_clock_change_do_not_depend_on_when_they_are_asked(zone, day, fields):
    plan = crontab(**fields, app=Celery("zone", set_as_current=False, timezone=zone))
    dues_of_all = sorted(set(every_due(plan, ZoneInfo(zone), day)))
    for minutes in range(-1440, 2 * 1440, 35):
        now = utc(day) + timedelta(minutes=minutes)
        after = bisect_right(dues_of_all, now)
        assert adjacent_due_times(plan, now) == (dues_of_all[after - 1], dues_of_all[after]), now


def test_a_crontab_is_due_when_its_zone_shows_what_it_names():
    """By a slow and plain search, where no clock changes."""
    plan = crontab(minute="7,35", hour="3-5,22", day_of_week="mon,thu", app=APP)
    now = utc("2026-06-17T12:00:30")
    at = now.replace(second=0)
    while (shown := at.astimezone(ZoneInfo("Europe/Berlin"))) and not (
        shown.minute in (7, 35) and shown.hour in (3, 4, 5, 22) and shown.isoweekday() in (1, 4)
    ):
        at -= timedelta(minutes=1)
    assert adjacent_due_times(plan, now).latest == at == utc("2026-06-15T20:35")


def test_crontab_of_a_leap_day_is_found_and_an_impossible_one_is_not():
    leap = crontab(minute=0, hour=0, day_of_month=29, month_of_year=2, app=APP)
    assert next_to(leap, "2099-01-01T00:00") == ("2096-02-28T23:00:00", "2104-02-28T23:00:00")


def test_search_cost_does_not_grow_with_a_downtime():
    plan, now = crontab(app=APP), utc("2026-06-17T12:00:30")
    began = time.process_time()
    assert adjacent_due_times(plan, now).latest == utc("2026-06-17T12:00")
    assert time.process_time() - began < 0.1


class Sun(BaseSchedule):
    """Like a solar schedule: only tells what is next, by a clock, and its answer depends a little on the question."""

    asked = 0

    def remaining_estimate(self, last_run_at):
        Sun.asked += 1
        day = (last_run_at - utc("2020-01-01")) // timedelta(days=1)
        noise = timedelta(microseconds=last_run_at.microsecond % 1000)
        events = (utc("2020-01-01T06:00:10.499500") + timedelta(days=day + k, minutes=(day + k) % 90) for k in range(3))
        return next(at for at in events if at > last_run_at + timedelta(seconds=1)) + noise - self.now()


def test_due_time_of_a_schedule_that_only_knows_the_next_one_takes_few_steps():
    plan = Sun(app=APP)
    now = utc("2026-06-17T12:00:30.123456")
    assert not is_ours(plan)
    for last in (now - timedelta(days=365), now - timedelta(hours=7), now - timedelta(hours=30), None):
        Sun.asked = 0
        assert latest_by_search(plan, now, last) == utc("2026-06-17T06:19:10"), last
        assert Sun.asked < 60
    assert plan.nowfun is None


def test_beats_agree_on_the_due_time_of_a_searched_schedule():
    """Though its answers differ by up to a millisecond, on both sides of half a second."""
    start = utc("2026-06-17T12:00:00")
    nows = [start + timedelta(minutes=7 * k, microseconds=137 * k) for k in range(20)]
    found = {latest_by_search(Sun(app=APP), now, now - timedelta(days=2, microseconds=971)) for now in nows}
    assert found == {utc("2026-06-17T06:19:10")}


class Once(BaseSchedule):
    """Like django-celery-beat's clocked schedule: one instant, whatever is asked."""

    def remaining_estimate(self, last_run_at):
        return utc("2026-06-17T06:00") - self.now()


def test_the_due_time_of_a_schedule_with_one_instant_is_that():
    assert latest_by_search(Once(app=APP), utc("2026-06-17T12:00"), None) == utc("2026-06-17T06:00")
