"""The stamp, and the scheduler that makes it."""

from __future__ import annotations

import json
import pickle
from datetime import datetime, timedelta, timezone

import pytest
from celery import VERSION, Celery
from celery.beat import Scheduler
from celery.schedules import crontab, schedule

from celery_dlock import InvalidLockOptions, InvalidTick, LockOptions
from celery_dlock.beat import DLockScheduler, TickScheduler
from celery_dlock.messaging.tick_header import Tick, header_for, tick_of, unstamped
from celery_dlock.options.derived import tick_mark_ttl

NOW = 1_800_000_000.0


@pytest.mark.core
def test_a_stamp_survives_json_exactly():
    header = json.loads(json.dumps(header_for("task", "entry", 1_799_999_999.123457)))
    assert tick_of("task", header, NOW) == Tick("entry", 1_799_999_999.123457)


def test_no_stamp_and_one_of_another_task_are_no_tick():
    assert tick_of("task", None, NOW) is None
    assert tick_of("task", {}, NOW) is None
    assert tick_of("task", header_for("another", "entry", NOW), NOW) is None


def test_only_what_a_beat_sent_without_a_stamp_lacks_one():
    assert unstamped({"celery_beat_task": True})
    assert not unstamped({"celery_beat_task": True, **header_for("another", "entry", NOW)})
    assert not unstamped({"celery_beat_task": "by somebody"})
    assert not unstamped({})
    assert not unstamped(None)


def test_a_stamp_may_lie_a_minute_ahead_and_no_more():
    assert tick_of("task", header_for("task", "entry", NOW + 60), NOW) == Tick("entry", NOW + 60)
    with pytest.raises(InvalidTick, match="more than 60 s ahead"):
        tick_of("task", header_for("task", "entry", NOW + 60.001), NOW)


def test_an_error_shows_nothing_of_a_forged_stamp():
    with pytest.raises(InvalidTick) as told:
        tick_of("task", {"dlock_tick": {"task": "task", "entry": "entry", "due": "SECRET"}}, NOW)
    assert "SECRET" not in str(told.value)


def test_digests_are_part_of_the_wire_format():
    assert Tick("entry", NOW).digest == "12cdc34354cf9ae801d334ffdb4ede9c"
    assert len({Tick(*tick).digest for tick in [("a", NOW), ("b", NOW), ("a", NOW + 1e-6)]}) == 3
    assert len(Tick("\ud800", NOW).digest) == 32


def test_a_tick_is_remembered_for_its_grace_three_skews_and_a_margin():
    assert tick_mark_ttl(100) == 340
    assert LockOptions(once_per="tick").once_seconds == 86_640
    assert LockOptions(once_per="tick", misfire_grace=timedelta(minutes=1)).once_seconds == 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"misfire_grace": 60}, "invalid misfire_grace=60.*: it needs once_per='tick'"),
        ({"once_per": 60, "misfire_grace": 60}, "invalid misfire_grace=60.*: it needs"),
        ({"once_per": "tick", "misfire_grace": 0.5}, "invalid misfire_grace=0.5: expected seconds from 1 to"),
        ({"once_per": "tick", "misfire_grace": "x"}, "invalid misfire_grace='x': "),
        ({"once_per": "ticks"}, "invalid once_per='ticks': expected 'forever', 'tick', None, or seconds"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InvalidLockOptions, match=message):
        LockOptions(**options)


# -- the scheduler


class Clock:
    def __init__(self, text):
        self.now = datetime.fromisoformat(text).replace(tzinfo=timezone.utc)

    def __call__(self):
        return self.now


class Beat(TickScheduler, Scheduler):
    """Keeps what it would publish."""

    def __init__(self, app, **kwargs):
        self.sent = []
        super().__init__(app, **kwargs)

    def send_task(self, name, args, kwargs, **options):
        self.sent.append((name, options.get("headers") or {}))

    @property
    def dues(self):
        return [
            datetime.fromtimestamp(headers["dlock_tick"]["due"], timezone.utc).strftime("%d %H:%M:%S")
            for _, headers in self.sent
        ]

    def work(self, clock, until, step):
        while clock.now < until:
            clock.now += step
            while self.tick() == 0:
                pass


def beat_of(plan, zone="UTC", **entry):
    app = Celery("beat", set_as_current=False, broker="memory://", timezone=zone)
    app.conf.beat_schedule = {"entry": {"task": "task", "schedule": plan, **entry}}
    return Beat(app, max_interval=300)


