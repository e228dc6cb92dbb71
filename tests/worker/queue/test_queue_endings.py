"""However a holder ends, the next in the queue starts within a second; what runs again goes behind."""

import os
import signal

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_dlock import Lock
from tests.support.environments.queueing import running_environment
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
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("endings"), concurrency=4) as made:
        yield made


@pytest.mark.invariant("every-release-grants")
@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize("end", ENDS)
def test_next_waiter_starts_within_a_second_of_every_ending(environment, tasks, name, end):
    task, n = getattr(tasks, name), environment.fresh()
    how, options, state = ENDS[end]
    holding = environment.hold(task, n, end=how, **options)
    results = environment.park(task, n, 2)
    if "limit" not in end:
        holding.let_go()
    if end == "hard limit":
        # The body cannot say when it was killed.
        at = holding_began(environment, holding) + LIMIT
        assert environment.entered(id=results[0].id)[0]["at"] - at < 2
    else:
        environment.entered(id=results[0].id)
        assert 0 <= environment.handed_over(holding.id, results[0].id) < 1
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert environment.order(n) == [holding.id, *(result.id for result in results)]
    assert environment.overlaps(n) <= 1 or end == "hard limit"
    if state != "STARTED":
        eventually(lambda: environment.state(holding.id) == state, 15)
    if end == "soft limit":
        assert isinstance(holding.result.result, SoftTimeLimitExceeded)
    eventually(lambda: not environment.unacknowledged(holding.id), 10)


def holding_began(environment, holding):
    return environment.history(what="in", id=holding.id)[0]["at"]


@pytest.mark.core
@pytest.mark.parametrize("name", ["early", "late"])
@pytest.mark.parametrize("how", ["retry", "replace"])
def test_message_that_runs_again_goes_behind_the_waiters(environment, tasks, name, how):
    task, n = getattr(tasks, name), environment.fresh()
    holding = environment.hold(task, n, end=how)
    results = environment.park(task, n, 2)
    holding.let_go()
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert holding.result.get(timeout=10) == n
    assert environment.order(n) == [holding.id, *(result.id for result in results), holding.id]
    assert environment.overlaps(n) == 1
    assert 0 <= environment.handed_over(holding.id, results[0].id) < 1


def test_a_message_that_goes_back_to_the_broker_lets_the_next_go_on_and_runs_again(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.late, n, end="requeue")
    results = environment.park(tasks.late, n, 2)
    holding.let_go()
    assert [result.get(timeout=10) for result in results] == [n, n]
    assert holding.result.get(timeout=10) == n
    order = environment.order(n)
    assert order[0] == holding.id
    assert sorted(order) == sorted([holding.id, holding.id, *(result.id for result in results)])
    assert environment.overlaps(n) == 1


def test_a_retry_of_a_parked_task_counts_its_own_tries_only(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.early, n)
    (result,) = environment.park(tasks.early, n, 1, "", "retry")
    holding.let_go()
    assert result.get(timeout=10) == n
    assert [fact["retries"] for fact in environment.history(what="in", id=result.id)] == [0, 1]


@pytest.mark.invariant("every-release-grants")
def test_child_killed_from_outside_hands_off_within_a_second(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.early, n)
    results = environment.park(tasks.early, n, 3)
    (fact,) = environment.history(what="in", id=holding.id)
    os.kill(fact["pid"], signal.SIGKILL)
    eventually(lambda: fact["pid"] not in environment.worker.children())
    environment.entered(id=results[0].id, within=1)
    assert [result.get(timeout=10) for result in results] == [n] * 3


class TestOthersOfTheSameName:
    @pytest.mark.invariant("every-release-grants")
    @pytest.mark.core
    @pytest.mark.parametrize("name", ["shared_skips", "shared_retries"])
    def test_task_of_another_policy_hands_off_to_a_waiter(self, environment, tasks, name):
        n = environment.fresh()
        holding = environment.hold(getattr(tasks, name), n)
        results = environment.park(tasks.shared, n, 2)
        holding.let_go()
        environment.entered(id=results[0].id)
        assert 0 <= environment.handed_over(holding.id, results[0].id) < 1
        assert [result.get(timeout=10) for result in results] == [n, n]

    @pytest.mark.invariant("every-release-grants")
    @pytest.mark.core
    def test_lock_object_in_a_program_hands_off_to_a_waiter(self, environment, tasks):
        n = environment.fresh()
        with Lock(n, app=environment.app):
            results = environment.park(tasks.shared, n, 2)
        # Not later than a sweep would: the program publishes the message itself.
        environment.entered(id=results[0].id, within=1)
        assert [result.get(timeout=10) for result in results] == [n, n]

    @pytest.mark.invariant("waiters-are-not-overtaken")
    def test_lock_object_does_not_overtake_waiters(self, environment, tasks):
        n, queue = environment.fresh(), f"far-{environment.fresh()}"
        environment.consume(queue)
        holding = environment.hold(tasks.shared, n)
        (result,) = environment.park(tasks.shared, n, queue=queue)
        environment.ignore(queue)
        holding.end()
        eventually(lambda: environment.lying(queue))
        # It is granted the lock, and its message is on its way.
        assert Lock(n, app=environment.app).acquire(blocking=False) is False
        with pytest.raises(TaskRevokedError):
            tasks.shared_skips.delay(n).get(timeout=10)
        environment.consume(queue)
        assert result.get(timeout=10) == n

    def test_lock_inside_the_body_is_released_with_it_and_both_queues_continue(self, environment, tasks):
        n = environment.fresh()
        gate = f"gate of {n}"
        result = tasks.nests.delay(n, gate)
        environment.entered(id=result.id)
        eventually(lambda: environment.locked(tasks.nests, f"{n}-inside"))
        (outer,) = environment.park(tasks.nests, n)
        (inner,) = environment.park(tasks.nests, f"{n}-inside")
        assert environment.order(f"{n}-inside") == []
        environment.open(gate)
        assert result.get(timeout=10) == outer.get(timeout=10) == [2, True, 1]
        assert inner.get(timeout=10) == [2, True, 1]
        assert environment.order(n) == [result.id, outer.id]


class TestOncePer:
    @pytest.mark.core
    def test_waiters_for_a_success_end_revoked(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.once, n)
        results = environment.park(tasks.once, n, 4)
        assert holding.end() == n
        for result in results:
            with pytest.raises(TaskRevokedError, match=rf"already done by queueing.once\[{holding.id}\]"):
                result.get(timeout=10)
        assert environment.order(n) == [holding.id]
        assert tasks.once.waiting(n).count == 0

    def test_the_next_one_runs_after_a_failure_and_the_others_end_with_its_success(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.once, n, end="fail")
        first, *others = environment.park(tasks.once, n, 4)
        holding.let_go()
        assert first.get(timeout=10) == n
        for result in others:
            with pytest.raises(TaskRevokedError, match=rf"already done by queueing.once\[{first.id}\]"):
                result.get(timeout=10)
        assert environment.order(n) == [holding.id, first.id]
