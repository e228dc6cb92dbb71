"""The highest number of waiters of one name, and the fate of the calls above it."""

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_dlock import CallSkipped, LockHeld
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("limits"), concurrency=4) as made:
        yield made


def full(environment, task):
    """A lock that is held, and as many waiters as may be."""
    n = environment.fresh()
    holding = environment.hold(task, n)
    return n, holding, environment.park(task, n, 3)


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_raise_fails_the_next_one_and_says_how_many_wait(environment, tasks):
    n, holding, waiting = full(environment, tasks.three)
    results = [tasks.three.delay(n) for _ in range(2)]
    for result in results:
        with pytest.raises(LockHeld, match=r"3 already waiting \(queue_limit\)") as error:
            result.get(timeout=10)
        assert f"held by queueing.three[{holding.id}]" in str(error.value)
        assert result.state == "FAILURE"
    assert environment.waiters(tasks.three, n) == [result.id for result in waiting]
    holding.let_go()
    assert [result.get(timeout=10) for result in waiting] == [n] * 3
    assert environment.order(n) == [holding.id, *(result.id for result in waiting)]
    # There is room again.
    assert tasks.three.delay(n).get(timeout=10) == n


def test_a_limit_is_of_one_name(environment, tasks):
    _, holding, waiting = full(environment, tasks.three)
    assert tasks.three.delay(environment.fresh()).get(timeout=10)
    holding.let_go()
    waiting[-1].get(timeout=10)


def test_skip_ends_the_next_one_revoked(environment, tasks):
    n, holding, waiting = full(environment, tasks.three_skip)
    result = chain(tasks.three_skip.si(n), tasks.plain.s()).apply_async()
    for ended in (result.parent, result):
        with pytest.raises(TaskRevokedError, match="3 already waiting"):
            ended.get(timeout=10)
        eventually(lambda ended=ended: environment.state(ended.id) == "REVOKED")
    holding.let_go()
    assert [waiter.get(timeout=10) for waiter in waiting] == [n] * 3
    assert environment.order(n) == [holding.id, *(waiter.id for waiter in waiting)]


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_drop_oldest_ends_the_oldest_waiter_revoked_and_says_so(environment, tasks):
    n, holding, waiting = full(environment, tasks.three_drop)
    results = [tasks.three_drop.delay(n)]
    with pytest.raises(CallSkipped, match=r"replaced by a newer call \(queue_overflow\)") as ousted:
        waiting[0].get(timeout=10)
    assert (ousted.value.name, ousted.value.task_id) == (tasks.three_drop.lock_name(n), results[0].id)
    results.append(tasks.three_drop.delay(n))
    with pytest.raises(TaskRevokedError, match="replaced by a newer call"):
        waiting[1].get(timeout=10)
    eventually(lambda: [environment.state(one.id) for one in waiting] == ["REVOKED", "REVOKED", "QUEUED"])
    environment.parked(tasks.three_drop, n, waiting[2], *results)
    holding.let_go()
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert environment.order(n) == [one.id for one in (holding, waiting[2], *results)]


def test_a_dropped_ones_chain_ends_with_it(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.latest, n)
    followed = chain(tasks.latest.si(n), tasks.plain.s()).apply_async()
    environment.parked(tasks.latest, n, followed.parent)
    newer = tasks.latest.delay(n)
    for ended in (followed.parent, followed):
        with pytest.raises(TaskRevokedError, match="replaced by a newer call"):
            ended.get(timeout=10)
    holding.let_go()
    assert newer.get(timeout=10) == n


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_keep_latest_runs_now_and_once_more_with_the_latest_arguments(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.latest, n)
    results = [tasks.latest.delay(n, text=f"call {number}") for number in range(10)]
    *replaced, last = results
    for result in replaced:
        with pytest.raises(TaskRevokedError, match=r"replaced by a newer call \(queue_overflow\)"):
            result.get(timeout=10)
        assert environment.state(result.id) == "REVOKED"
    environment.parked(tasks.latest, n, last)
    holding.let_go()
    assert last.get(timeout=10) == n
    environment.wait_until_drained()
    assert [fact["text"] for fact in environment.history(what="in", n=n)] == ["", "call 9"]


def test_keep_latest_in_a_storm_runs_the_last_call_last_and_ends_every_other(environment, tasks):
    n = environment.fresh()
    results = [tasks.latest.delay(n, text=str(number)) for number in range(60)]
    assert results[-1].get(timeout=20) == n
    for result in results:
        result.get(timeout=10, propagate=False)
    states = [environment.state(result.id) for result in results]
    assert set(states) <= {"SUCCESS", "REVOKED"}
    ran = [result.id for result, state in zip(results, states, strict=True) if state == "SUCCESS"]
    assert environment.order(n) == ran
    assert ran[-1] == results[-1].id
    assert environment.overlaps(n) == 1
    environment.wait_until_drained()


def test_a_granted_one_on_its_way_is_no_waiter_and_is_not_dropped(environment, tasks):
    n, queue = environment.fresh(), f"far-{environment.fresh()}"
    environment.consume(queue)
    holding = environment.hold(tasks.latest, n)
    (granted,) = environment.park(tasks.latest, n, queue=queue)
    environment.ignore(queue)
    holding.end()
    eventually(lambda: environment.lying(queue))
    replaced = tasks.latest.delay(n)
    eventually(lambda: environment.state(replaced.id) == "QUEUED")
    newest = tasks.latest.delay(n)
    with pytest.raises(TaskRevokedError, match="replaced by a newer call"):
        replaced.get(timeout=10)
    environment.consume(queue)
    assert [granted.get(timeout=10), newest.get(timeout=10)] == [n, n]
    assert environment.order(n) == [holding.id, granted.id, newest.id]
