"""Under early acknowledgement the broker keeps the message until it is parked or holds its lock, and no longer."""

import time

import pytest

from tests.conftest import WORKERS
from tests.support.environments.queueing import running_stage
from tests.support.polling import eventually


@pytest.fixture(scope="module", params=["prefork", "threads"])
def of_pool(request, tmp_path_factory):
    with running_stage(
        tmp_path_factory.mktemp(request.param), pool=request.param, concurrency=4, separate=True
    ) as made:
        yield made


@pytest.fixture
def stage(of_pool, request):
    request.node.stash[WORKERS] = of_pool.workers
    yield of_pool
    of_pool.lock_server.resume()
    of_pool.let_all_go()


def acknowledged(stage, result, within):
    eventually(lambda: not stage.unacknowledged(result.id), within, message=f"{result.id} is not acknowledged")


@pytest.mark.invariant("acknowledged-after-parking")
def test_message_that_gets_its_lock_is_acknowledged_within_a_second(stage):
    n = stage.fresh()
    holding = stage.hold(stage.tasks.early, n)
    acknowledged(stage, holding, 1)
    assert stage.history(what="out", id=holding.id) == []
    assert holding.end() == n


def test_late_acknowledged_message_is_kept_while_its_body_runs(stage):
    n = stage.fresh()
    holding = stage.hold(stage.tasks.late, n)
    assert stage.unacknowledged(holding.id)
    (result,) = stage.park(stage.tasks.late, n)
    acknowledged(stage, result, 1)
    assert stage.unacknowledged(holding.id)
    holding.end()
    acknowledged(stage, holding, 1)
    assert result.get(timeout=10) == n


@pytest.mark.invariant("acknowledged-after-parking")
def test_parked_message_is_acknowledged_within_a_second(stage):
    n = stage.fresh()
    with stage.hold(stage.tasks.early, n):
        results = stage.park(stage.tasks.early, n, 5)
        for result in results:
            acknowledged(stage, result, 1)
    assert [result.get(timeout=10) for result in results] == [n] * 5
    stage.nothing_left()


@pytest.mark.invariant("acknowledged-after-parking")
@pytest.mark.parametrize("held", [False, True])
def test_nothing_is_acknowledged_before_the_store_has_it(stage, held):
    """The store is stopped: it can neither park nor grant."""
    n = stage.fresh()
    holding = stage.hold(stage.tasks.early, n) if held else None
    if holding:
        acknowledged(stage, holding, 1)
    stage.lock_server.pause()
    result = stage.tasks.early.delay(n)
    eventually(lambda: stage.unacknowledged(result.id))
    # Longer than the acknowledgement takes where the store answers.
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        assert stage.unacknowledged(result.id)
        assert not stage.history(what="in", id=result.id)
        time.sleep(0.05)
    stage.lock_server.resume()
    acknowledged(stage, result, 2)
    if holding:
        assert stage.waiters(stage.tasks.early, n) == [result.id]
        holding.let_go()
    assert result.get(timeout=10) == n
    assert len(stage.order(n)) == 1 + held


def test_a_failing_and_a_skipped_one_are_acknowledged_too(stage):
    n = stage.fresh()
    failing = stage.tasks.early.delay(n, end="fail")
    failing.get(timeout=10, propagate=False)
    acknowledged(stage, failing, 1)
    with stage.hold(stage.tasks.three, n):
        stage.park(stage.tasks.three, n, 3)
        refused = stage.tasks.three.delay(n)
        refused.get(timeout=10, propagate=False)
        acknowledged(stage, refused, 1)
    eventually(lambda: stage.tasks.three.waiting(n).count == 0)


def test_persistent_store_causes_no_warning(stage):
    assert "append-only" not in stage.worker.log()