@pytest.mark.parametrize("start", ["2026-06-17T12:00:00.100000", "2026-06-17T12:00:03.700000"])
def test_a_beat_sends_what_is_due_on_the_grid_whenever_it_was_started(start):
    clock = Clock(start)
    beat = beat_of(schedule(5, nowfun=clock))
    beat.work(clock, clock.now + timedelta(seconds=16), timedelta(milliseconds=100))
    assert beat.dues[:3] == ["17 12:00:05", "17 12:00:10", "17 12:00:15"]
    assert beat.sent[0][1]["dlock_tick"]["task"] == "task"
    # Celery marks what its beat sends from 5.7 on; our stamp keeps that mark.
    assert ("celery_beat_task" in beat.sent[0][1]) == (tuple(VERSION)[:2] >= (5, 7))


def test_a_beat_that_is_always_a_little_late_leaves_no_tick_out():
    clock = Clock("2026-06-17T12:00:00.900000")
    beat = beat_of(schedule(1, nowfun=clock))
    beat.work(clock, clock.now + timedelta(seconds=30), timedelta(milliseconds=900))
    assert len(beat.dues) == len(set(beat.dues)) == 31
    # What other schedulers reckon with: of the time of sending, each tick would come a little later than the last.
    assert beat.schedule["entry"].last_run_at == datetime(2026, 6, 17, 12, 0, 31, tzinfo=timezone.utc)


@pytest.mark.invariant("beats-share-ticks", "every-due-tick-runs")
@pytest.mark.parametrize("plan", [lambda clock: schedule(60, nowfun=clock), lambda clock: crontab(nowfun=clock)])
def test_a_beat_that_catches_up_sends_the_latest_tick_alone(plan):
    clock = Clock("2026-06-17T12:00:30")
    beat = beat_of(plan(clock), last_run_at=clock.now - timedelta(days=30))
    beat.work(clock, clock.now + timedelta(seconds=20), timedelta(seconds=1))
    assert beat.dues == ["17 12:00:00"]


@pytest.mark.invariant("beats-share-ticks")
@pytest.mark.parametrize(
    ("day", "expected"),
    [
        ("2026-03-28T22:00", {"29 01:30:00", "30 00:30:00"}),
        ("2026-10-24T22:00", {"25 00:30:00", "26 01:30:00"}),
    ],
)
def test_beats_of_any_start_send_the_same_ticks_once_each_where_clocks_change(day, expected):
    every = set()
    for late in range(6):
        clock = Clock(day)
        end = clock.now + timedelta(days=2)
        clock.now += timedelta(minutes=47 * late)
        beat = beat_of(crontab(minute=30, hour=2, nowfun=clock), zone="Europe/Berlin")
        beat.work(clock, end, timedelta(minutes=1))
        assert len(beat.dues) == len(set(beat.dues))
        assert set(beat.dues) <= expected
        every |= set(beat.dues)
    assert every == expected


def test_an_entrys_own_headers_stay_and_are_not_changed():
    clock = Clock("2026-06-17T12:00:00.500000")
    own = {"x": 1}
    beat = beat_of(schedule(1, nowfun=clock), options={"headers": own})
    beat.work(clock, clock.now + timedelta(seconds=3), timedelta(milliseconds=500))
    assert [headers["x"] for _, headers in beat.sent] == [1, 1, 1]
    assert "dlock_tick" not in own


def test_a_message_that_is_sent_for_no_tick_has_no_stamp():
    clock = Clock("2026-06-17T12:00:00.500000")
    beat = beat_of(schedule(1, nowfun=clock))
    beat.apply_async(beat.schedule["entry"])
    assert "dlock_tick" not in beat.sent[0][1]


def test_beat_cron_starting_deadline_still_counts():
    clock = Clock("2026-06-17T12:10:00")
    beat = beat_of(crontab(minute=0, nowfun=clock), last_run_at=clock.now - timedelta(hours=5))
    beat.app.conf.beat_cron_starting_deadline = 300
    beat.work(clock, clock.now + timedelta(seconds=20), timedelta(seconds=1))
    assert beat.dues == []


def test_the_file_of_the_persistent_scheduler_can_be_read_without_us(tmp_path):
    app = Celery("beat", set_as_current=False, broker="memory://")
    app.conf.beat_schedule = {"entry": {"task": "task", "schedule": 5.0}}
    beat = DLockScheduler(app, schedule_filename=str(tmp_path / "file"))
    entry = beat.schedule["entry"]
    assert type(pickle.loads(pickle.dumps(entry))).__module__ == "celery.beat"
    beat.close()
