"""once_per: after a success the name stays used so long."""

import os
import signal

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError, WorkerLostError

from celery_dlock import LockHeld
from tests.support.environments.policies import running_environment, timed
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("once_per"), concurrency=4) as made:
        yield made


def bodies(environment, n):
    return len(environment.history(what="in", n=n))


@pytest.mark.core
def test_a_used_name_is_skipped_with_a_message_that_names_the_run_that_used_it(environment, tasks):
    n = environment.fresh()
    first = tasks.once.delay(n)
    assert first.get(timeout=10) == n
    environment.free(tasks.once, n)
    second = tasks.once.delay(n)
    seconds, error = timed(lambda: second.get(timeout=10))
    assert isinstance(error, TaskRevokedError)
    assert f"already done by policies.once[{first.id}] on {environment.worker.node}" in str(error)
    assert seconds < 1
    assert bodies(environment, n) == 1


def test_used_name_is_free_after_the_window_and_not_before(environment, tasks):
    n = environment.fresh()
    tasks.once_briefly.delay(n).get(timeout=10)
    (left,) = environment.history(what="out", n=n)

    def runs():
        return not isinstance(timed(lambda: tasks.once_briefly.delay(n).get(timeout=10))[1], TaskRevokedError)

    eventually(runs, 10, every=0.1)
    again = environment.history(what="in", n=n)[1]
    assert 1.5 <= again["at"] - left["at"] < 3.5


@pytest.mark.invariant("used-name-is-not-run")
@pytest.mark.core
@pytest.mark.parametrize("end", ["fail", "ignore", "reject"])
def test_a_body_that_does_not_succeed_leaves_the_name_free(environment, tasks, end):
    n = environment.fresh()
    tasks.once.delay(n, end=end)
    eventually(lambda: environment.history(what="out", n=n))
    environment.free(tasks.once, n)
    assert tasks.once.delay(n).get(timeout=10) == n
    assert bodies(environment, n) == 2


def test_a_retry_leaves_the_name_free_for_its_own_next_run(environment, tasks):
    n = environment.fresh()
    result = tasks.once.delay(n, end="retry")
    assert result.get(timeout=10) == n
    assert [fact["retries"] for fact in environment.history(what="in", n=n)] == [0, 1]
    environment.free(tasks.once, n)
    with pytest.raises(TaskRevokedError, match=f"already done by .*{result.id}"):
        tasks.once.delay(n).get(timeout=10)


def test_a_killed_body_leaves_the_name_free(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.once, n)
    os.kill(environment.entered(id=holding.id)[0]["pid"], signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        holding.result.get(timeout=15)
    environment.free(tasks.once, n)
    assert tasks.once.delay(n).get(timeout=10) == n


def test_killed_body_whose_message_is_redelivered_runs_to_success(environment, tasks):
    n = environment.fresh()
    result = tasks.once_raises.delay(n, end="die")
    assert result.get(timeout=20) == n
    assert bodies(environment, n) == 2


def test_a_skipped_call_does_not_use_the_name(environment, tasks):
    n = environment.fresh()
    with environment.hold(tasks.once, n, end="fail") as holding:
        assert isinstance(timed(lambda: tasks.once.delay(n).get(timeout=10))[1], TaskRevokedError)
        holding.end = holding.let_go
    eventually(lambda: environment.history(what="out", n=n))
    environment.free(tasks.once, n)
    assert tasks.once.delay(n).get(timeout=10) == n


def test_used_name_with_skip_result_returns_it_and_the_chain_continues(environment, tasks):
    n = environment.fresh()
    assert tasks.once_as_value.delay(n).get(timeout=10) == n
    environment.free(tasks.once_as_value, n)
    assert chain(tasks.once_as_value.si(n), tasks.plain.s()).apply_async().get(timeout=10) == "done before"
    assert bodies(environment, n) == 1


def test_a_skip_does_not_make_the_name_used_for_longer(environment, tasks):
    n = environment.fresh()
    tasks.once_as_value.delay(n).get(timeout=10)
    environment.free(tasks.once_as_value, n)
    (mark,) = environment.lock_keys(tasks.once_as_value, n)
    before = environment.locks.pexpiretime(mark)
    assert tasks.once_as_value.delay(n).get(timeout=10) == "done before"
    assert environment.locks.pexpiretime(mark) == before


@pytest.mark.core
@pytest.mark.parametrize("flagged", [True, False], ids=["redelivered", "unflagged"])
def test_copy_of_the_message_that_used_the_name_is_acknowledged(environment, tasks, flagged):
    """Its result stays unchanged."""
    n = environment.fresh()
    holding = environment.hold(tasks.once_raises, n)
    message = environment.unacked(holding.id)
    assert holding.end() == n
    environment.wait_until_drained()
    environment.deliver_again(message, flagged=flagged)
    environment.wait_for_line(holding.id, "is a duplicate")
    environment.wait_until_drained()
    assert environment.state(holding.id) == "SUCCESS"
    assert environment.app.AsyncResult(holding.id).get(timeout=1) == n
    assert bodies(environment, n) == 1


@pytest.mark.invariant("used-name-is-not-run")
def test_a_success_uses_the_name_although_its_lease_was_lost(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.once, n)
    (key,) = (key for key in environment.lock_keys(tasks.once, n) if ":lock:" in key)
    environment.locks.delete(key)  # as a store does that loses its data
    assert holding.end() == n
    eventually(lambda: tasks.once.used(n).state == "used")
    assert isinstance(timed(lambda: tasks.once.delay(n).get(timeout=10))[1], TaskRevokedError)
    assert bodies(environment, n) == 1


def test_call_at_a_held_lock_follows_its_policy_and_at_a_used_name_is_skipped(environment, tasks):
    n = environment.fresh()
    with environment.hold(tasks.once_raises, n), pytest.raises(LockHeld):
        tasks.once_raises.delay(n).get(timeout=10)
    environment.free(tasks.once_raises, n)
    with pytest.raises(TaskRevokedError, match="already done by"):
        tasks.once_raises.delay(n).get(timeout=10)


def test_names_of_other_arguments_are_not_used(environment, tasks):
    n = environment.fresh()
    assert tasks.once.delay(n).get(timeout=10) == n
    assert tasks.once.delay(f"{n}x").get(timeout=10) == f"{n}x"
