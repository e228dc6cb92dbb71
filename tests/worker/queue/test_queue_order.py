"""Calls of one name run one at a time, all of them, in the order of their receipt, and no slot waits for them."""

import time

import pytest

from tests.conftest import WORKERS
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually

CALLS = 40
POOLS = [pytest.param("prefork", marks=pytest.mark.core), "threads", "gevent", "solo"]


@pytest.fixture(params=POOLS, scope="module")
def environment_of_pool(request, tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp(request.param), pool=request.param, concurrency=4) as made:
        yield request.param, made


@pytest.fixture
def environment(environment_of_pool, request):
    request.node.stash[WORKERS] = environment_of_pool[1].workers
    yield environment_of_pool[1]
    environment_of_pool[1].let_all_go()


@pytest.fixture
def pool(environment_of_pool):
    return environment_of_pool[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("small"), concurrency=2) as made:
        yield made


@pytest.mark.invariant("rank-follows-receipt")
@pytest.mark.parametrize("name", ["early", "late"])
def test_calls_of_one_name_run_one_at_a_time_in_the_order_of_receipt(environment, name):
    task, n = getattr(environment.tasks, name), environment.fresh()
    results = [task.delay(n) for _ in range(CALLS)]
    assert [result.get(timeout=30) for result in results] == [n] * CALLS
    assert environment.order(n) == [result.id for result in results]
    assert environment.overlaps(n) == 1
    tokens = [fact["token"] for fact in environment.history(what="in", n=n)]
    assert tokens == sorted(set(tokens))
    # Nothing of them is left but the marks of their ends.
    eventually(lambda: not environment.locked(task, n))
    assert task.waiting(n).count == 0
    environment.wait_until_drained()
    assert environment.remains(task, n) == []


@pytest.mark.invariant("rank-follows-receipt")
def test_calls_received_in_the_wrong_order_wait_in_that_of_publication(small, request):
    """Two workers may do so to two messages. Here, one worker receives each message before the one sent before it."""
    request.node.stash[WORKERS] = small.workers
    task, n, queue = small.tasks.late, small.fresh(), f"unread-{small.fresh()}"
    holding = small.hold(task, n)
    sent = [task.apply_async((n,), queue=queue) for _ in range(4)]
    (key,) = small.broker.keys(queue)
    messages = small.broker.lrange(key, 0, -1)
    small.broker.delete(key)
    small.broker.rpush(key, *reversed(messages))
    small.consume(queue)
    small.parked(task, n, *sent)
    holding.let_go()
    for result in sent:
        result.get(timeout=15)
    assert small.order(n) == [holding.id, *(result.id for result in sent)]


@pytest.fixture
def environment_with_slots(environment, pool):
    """Solo has one slot, so that nothing runs beside anything."""
    return None if pool == "solo" else environment


def test_calls_of_different_names_run_beside_each_other(environment_with_slots, environment):
    one, two = environment.fresh(), environment.fresh()
    holding = environment_with_slots and environment.hold(environment.tasks.early, one)
    for _ in range(5):
        assert environment.tasks.early.delay(two).get(timeout=5) == two
    waiting = environment.tasks.early.delay(one)
    if holding:
        environment.parked(environment.tasks.early, one, waiting)
        assert environment.order(one) == [holding.id]
        assert holding.end() == one
    assert waiting.get(timeout=10) == one


@pytest.mark.invariant("rank-follows-receipt")
def test_several_names_at_once_keep_each_its_order(environment):
    names = [environment.fresh() for _ in range(5)]
    sent = {n: [] for n in names}
    for _ in range(8):
        for n in names:
            sent[n].append(environment.tasks.late.delay(n))
    for results in sent.values():
        for result in results:
            result.get(timeout=30)
    for n, results in sent.items():
        assert environment.order(n) == [result.id for result in results]
        assert environment.overlaps(n) == 1


@pytest.mark.core
@pytest.mark.parametrize("name", ["early", "late"])
def test_one_of_two_slots_is_free_while_ten_wait_for_the_other(small, name, request):
    request.node.stash[WORKERS] = small.workers
    task, n = getattr(small.tasks, name), small.fresh()
    holding = small.hold(task, n)
    waiting = small.park(task, n, 10)
    for _ in range(5):
        assert small.tasks.plain.delay("at once").get(timeout=3) == "at once"
    assert small.tasks.other.delay(small.fresh()).get(timeout=3)
    assert small.order(n) == [holding.id]
    eventually(lambda: not [result for result in waiting if small.unacknowledged(result.id)], 1)
    holding.let_go()
    for result in waiting:
        result.get(timeout=15)
    assert small.order(n) == [holding.id, *(result.id for result in waiting)]
    assert small.overlaps(n) == 1


def test_failing_retrying_revoked_and_expired_waiters_delay_no_other(environment):
    """A program holds the lock until all are parked, for under solo a body would keep them from being received."""
    task, n = environment.tasks.late, environment.fresh()
    with task.lock_for(n):
        fails, retries, revoked, expires, last = (
            environment.park(task, n, 1, "", end, **options)[0]
            for end, options in (("fail", {}), ("retry", {}), ("", {}), ("", {"expires": 2}), ("", {}))
        )
        revoked.revoke()
        environment.parked(task, n, fails, retries, expires, last)
        eventually(lambda: environment.state(revoked.id) == "REVOKED")
        past = time.monotonic() + 2
        eventually(lambda: time.monotonic() > past)
    assert last.get(timeout=10) == retries.get(timeout=10) == n
    states = [environment.state(result.id) for result in (fails, retries, revoked, expires, last)]
    assert states == ["FAILURE", "SUCCESS", "REVOKED", "REVOKED", "SUCCESS"]
    assert environment.order(n) == [result.id for result in (fails, retries, last, retries)]
    environment.wait_until_drained()
