"""once_per: after a success the name stays used so long."""

import os
import signal

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError, WorkerLostError

from celery_dlock import LockHeld
from tests.support.environments.policies import running_stage, timed
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with running_stage(tmp_path_factory.mktemp("once_per"), concurrency=4) as made:
        yield made


def bodies(stage, n):
    return len(stage.history(what="in", n=n))


@pytest.mark.core
def test_a_used_name_is_skipped_with_a_message_that_names_the_run_that_used_it(stage, tasks):
    n = stage.fresh()
    first = tasks.once.delay(n)
    assert first.get(timeout=10) == n
    stage.free(tasks.once, n)
    second = tasks.once.delay(n)
    seconds, error = timed(lambda: second.get(timeout=10))
    assert isinstance(error, TaskRevokedError)
    assert f"already done by policies.once[{first.id}] on {stage.worker.node}" in str(error)
    assert seconds < 1
    assert bodies(stage, n) == 1


def test_used_name_is_free_after_the_window_and_not_before(stage, tasks):
    n = stage.fresh()
    tasks.once_briefly.delay(n).get(timeout=10)
    (left,) = stage.history(what="out", n=n)

    def runs():
        return not isinstance(timed(lambda: tasks.once_briefly.delay(n).get(timeout=10))[1], TaskRevokedError)

    eventually(runs, 10, every=0.1)
    again = stage.history(what="in", n=n)[1]
    assert 1.5 <= again["at"] - left["at"] < 3.5


@pytest.mark.invariant("used-name-is-not-run")
@pytest.mark.core
@pytest.mark.parametrize("end", ["fail", "ignore", "reject"])
def test_a_body_that_does_not_succeed_leaves_the_name_free(stage, tasks, end):
    n = stage.fresh()
    tasks.once.delay(n, end=end)
    eventually(lambda: stage.history(what="out", n=n))
    stage.free(tasks.once, n)
    assert tasks.once.delay(n).get(timeout=10) == n
    assert bodies(stage, n) == 2


def test_a_retry_leaves_the_name_free_for_its_own_next_run(stage, tasks):
    n = stage.fresh()
    result = tasks.once.delay(n, end="retry")
    assert result.get(timeout=10) == n
    assert [fact["retries"] for fact in stage.history(what="in", n=n)] == [0, 1]
    stage.free(tasks.once, n)
    with pytest.raises(TaskRevokedError, match=f"already done by .*{result.id}"):
        tasks.once.delay(n).get(timeout=10)


def test_a_killed_body_leaves_the_name_free(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.once, n)
    os.kill(stage.entered(id=holding.id)[0]["pid"], signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        holding.result.get(timeout=15)
    stage.free(tasks.once, n)
    assert tasks.once.delay(n).get(timeout=10) == n


def test_killed_body_whose_message_is_redelivered_runs_to_success(stage, tasks):
    n = stage.fresh()
    result = tasks.once_raises.delay(n, end="die")
    assert result.get(timeout=20) == n
    assert bodies(stage, n) == 2


def test_a_skipped_call_does_not_use_the_name(stage, tasks):
    n = stage.fresh()
    with stage.hold(tasks.once, n, end="fail") as holding:
        assert isinstance(timed(lambda: tasks.once.delay(n).get(timeout=10))[1], TaskRevokedError)
        holding.end = holding.let_go
    eventually(lambda: stage.history(what="out", n=n))
    stage.free(tasks.once, n)
    assert tasks.once.delay(n).get(timeout=10) == n


def test_used_name_with_skip_result_returns_it_and_the_chain_continues(stage, tasks):
    n = stage.fresh()
    assert tasks.once_as_value.delay(n).get(timeout=10) == n
    stage.free(tasks.once_as_value, n)
    assert chain(tasks.once_as_value.si(n), tasks.plain.s()).apply_async().get(timeout=10) == "done before"
    assert bodies(stage, n) == 1


def test_a_skip_does_not_make_the_name_used_for_longer(stage, tasks):
    n = stage.fresh()
    tasks.once_as_value.delay(n).get(timeout=10)
    stage.free(tasks.once_as_value, n)
    (mark,) = stage.lock_keys(tasks.once_as_value, n)
    before = stage.locks.pexpiretime(mark)
    assert tasks.once_as_value.delay(n).get(timeout=10) == "done before"
    assert stage.locks.pexpiretime(mark) == before


@pytest.mark.core
@pytest.mark.parametrize("flagged", [True, False], ids=["redelivered", "unflagged"])
def test_copy_of_the_message_that_used_the_name_is_acknowledged(stage, tasks, flagged):
    """Its result stays unchanged."""
    n = stage.fresh()
    holding = stage.hold(tasks.once_raises, n)
    message = stage.unacked(holding.id)
    assert holding.end() == n
    stage.nothing_left()
    stage.deliver_again(message, flagged=flagged)
    stage.wait_for_line(holding.id, "is a duplicate")
    stage.nothing_left()
    assert stage.state(holding.id) == "SUCCESS"
    assert stage.app.AsyncResult(holding.id).get(timeout=1) == n
    assert bodies(stage, n) == 1


@pytest.mark.invariant("used-name-is-not-run")
def test_a_success_uses_the_name_although_its_lease_was_lost(stage, tasks):
    n = stage.fresh()
    holding = stage.hold(tasks.once, n)
    (key,) = (key for key in stage.lock_keys(tasks.once, n) if ":lock:" in key)
    stage.locks.delete(key)  # as a store does that loses its data
    assert holding.end() == n
    eventually(lambda: tasks.once.used(n).state == "used")
    assert isinstance(timed(lambda: tasks.once.delay(n).get(timeout=10))[1], TaskRevokedError)
    assert bodies(stage, n) == 1


def test_call_at_a_held_lock_follows_its_policy_and_at_a_used_name_is_skipped(stage, tasks):
    n = stage.fresh()
    with stage.hold(tasks.once_raises, n), pytest.raises(LockHeld):
        tasks.once_raises.delay(n).get(timeout=10)
    stage.free(tasks.once_raises, n)
    with pytest.raises(TaskRevokedError, match="already done by"):
        tasks.once_raises.delay(n).get(timeout=10)


def test_names_of_other_arguments_are_not_used(stage, tasks):
    n = stage.fresh()
    assert tasks.once.delay(n).get(timeout=10) == n
    assert tasks.once.delay(f"{n}x").get(timeout=10) == f"{n}x"
