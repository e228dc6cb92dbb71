"""Several beats without a leader: every due tick runs once."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timezone

import pytest

from tests.support.beats import running_beat
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.servers import Server
from tests.support.workers import Urls, running_worker
from tests.worker.once_per.ticks_run import play

#: Seconds between two ticks, for which all beats together may stand still.
EVERY = 2


@pytest.mark.invariant("tick-runs-once", "every-due-tick-runs")
def test_with_three_beats_one_restarted_and_one_paused_every_tick_runs_exactly_once(tmp_path):
    figures = play(tmp_path, 6 * EVERY, EVERY)
    assert (figures.twice, figures.missed) == ([], [])
    # Each of them has sent, so that there was something to skip.
    assert len(figures.sent) == 4
    assert sum(figures.sent.values()) > len(figures.runs)
    assert min(figures.sent.values()) > 0


@pytest.mark.invariant("tick-runs-once", "every-due-tick-runs")
@pytest.mark.parametrize("package", ["redbeat", "django"])
def test_every_tick_runs_exactly_once_with_two_beats_of(package, tmp_path):
    environ = {"TICKING_DATABASE": str(tmp_path / "database"), "TICKING_EVERY": str(EVERY)}
    module = f"tests.support.apps.ticking_{package}"
    with ExitStack() as stack:
        server = stack.enter_context(Server(tmp_path / "server"))
        client = stack.enter_context(server.client())
        urls = Urls(server.url(), server.url(), server.lock_url())
        if package == "django":
            migrate = [sys.executable, "-m", module]
            subprocess.run(migrate, check=True, cwd=ROOT, env={**os.environ, **urls.environ(), **environ})
        stack.enter_context(running_worker("tests.support.apps.ticking", folder=tmp_path, urls=urls))
        beats = [
            stack.enter_context(
                running_beat(module, name, folder=tmp_path, urls=urls, scheduler=f"{module}:Scheduler", environ=environ)
            )
            for name in ("one", "two")
        ]
        eventually(lambda: all("Sending due task" in beat.log() for beat in beats), 30, message="not both send")
        until = client.llen("runs") + 3
        eventually(lambda: client.llen("runs") >= until, 60, message="ticks do not run")
        ticks = [json.loads(text)["tick"] for text in client.lrange("runs", 0, -1)]
    assert {tick["entry"] for tick in ticks} == {"often"}
    runs = Counter(tick["due"] for tick in ticks)
    first, last = min(runs), max(runs)
    assert runs == Counter(first + EVERY * k for k in range(round((last - first) / EVERY) + 1))


def first_ticks_without_time_zones(kept, zone, kind):
    """Return the due times of a beat's first ticks, and the last run that it keeps, all in seconds."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.apps.django_without_time_zones", kept, zone, kind]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    *due, last = run.stdout.split()
    return [float(text) for text in due], datetime.fromisoformat(last).replace(tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo"])
@pytest.mark.parametrize("kept", ["naive", "aware"])
def test_django_beat_without_time_zones_keeps_due_times_and_goes_on(kept, zone):
    """`DJANGO_CELERY_BEAT_TZ_AWARE` says what django-celery-beat itself would keep; Django refuses an aware time."""
    due, last = first_ticks_without_time_zones(kept, zone, "often")
    assert len(due) == 3
    assert last == due[-1]
    assert abs(last - time.time()) < 30


@pytest.mark.parametrize("kept", ["naive", "aware"])
def test_django_beat_without_time_zones_keeps_the_run_of_a_clocked_entry(kept):
    due, last = first_ticks_without_time_zones(kept, "Asia/Tokyo", "clocked")
    assert len(due) == 1
    assert abs(last - due[0]) < 30


@pytest.mark.parametrize("scheduler", ["celery.beat:PersistentScheduler", "celery_dlock.beat:DLockScheduler"])
def test_worker_beat_uses_the_scheduler_setting_and_warns_if_it_stamps_no_ticks(scheduler, tmp_path):
    environ = {"TICKING_SCHEDULER": scheduler, "TICKING_EVERY": "1"}
    with ExitStack() as stack:
        server = stack.enter_context(Server(tmp_path / "server"))
        client = stack.enter_context(server.client())
        urls = Urls(server.url(), server.url(), server.lock_url())
        schedule = ("-B", "--schedule", str(tmp_path / "schedule"))
        worker = stack.enter_context(
            running_worker("tests.support.apps.ticking", *schedule, folder=tmp_path, urls=urls, environ=environ)
        )
        eventually(lambda: client.llen("runs") >= 2, 30, message="ticks do not run")
        stamped = all(json.loads(text)["tick"] for text in client.lrange("runs", 0, -1))
        told = "has once_per='tick' but its message carries no due time" in worker.log()
    assert (stamped, told) == ((True, False) if "dlock" in scheduler else (False, True))
