"""``on_conflict="replace"`` at work, in three pools: the newest call stops the running one and runs after it."""

import itertools
import os
import signal
import time

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_dlock import CallSkipped
from celery_dlock.store.model import REPLACE_MAX_MS
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually

pytestmark = pytest.mark.invariant("newest-call-stops-the-running-one")

APP = "tests.support.apps.replacing"
#: Seconds of a body that is to be stopped. It ends by itself before the test times out.
LONG = 40
#: Seconds in which a stopped body ends on a machine with much to do. The library itself needs about 1 s.
ROOM = 8.0
POOLS = ["prefork", *(pytest.param(pool, marks=pytest.mark.slow) for pool in ("threads", "gevent"))]


@pytest.fixture(scope="module", params=POOLS)
def environment(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with running_environment(folder, "-E", app=APP, pool=request.param, concurrency=4) as made:
        made.pool = request.param
        yield made


def started(environment, task, *args, **kwargs):
    """Send a call, and wait until its body has begun."""
    result = task.delay(*args, **kwargs)
    environment.entered(id=result.id)
    return result


def ended_by(older, newer):
    with pytest.raises(CallSkipped) as ended:
        older.get(timeout=15)
    assert f"replaced by {newer.id}" in str(ended.value)
    assert ended.value.task_id == newer.id


@pytest.mark.parametrize("kind", ["newest", "early"])
def test_newer_call_stops_the_running_one_and_runs_after_it(environment, tasks, kind):
    n, task = environment.fresh(), getattr(tasks, kind)
    older = started(environment, task, n, LONG)
    sent = time.monotonic()
    newer = task.delay(n, 0.1)
    assert newer.get(timeout=15) == n
    assert environment.history(id=newer.id, what="in")[0]["at"] - sent < ROOM
    ended_by(older, newer)
    assert environment.overlaps(n) == 1
    assert [note["replaced"] for note in environment.history(id=older.id, what="stopped")] == [True]
    environment.free(task, n)
    environment.wait_until_drained()
    assert environment.lines(older.id, "is stopped: .*replaced by")


def test_waiter_is_replaced_by_the_newest_call_and_one_body_is_stopped(environment, tasks):
    n = environment.fresh()
    first = started(environment, tasks.protected, n, LONG)
    calls = [tasks.protected.delay(n, 0.1) for _ in range(1)]
    environment.parked(tasks.protected, n, calls[0])
    for _ in range(3):
        calls.append(tasks.protected.delay(n, 0.1))
        environment.parked(tasks.protected, n, calls[-1])
    assert calls[-1].get(timeout=20) == n
    ended_by(first, calls[0])
    for older, newer in itertools.pairwise(calls):
        ended_by(older, newer)
    assert environment.order(n) == [first.id, calls[-1].id]


def test_stopped_call_ends_its_canvas(environment, tasks):
    n = environment.fresh()
    older = chain(tasks.newest.si(n, LONG), tasks.plain.si("next")).apply_async()
    environment.entered(id=older.parent.id)
    newer = tasks.newest.delay(n)
    ended_by(older.parent, newer)
    with pytest.raises(TaskRevokedError):
        older.get(timeout=10)
    assert newer.get(timeout=10) == n


def test_next_step_of_a_chain_of_one_name_runs(environment, tasks):
    n = environment.fresh()
    assert chain(tasks.newest.si(n), tasks.newest.si(n)).delay().get(timeout=15) == n


def test_body_is_only_asked_to_stop(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.asked, n, 4)
    newer = tasks.asked.delay(n, LONG, "ensure")
    assert older.get(timeout=15) == n
    assert [note["replaced"] for note in environment.history(id=older.id, what="returned")] == [True]
    environment.entered(id=newer.id)
    newest = tasks.asked.delay(n)
    ended_by(newer, newest)
    assert newest.get(timeout=10) == n


@pytest.mark.parametrize("how", ["", "ensure"])
def test_stopped_body_cleans_up_undisturbed(environment, tasks, how):
    n = environment.fresh()
    older = started(environment, tasks.newest, n, LONG, how, "tidy")
    newer = tasks.newest.delay(n)
    ended_by(older, newer)
    assert len(environment.history(id=older.id, what="cleaned")) == 1
    assert newer.get(timeout=15) == n


def test_call_in_the_place_of_another_task_runs(environment, tasks):
    n = environment.fresh()
    assert tasks.newest.delay(n).get(timeout=15) == n
    assert tasks.moved.delay(n).get(timeout=15) == n


def test_call_waits_for_a_body_that_does_not_stop(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.newest, n, 4, "deaf")
    newer = tasks.newest.delay(n)
    assert older.get(timeout=15) == n
    assert newer.get(timeout=15) == n
    assert len(environment.history(id=older.id, what="stopped")) == 1
    assert environment.overlaps(n) == 1


def test_body_runs_undisturbed_for_min_hold(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.protected, n, LONG)
    newer = tasks.protected.delay(n)
    ended_by(older, newer)
    entered, left = (environment.history(id=older.id, what=what)[0]["at"] for what in ("in", "out"))
    assert left - entered > 2.9


def test_autoretry_does_not_catch_the_stop(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.retried, n, LONG)
    newer = tasks.retried.delay(n)
    ended_by(older, newer)
    assert newer.get(timeout=10) == n
    assert len(environment.history(id=older.id, what="in")) == 1


def test_retry_of_the_newest_call_runs(environment, tasks):
    n = environment.fresh()
    assert tasks.newest.delay(n, 0, "retry").get(timeout=15) == n
    assert len(environment.history(n=n, what="in")) == 2


def test_retry_of_an_older_call_is_replaced(environment, tasks):
    n = environment.fresh()
    older = tasks.newest.delay(n, 0, "retry")
    eventually(lambda: environment.history(id=older.id, what="returned"), message="it does not return")
    environment.free(tasks.newest, n)
    newer = started(environment, tasks.newest, n, 3)
    ended_by(older, newer)
    assert newer.get(timeout=15) == n


def test_one_body_finishes_although_calls_never_cease(environment, tasks):
    n, began, sent = environment.fresh(), time.monotonic(), []
    calls = environment.keys(tasks.newest, n).named("replaced")
    while not environment.history(n=n, what="returned"):
        assert time.monotonic() - began < 30, "no body returned"
        sent.append(tasks.newest.delay(n, 2.5))
        time.sleep(0.3)
        if len(sent) == 10:
            # The first body was started an hour ago.
            environment.locks.hincrby(calls, "busy_since", -REPLACE_MAX_MS * 1000)
    assert sent[-1].get(timeout=30) == n
    assert environment.overlaps(n) == 1


def test_process_of_a_stopped_call_dies_and_the_newest_call_still_runs(environment, tasks):
    if environment.pool != "prefork":
        pytest.skip("only prefork has a process for each body")
    n = environment.fresh()
    older = started(environment, tasks.brief, n, LONG, "deaf")
    pid = environment.history(id=older.id, what="in")[0]["pid"]
    newer = tasks.brief.delay(n, 0.1)
    eventually(lambda: environment.history(id=older.id, what="stopped"), message="it is not stopped")
    os.kill(pid, signal.SIGKILL)
    assert newer.get(timeout=20) == n
    ended_by(older, newer)
    assert len(environment.history(id=older.id, what="in")) == 1
    environment.wait_until_drained()


def test_eager_call_runs_at_once_and_is_not_parked(environment, tasks):
    n = environment.fresh()
    assert tasks.newest.apply((n,)).get() == n
    assert not tasks.newest.waiting(n).count
