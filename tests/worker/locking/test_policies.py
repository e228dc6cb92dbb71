"""A call that meets a held lock, under each policy."""

import re
from datetime import datetime, timezone

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_dlock import CallSkipped, LockHeld
from tests.support.environments.policies import running_environment, timed
from tests.support.polling import eventually
from tests.support.servers import LOCK_USER

pytestmark = pytest.mark.usefixtures("show_logs")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("policies"), concurrency=6) as made:
        yield made


class TestSkip:
    @pytest.mark.core
    def test_it_ends_revoked_and_says_who_holds_the_lock_where_and_since_when(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips, n) as holding:
            skipped = tasks.skips.delay(n)
            _, error = timed(lambda: skipped.get(timeout=10))
            assert type(error) is CallSkipped
            assert skipped.state == "REVOKED"
            assert (error.name, error.task_id) == (tasks.skips.lock_name(n), holding.id)
            assert (error.node, type(error.since)) == (environment.worker.node, float)
            (since,) = re.findall(r"since (\S+)", str(error))
            age = datetime.now(timezone.utc) - datetime.fromisoformat(since)
            assert 0 < age.total_seconds() < 10
            assert f"held by policies.skips[{holding.id}] on {environment.worker.node}" in str(error)
            assert tasks.skips.lock_name(n) in str(error)

    @pytest.mark.invariant("finished-holder-is-no-conflict")
    @pytest.mark.core
    def test_call_does_not_wait_for_a_holder_inside_its_body(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips, n):
            times = [timed(lambda: tasks.skips.delay(n).get(timeout=10))[0] for _ in range(5)]
        assert min(times) < 0.5, times

    def test_call_does_not_wait_for_a_holder_that_called_itself_directly(self, environment, tasks):
        n = environment.fresh()
        result = chain(tasks.calls_itself.si(n, f"{n}-gate"), tasks.plain.s()).apply_async()
        environment.entered(n=n)
        seconds = min(timed(lambda: tasks.calls_itself.delay(n).get(timeout=10))[0] for _ in range(3))
        environment.open(f"{n}-gate")
        assert result.get(timeout=10) is True
        assert seconds < 0.5

    def test_skip_is_logged_at_info(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips, n):
            skipped = tasks.skips.apply_async((n,), link_error=tasks.failed_link.s())
            skipped.get(timeout=10, propagate=False)
            (line,) = environment.lines(skipped.id, "skipped")
            assert re.search(r"INFO/", line), line
            assert "held by policies.skips[" in line
        after = environment.worker.log().partition(line)[2]
        assert "Traceback" not in after
        assert not re.search(r"(ERROR|WARNING|CRITICAL)/", after), after
        assert environment.history(id=skipped.id) == []

    def test_it_leaves_the_holders_lock_alone(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips, n) as holding:
            for _ in range(3):
                assert timed(lambda: tasks.skips.delay(n).get(timeout=10))[1].__class__ is CallSkipped
            assert tasks.skips.lock_for(n).holder().task_id == holding.id
        assert [fact["id"] for fact in environment.history(what="in", n=n)] == [holding.id]

    def test_the_lock_is_free_for_the_next_call_after_the_holder(self, environment, tasks):
        n = environment.fresh()
        environment.hold(tasks.skips, n).end()
        environment.free(tasks.skips, n)
        assert tasks.skips.delay(n).get(timeout=10) == n

    def test_another_key_is_another_lock(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips, n):
            assert tasks.skips.delay(f"{n}x").get(timeout=10) == f"{n}x"

    @pytest.mark.parametrize(("name", "value"), [("skips_as_value", {"skipped": True}), ("skips_as_none", None)])
    def test_skip_with_a_skip_result_ends_success_and_the_chain_continues(self, environment, tasks, name, value):
        task, n = getattr(tasks, name), environment.fresh()
        with environment.hold(task, n):
            tail = chain(task.si(n), tasks.plain.s()).apply_async()
            assert tail.get(timeout=10) == value
            # Celery publishes the next step first, and stores the result then.
            assert tail.parent.get(timeout=10) == value
            assert tail.parent.state == "SUCCESS"
        assert len(environment.history(what="in", n=n)) == 1

    def test_a_message_that_already_ran_once_is_retried_not_skipped(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips, n):
            second = tasks.skips.apply_async((n,), retries=1)
            environment.wait_for_line(second.id, "is republished")
            assert second.state not in ("REVOKED", "FAILURE")
        assert second.get(timeout=10) == n
        (body,) = environment.history(what="in", id=second.id)
        assert body["retries"] == 1

    def test_an_ignored_result_is_not_stored(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.skips_unstored, n) as holding:
            skipped = tasks.skips_unstored.delay(n)
            environment.wait_for_line(skipped.id, "skipped")
            holding.let_go()
            eventually(lambda: environment.history(what="out", id=holding.id))
            assert not environment.client.exists(f"celery-task-meta-{skipped.id}")
            environment.open(holding.gate)  # its result is not stored either, so no caller could wait for it
            holding.result.get = lambda **_: None


