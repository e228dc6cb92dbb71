"""However a holder ends, the next in the queue starts within a second; what runs again goes behind."""

import os
import signal

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_dlock import Lock
from tests.support.environments.queueing import running_stage
from tests.support.polling import eventually

#: Seconds from a body's start in which two others are parked behind it.
LIMIT = 3
#: How the body ends, how the call is published, and the state that is stored.
ENDS = {
    "success": ("", {}, "SUCCESS"),
    "failure": ("fail", {}, "FAILURE"),
    "Ignore": ("ignore", {}, "STARTED"),
    "Reject": ("reject", {}, "STARTED"),
    "soft limit": ("", {"soft_time_limit": LIMIT}, "FAILURE"),
    "hard limit": ("", {"time_limit": LIMIT}, "FAILURE"),
    "dead child": ("die", {}, "FAILURE"),
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with running_stage(tmp_path_factory.mktemp("endings"), concurrency=4) as made:
        yield made


@pytest.mark.invariant("every-release-grants")
@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize("end", ENDS)
def test_next_waiter_starts_within_a_second_of_every_ending(stage, tasks, name, end):
    task, n = getattr(tasks, name), stage.fresh()
    how, options, state = ENDS[end]
    holding = stage.hold(task, n, end=how, **options)
    results = stage.park(task, n, 2)
    if "limit" not in end:
        holding.let_go()
    if end == "hard limit":
        # The body cannot say when it was killed.
        at = holding_began(stage, holding) + LIMIT
        assert stage.entered(id=results[0].id)[0]["at"] - at < 2
    else:
        stage.entered(id=results[0].id)
        assert 0 <= stage.handed_over(holding.id, results[0].id) < 1
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert stage.order(n) == [holding.id, *(result.id for result in results)]
    assert stage.overlaps(n) <= 1 or end == "hard limit"
    if state != "STARTED":
        eventually(lambda: stage.state(holding.id) == state, 15)
    if end == "soft limit":
        assert isinstance(holding.result.result, SoftTimeLimitExceeded)
    eventually(lambda: not stage.unacknowledged(holding.id), 10)


def holding_began(stage, holding):
    return stage.history(what="in", id=holding.id)[0]["at"]


@pytest.mark.core
@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize("how", ["retry", "replace"])
def test_message_that_runs_again_goes_behind_the_waiters(stage, tasks, name, how):
    task, n = getattr(tasks, name), stage.fresh()
    holding = stage.hold(task, n, end=how)
    results = stage.park(task, n, 2)
    holding.let_go()
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert holding.result.get(timeout=10) == n
    assert stage.order(n) == [holding.id, *(result.id for result in results), holding.id]
    assert stage.overlaps(n) == 1
    assert 0 <= stage.handed_over(holding.id, results[0].id) < 1


def test_a_message_that_goes_back_to_the_broker_lets_the_next_go_on_and_runs_again(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.late, n, end="requeue")
    results = stage.park(tasks.late, n, 2)
    holding.let_go()
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert holding.result.get(timeout=10) == n
    order = stage.order(n)
    assert order[0] == holding.id
    assert sorted(order) == sorted([holding.id, holding.id, *(result.id for result in results)])
    assert stage.overlaps(n) == 1


def test_a_retry_of_a_parked_task_counts_its_own_tries_only(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.early, n)
    (result,) = stage.park(tasks.early, n, 1, "", "retry")
    holding.let_go()
    assert result.get(timeout=10) == n
    assert [fact["retries"] for fact in stage.history(what="in", id=result.id)] == [0, 1]


@pytest.mark.invariant("every-release-grants")
def test_child_killed_from_outside_hands_off_within_a_second(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.early, n)
    results = stage.park(tasks.early, n, 3)
    (fact,) = stage.history(what="in", id=holding.id)
    os.kill(fact["pid"], signal.SIGKILL)
    eventually(lambda: fact["pid"] not in stage.worker.children())
    stage.entered(id=results[0].id, within=1)
    assert [result.get(timeout=10) for result in results] == [n] * 3


class TestOthersOfTheSameName:
    @pytest.mark.invariant("every-release-grants")
    @pytest.mark.core
    @pytest.mark.parametrize("name", ["shared_skips", "shared_retries"])
    def test_task_of_another_policy_hands_off_to_a_waiter(self, stage, tasks, name):
        n = stage.fresh()
        holding = stage.hold(getattr(tasks, name), n)
        results = stage.park(tasks.shared, n, 2)
        holding.let_go()
        stage.entered(id=results[0].id)
        assert 0 <= stage.handed_over(holding.id, results[0].id) < 1
        assert [result.get(timeout=10) for result in results] == [n, n]

    @pytest.mark.invariant("every-release-grants")
    @pytest.mark.core
    def test_lock_object_in_a_program_hands_off_to_a_waiter(self, stage, tasks):
        n = stage.fresh()
        with Lock(n, app=stage.app):
            results = stage.park(tasks.shared, n, 2)
        # Not later than a sweep would: the program publishes the message itself.
        stage.entered(id=results[0].id, within=1)
        assert [result.get(timeout=10) for result in results] == [n, n]

    @pytest.mark.invariant("waiters-are-not-overtaken")
    def test_lock_object_does_not_overtake_waiters(self, stage, tasks):
        n, queue = stage.fresh(), f"far-{stage.fresh()}"
        stage.consume(queue)
        holding = stage.hold(tasks.shared, n)
        (result,) = stage.park(tasks.shared, n, queue=queue)
        stage.ignore(queue)
        holding.end()
        eventually(lambda: stage.lying(queue))
        # It is granted the lock, and its message is on its way.
        assert Lock(n, app=stage.app).acquire(blocking=False) is False
        with pytest.raises(TaskRevokedError):
            tasks.shared_skips.delay(n).get(timeout=10)
        stage.consume(queue)
        assert result.get(timeout=10) == n

    def test_lock_inside_the_body_is_released_with_it_and_both_queues_continue(self, stage, tasks):
        n = stage.fresh()
        gate = f"gate of {n}"
        result = tasks.nests.delay(n, gate)
        stage.entered(id=result.id)
        eventually(lambda: stage.locked(tasks.nests, f"{n}-inside"))
        (outer,) = stage.park(tasks.nests, n)
        (inner,) = stage.park(tasks.nests, f"{n}-inside")
        assert stage.order(f"{n}-inside") == []
        stage.open(gate)
        assert result.get(timeout=10) == outer.get(timeout=10) == [2, True, 1]
        assert inner.get(timeout=10) == [2, True, 1]
        assert stage.order(n) == [result.id, outer.id]


class TestOncePer:
    @pytest.mark.core
    def test_waiters_for_a_success_end_revoked(self, stage, tasks):
        n = stage.fresh()
        holding = stage.hold(tasks.once, n)
        results = stage.park(tasks.once, n, 4)
        assert holding.end() == n
        for result in results:
            with pytest.raises(TaskRevokedError, match=rf"already done by queueing.once\[{holding.id}\]"):
                result.get(timeout=10)
        assert stage.order(n) == [holding.id]
        assert tasks.once.waiting(n).count == 0

    def test_the_next_one_runs_after_a_failure_and_the_others_end_with_its_success(self, stage, tasks):
        n = stage.fresh()
        holding = stage.hold(tasks.once, n, end="fail")
        first, *others = stage.park(tasks.once, n, 4)
        holding.let_go()
        assert first.get(timeout=10) == n
        for result in others:
            with pytest.raises(TaskRevokedError, match=rf"already done by queueing.once\[{first.id}\]"):
                result.get(timeout=10)
        assert stage.order(n) == [holding.id, first.id]
