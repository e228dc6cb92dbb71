"""Under early acknowledgement the broker keeps the message until it is parked or holds its lock, and no longer."""

import time

import pytest

from tests.conftest import WORKERS
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually


@pytest.fixture(scope="module", params=["prefork", "threads"])
def of_pool(request, tmp_path_factory):
    with running_environment(
        tmp_path_factory.mktemp(request.param), pool=request.param, concurrency=4, separate=True
    ) as made:
        yield made


@pytest.fixture
def environment(of_pool, request):
    request.node.stash[WORKERS] = of_pool.workers
    yield of_pool
    of_pool.lock_server.resume()
    of_pool.let_all_go()


def acknowledged(environment, result, within):
    eventually(lambda: not environment.unacknowledged(result.id), within, message=f"{result.id} is not acknowledged")


@pytest.mark.invariant("acknowledged-after-parking")
def test_message_that_gets_its_lock_is_acknowledged_within_a_second(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.early, n)
    acknowledged(environment, holding, 1)
    assert environment.history(what="out", id=holding.id) == []
    assert holding.end() == n


def test_late_acknowledged_message_is_kept_while_its_body_runs(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.late, n)
    assert environment.unacknowledged(holding.id)
    (result,) = environment.park(environment.tasks.late, n)
    acknowledged(environment, result, 1)
    assert environment.unacknowledged(holding.id)
    holding.end()
    acknowledged(environment, holding, 1)
    assert result.get(timeout=10) == n


@pytest.mark.invariant("acknowledged-after-parking")
def test_parked_message_is_acknowledged_within_a_second(environment):
    n = environment.fresh()
    with environment.hold(environment.tasks.early, n):
        results = environment.park(environment.tasks.early, n, 5)
        for result in results:
            acknowledged(environment, result, 1)
    assert [result.get(timeout=10) for result in results] == [n] * 5
    environment.wait_until_drained()


@pytest.mark.invariant("acknowledged-after-parking")
@pytest.mark.parametrize("held", [False, True])
def test_nothing_is_acknowledged_before_the_store_has_it(environment, held):
    """The store is stopped: it can neither park nor grant."""
    n = environment.fresh()
    holding = environment.hold(environment.tasks.early, n) if held else None
    if holding:
        acknowledged(environment, holding, 1)
    environment.lock_server.pause()
    result = environment.tasks.early.delay(n)
    eventually(lambda: environment.unacknowledged(result.id))
    # Longer than the acknowledgement takes where the store answers.
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        assert environment.unacknowledged(result.id)
        assert not environment.history(what="in", id=result.id)
        time.sleep(0.05)
    environment.lock_server.resume()
    acknowledged(environment, result, 2)
    if holding:
        assert environment.waiters(environment.tasks.early, n) == [result.id]
        holding.let_go()
    assert result.get(timeout=10) == n
    assert len(environment.order(n)) == 1 + held


def test_a_failing_and_a_skipped_one_are_acknowledged_too(environment):
    n = environment.fresh()
    failing = environment.tasks.early.delay(n, end="fail")
    failing.get(timeout=10, propagate=False)
    acknowledged(environment, failing, 1)
    with environment.hold(environment.tasks.three, n):
        environment.park(environment.tasks.three, n, 3)
        refused = environment.tasks.three.delay(n)
        refused.get(timeout=10, propagate=False)
        acknowledged(environment, refused, 1)
    eventually(lambda: environment.tasks.three.waiting(n).count == 0)


def test_persistent_store_causes_no_warning(environment):
    assert "append-only" not in environment.worker.log()
