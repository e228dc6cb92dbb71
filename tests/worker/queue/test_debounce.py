"""``debounce`` at work, in three pools: each burst runs its newest call, once."""

import time
from collections import defaultdict
from datetime import datetime, timedelta, timezone

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_dlock import CallSkipped
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually

pytestmark = pytest.mark.invariant("debounce-runs-the-newest-call")

#: The two seconds of ``debounce`` of the task `saves`.
WAIT, LAST = 2.0, 4.0
#: Seconds in which a due call begins on a machine with much to do. The library itself needs 0.3 s.
ROOM = 5.0


POOLS = ["prefork", *(pytest.param(pool, marks=pytest.mark.slow) for pool in ("threads", "gevent"))]


@pytest.fixture(scope="module", params=POOLS)
def environment(request, tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp(request.param), "-E", pool=request.param, concurrency=4) as made:
        yield made


def test_each_burst_runs_its_newest_call_once(environment, tasks):
    names = [environment.fresh() for _ in range(4)]
    sent = defaultdict(list)
    for number in range(6):
        for n in names:
            sent[n].append(tasks.saves.apply_async((n,), {"text": str(number)}))
    last = time.monotonic()
    for n in names:
        assert sent[n][-1].get(timeout=15) == n
        bodies = environment.history(n=n, what="in")
        assert [body["text"] for body in bodies] == ["5"]
        assert WAIT - 0.1 < bodies[0]["at"] - last < WAIT + ROOM
    for n in names:
        for older in sent[n][:-1]:
            with pytest.raises(CallSkipped, match=r"debounced by [0-9a-f-]{36}"):
                older.get(timeout=10)
    environment.wait_until_drained()


def test_replaced_call_names_the_newer_one_and_ends_its_canvas(environment, tasks):
    n = environment.fresh()
    older = chain(tasks.saves.si(n), tasks.plain.si("next")).apply_async()
    eventually(lambda: environment.waiters(tasks.saves, n) == [older.parent.id], message="it does not wait")
    newer = tasks.saves.delay(n)
    with pytest.raises(TaskRevokedError) as ended:
        older.parent.get(timeout=10)
    assert f"debounced by {newer.id}" in str(ended.value)
    with pytest.raises(TaskRevokedError):
        older.get(timeout=10)
    assert newer.get(timeout=10) == n
    assert environment.wait_for_line(older.parent.id, "is revoked: .*debounced by")


def test_flood_delays_the_body_by_the_longest_delay_at_most(environment, tasks):
    n, began = environment.fresh(), time.monotonic()
    while time.monotonic() - began < LAST + WAIT:
        tasks.saves.delay(n)
        time.sleep(0.1)
    bodies = environment.entered(n=n)
    assert bodies[0]["at"] - began < LAST + ROOM
    environment.wait_until_drained()


def test_due_call_waits_for_a_held_name_and_a_running_body_goes_on(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.saves, n)
    first = tasks.saves.delay(n, text="first")
    time.sleep(WAIT + 0.5)
    eventually(lambda: environment.state(first.id) == "QUEUED")
    last = tasks.saves.delay(n, text="last")
    with pytest.raises(TaskRevokedError):
        first.get(timeout=10)
    holding.let_go()
    assert holding.result.get(timeout=10) == n
    assert last.get(timeout=10) == n
    assert [body["text"] for body in environment.history(n=n, what="in")] == ["", "last"]
    assert environment.overlaps(n) == 1


def test_retry_is_not_debounced(environment, tasks):
    n = environment.fresh()
    retrying = tasks.saves.delay(n, end="retry")
    environment.entered(id=retrying.id)
    waiting = tasks.saves.delay(n, text="waiting")
    assert retrying.get(timeout=10) == n
    assert waiting.get(timeout=10) == n
    bodies = environment.history(n=n, what="in")
    assert [body["retries"] for body in bodies if body["id"] == retrying.id] == [0, 1]
    again = next(body for body in bodies if body["retries"])
    assert again["at"] - bodies[0]["at"] < WAIT


def test_call_with_an_eta_is_due_at_the_later_of_eta_and_debounce(environment, tasks):
    n, sent = environment.fresh(), time.monotonic()
    eta = datetime.now(timezone.utc) + timedelta(seconds=3)
    assert tasks.saves.apply_async((n,), eta=eta).get(timeout=15) == n
    assert 2.9 < environment.history(n=n, what="in")[0]["at"] - sent < 3 + ROOM


def test_waiting_call_that_is_revoked_does_not_run(environment, tasks):
    n = environment.fresh()
    waiting = tasks.saves.delay(n)
    eventually(lambda: environment.waiters(tasks.saves, n) == [waiting.id], message="it does not wait")
    waiting.revoke()
    with pytest.raises(TaskRevokedError):
        waiting.get(timeout=10)
    time.sleep(WAIT)
    assert not environment.history(n=n, what="in")


def test_eager_call_runs_at_once(environment, tasks):
    n, began = environment.fresh(), time.monotonic()
    assert tasks.saves.apply((n,)).get() == n
    assert time.monotonic() - began < WAIT