class TestRetry:
    @pytest.mark.invariant("conflict-is-no-failure")
    @pytest.mark.core
    def test_all_run_one_at_a_time_and_their_own_retries_are_untouched(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.retries_without_own, n):
            later = [tasks.retries_without_own.delay(n) for _ in range(4)]
            for result in later:
                environment.wait_for_line(result.id, "is republished")
        assert [result.get(timeout=20) for result in later] == [n] * 4
        assert {fact["retries"] for fact in environment.history(n=n)} == {0}
        assert len(environment.history(what="in", n=n)) == 5
        assert environment.overlaps(n) == 1

    @pytest.mark.invariant("conflict-is-a-value")
    def test_the_delay_doubles_up_to_its_maximum_and_is_jittered(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.retries, n):
            later = [tasks.retries.delay(n) for _ in range(3)]
            for result in later:
                eventually(lambda result=result: len(environment.lines(result.id, "is republished")) >= 5, 20)
        delays = [
            [
                float(re.search(r"is republished, retrying in (\S+) s", line)[1])
                for line in environment.lines(result.id, "is republished")
            ]
            for result in later
        ]
        for one in delays:
            for got, most in zip(one, [0.1, 0.2, 0.4, 0.4, 0.4], strict=False):
                assert most / 2 <= got <= most, delays
        assert len({one[0] for one in delays}) > 1
        assert [result.get(timeout=20) for result in later] == [n] * 3

    def test_the_task_can_still_retry_itself_afterwards(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.retries, n):
            later = tasks.retries.delay(n, end="retry")
            eventually(lambda: len(environment.lines(later.id, "is republished")) >= 3)
        assert later.get(timeout=15) == n
        assert [fact["retries"] for fact in environment.history(what="in", id=later.id)] == [0, 1]

    def test_retry_beyond_its_limit_fails_with_lock_held(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.retries_twice, n) as holding:
            later = tasks.retries_twice.delay(n)
            with pytest.raises(LockHeld, match=rf"held by policies\.retries_twice\[{holding.id}\].*2 tries"):
                later.get(timeout=15)
            assert later.state == "FAILURE"
            assert len(environment.lines(later.id, "is republished")) == 2
        assert environment.history(what="in", id=later.id) == []

    def test_expiry_is_honoured(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.retries, n):
            later = tasks.retries.apply_async((n,), expires=3.0)
            environment.wait_for_line(later.id, "is republished")
            with pytest.raises(TaskRevokedError, match="expired"):
                later.get(timeout=15)
        assert environment.history(id=later.id) == []


