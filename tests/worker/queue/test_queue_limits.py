"""The highest number of waiters of one name, and the fate of the calls above it."""

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_dlock import CallSkipped, LockHeld
from tests.support.environments.queueing import running_stage
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with running_stage(tmp_path_factory.mktemp("limits"), concurrency=4) as made:
        yield made


def full(stage, task):
    """A lock that is held, and as many waiters as may be."""
    n = stage.fresh()
    holding = stage.hold(task, n)
    return n, holding, stage.park(task, n, 3)


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_raise_fails_the_next_one_and_says_how_many_wait(stage, tasks):
    n, holding, waiting = full(stage, tasks.three)
    results = [tasks.three.delay(n) for _ in range(2)]
    for result in results:
        with pytest.raises(LockHeld, match=r"3 already waiting \(queue_limit\)") as error:
            result.get(timeout=10)
        assert f"held by queueing.three[{holding.id}]" in str(error.value)
        assert result.state == "FAILURE"
    assert stage.waiters(tasks.three, n) == [result.id for result in waiting]
    holding.let_go()
    assert [result.get(timeout=10) for result in waiting] == [n] * 3
    assert stage.order(n) == [holding.id, *(result.id for result in waiting)]
    # There is room again.
    assert tasks.three.delay(n).get(timeout=10) == n


def test_a_limit_is_of_one_name(stage, tasks):
    _, holding, waiting = full(stage, tasks.three)
    assert tasks.three.delay(stage.fresh()).get(timeout=10)
    holding.let_go()
    waiting[-1].get(timeout=10)


def test_skip_ends_the_next_one_revoked(stage, tasks):
    n, holding, waiting = full(stage, tasks.three_skip)
    result = chain(tasks.three_skip.si(n), tasks.plain.s()).apply_async()
    for ended in (result.parent, result):
        with pytest.raises(TaskRevokedError, match="3 already waiting"):
            ended.get(timeout=10)
        eventually(lambda ended=ended: stage.state(ended.id) == "REVOKED")
    holding.let_go()
    assert [waiter.get(timeout=10) for waiter in waiting] == [n] * 3
    assert stage.order(n) == [holding.id, *(waiter.id for waiter in waiting)]


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_drop_oldest_ends_the_oldest_waiter_revoked_and_says_so(stage, tasks):
    n, holding, waiting = full(stage, tasks.three_drop)
    results = [tasks.three_drop.delay(n)]
    with pytest.raises(CallSkipped, match=r"replaced by a newer call \(queue_overflow\)") as ousted:
        waiting[0].get(timeout=10)
    assert (ousted.value.name, ousted.value.task_id) == (tasks.three_drop.lock_name(n), results[0].id)
    results.append(tasks.three_drop.delay(n))
    with pytest.raises(TaskRevokedError, match="replaced by a newer call"):
        waiting[1].get(timeout=10)
    assert [stage.state(one.id) for one in waiting] == ["REVOKED", "REVOKED", "QUEUED"]
    stage.parked(tasks.three_drop, n, waiting[2], *results)
    holding.let_go()
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert stage.order(n) == [one.id for one in (holding, waiting[2], *results)]


def test_a_dropped_ones_chain_ends_with_it(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.latest, n)
    followed = chain(tasks.latest.si(n), tasks.plain.s()).apply_async()
    stage.parked(tasks.latest, n, followed.parent)
    newer = tasks.latest.delay(n)
    for ended in (followed.parent, followed):
        with pytest.raises(TaskRevokedError, match="replaced by a newer call"):
            ended.get(timeout=10)
    holding.let_go()
    assert newer.get(timeout=10) == n


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_keep_latest_runs_now_and_once_more_with_the_latest_arguments(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.latest, n)
    results = [tasks.latest.delay(n, text=f"call {number}") for number in range(10)]
    *replaced, last = results
    for result in replaced:
        with pytest.raises(TaskRevokedError, match=r"replaced by a newer call \(queue_overflow\)"):
            result.get(timeout=10)
        assert stage.state(result.id) == "REVOKED"
    stage.parked(tasks.latest, n, last)
    holding.let_go()
    assert last.get(timeout=10) == n
    stage.nothing_left()
    assert [fact["text"] for fact in stage.history(what="in", n=n)] == ["", "call 9"]


def test_keep_latest_in_a_storm_runs_the_last_call_last_and_ends_every_other(stage, tasks):
    n = stage.fresh()
    results = [tasks.latest.delay(n, text=str(number)) for number in range(60)]
    assert results[-1].get(timeout=20) == n
    for result in results:
        result.get(timeout=10, propagate=False)
    states = [stage.state(result.id) for result in results]
    assert set(states) <= {"SUCCESS", "REVOKED"}
    ran = [result.id for result, state in zip(results, states, strict=True) if state == "SUCCESS"]
    assert stage.order(n) == ran
    assert ran[-1] == results[-1].id
    assert stage.overlaps(n) == 1
    stage.nothing_left()


def test_a_granted_one_on_its_way_is_no_waiter_and_is_not_dropped(stage, tasks):
    n, queue = stage.fresh(), f"far-{stage.fresh()}"
    stage.consume(queue)
    holding = stage.hold(tasks.latest, n)
    (granted,) = stage.park(tasks.latest, n, queue=queue)
    stage.ignore(queue)
    holding.end()
    eventually(lambda: stage.lying(queue))
    replaced = tasks.latest.delay(n)
    eventually(lambda: stage.state(replaced.id) == "QUEUED")
    newest = tasks.latest.delay(n)
    with pytest.raises(TaskRevokedError, match="replaced by a newer call"):
        replaced.get(timeout=10)
    stage.consume(queue)
    assert [granted.get(timeout=10), newest.get(timeout=10)] == [n, n]
    assert stage.order(n) == [holding.id, granted.id, newest.id]