class TestWait:
    @pytest.mark.core
    def test_waiting_call_runs_when_the_release_wakes_it(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits, n) as holding:
            waiter = tasks.waits.delay(n)
            environment.wait_for_line(waiter.id, "received")
            eventually(lambda: _blocked(environment) == 1)
        assert waiter.get(timeout=10) == n
        (left,) = environment.history(what="out", id=holding.id)
        (entered,) = environment.history(what="in", id=waiter.id)
        # The slow poll of a waiter is 2 s.
        assert 0 <= entered["at"] - left["at"] < 1.0

    def test_waiters_run_one_at_a_time(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits, n):
            waiters = [tasks.waits.delay(n) for _ in range(3)]
            eventually(lambda: _blocked(environment) == 3)
        assert [waiter.get(timeout=10) for waiter in waiters] == [n] * 3
        assert environment.overlaps(n) == 1

    def test_it_waits_no_longer_than_its_timeout_and_then_raises(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits_briefly, n) as holding:
            seconds, error = timed(lambda: tasks.waits_briefly.delay(n).get(timeout=10))
            assert isinstance(error, LockHeld)
            assert error.task_id == holding.id
            assert 0.4 <= seconds < 1.4

    @pytest.mark.invariant("conflict-is-a-value")
    def test_skip_applies_after_the_wait(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits_then_skips, n):
            seconds, error = timed(lambda: tasks.waits_then_skips.delay(n).get(timeout=10))
            assert isinstance(error, TaskRevokedError)
            assert 0.3 <= seconds < 1.3

    def test_queue_applies_after_the_wait(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits_then_queues, n):
            later = tasks.waits_then_queues.delay(n)
            assert "; waited 0.3 s (wait)" in environment.wait_for_line(later.id, "is parked")
        assert later.get(timeout=10) == n
        assert environment.overlaps(n) == 1

    def test_call_under_queue_takes_the_lock_at_the_release_while_it_waits(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits_before_it_queues, n):
            waiter = tasks.waits_before_it_queues.delay(n)
            eventually(lambda: _blocked(environment) == 1)
        assert waiter.get(timeout=10) == n
        assert not environment.lines(waiter.id, "is parked")
        assert environment.overlaps(n) == 1

    def test_call_may_wait_for_less_than_its_task(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits, n):
            seconds, error = timed(lambda: tasks.waits.apply_async((n,), dlock={"wait": 0}).get(timeout=9))
            assert isinstance(error, LockHeld)
            assert seconds < 5

    def test_retry_applies_after_the_wait(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.waits_then_retries, n):
            later = tasks.waits_then_retries.delay(n)
            environment.wait_for_line(later.id, "is republished")
        assert later.get(timeout=10) == n
        assert environment.overlaps(n) == 1


class TestRaise:
    @pytest.mark.core
    def test_raise_fails_with_lock_held_that_names_the_holder(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.raises, n) as holding:
            failed = tasks.raises.delay(n)
            _, error = timed(lambda: failed.get(timeout=10))
        assert type(error) is LockHeld
        assert failed.state == "FAILURE"
        assert (error.name, error.task_id, error.node) == (
            tasks.raises.lock_name(n),
            holding.id,
            environment.worker.node,
        )
        assert abs(error.since - datetime.now(timezone.utc).timestamp()) < 20
        assert f"held by policies.raises[{holding.id}] on {environment.worker.node} since " in str(error)

    def test_every_hook_of_a_failure_runs(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.raises, n):
            failed = tasks.raises.apply_async((n,), link_error=tasks.failed_link.s())
            failed.get(timeout=10, propagate=False)
            eventually(lambda: len(environment.history(id=failed.id)) >= 4, message="hooks")
        assert {fact["what"] for fact in environment.history(id=failed.id)} == {
            "on_failure",
            "after_return",
            "task_failure",
            "link_error",
        }

    def test_the_worker_goes_on(self, environment, tasks):
        n = environment.fresh()
        children = set(environment.worker.children())
        with environment.hold(tasks.raises, n):
            for _ in range(3):
                assert isinstance(timed(lambda: tasks.raises.delay(n).get(timeout=10))[1], LockHeld)
        assert set(environment.worker.children()) == children


@pytest.mark.invariant("finished-holder-is-no-conflict")
def test_chain_step_waits_for_a_slow_end_of_its_predecessor(environment, tasks):
    """A hook, a chord part or a result backend may keep it for longer than a follower waits in its slot."""
    ran = {}
    for task in (tasks.slow_skips, tasks.slow_raises, tasks.slow_waits):
        n = environment.fresh()
        ran[n] = chain(task.si(n), task.si(n)).apply_async()
    for n, result in ran.items():
        assert result.get(timeout=30) == n
        assert (len(environment.history(what="in", n=n)), environment.overlaps(n)) == (2, 1)
        assert environment.lines(result.id, "is republished, retrying in .*, whose body has ended")


def _blocked(environment):
    if tables := environment.lock_server.lock_tables(2):
        return tables.waiting_calls()
    return sum((row["cmd"], row["user"]) == ("blpop", LOCK_USER) for row in environment.locks.client_list())
