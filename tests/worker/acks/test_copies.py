"""Copies of one message: a duplicate is not a rival, a duplicate does not run, and nothing is lost."""

import os
import signal

import pytest
from celery.exceptions import WorkerLostError

from tests.support.environments.policies import running_environment
from tests.support.polling import eventually

POLICIES = ["skips_late", "retries_late", "waits_late", "raises_late"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("copies"), concurrency=4) as made:
        yield made


def copied(environment, task, **options):
    """A holder whose copy was put back once; and the message as the broker had it."""
    holding = environment.hold(task, environment.fresh(), **options)
    message = environment.unacked(holding.id)
    environment.deliver_again(message)
    environment.wait_for_line(holding.id, "is republished")
    return holding, message


class TestWhileTheHolderLives:
    @pytest.mark.invariant("duplicate-delivery-is-no-conflict")
    @pytest.mark.core
    @pytest.mark.parametrize("flagged", [True, False], ids=["redelivered", "unflagged"])
    @pytest.mark.parametrize("name", POLICIES)
    def test_duplicate_delivery_is_neither_run_nor_ended(self, environment, tasks, name, flagged):
        task, n = getattr(tasks, name), environment.fresh()
        holding = environment.hold(task, n)
        environment.deliver_again(environment.unacked(holding.id), flagged=flagged)
        environment.wait_for_line(holding.id, "is republished.*another delivery of this message is running")
        assert environment.state(holding.id) == "PENDING"
        assert holding.end() == n
        environment.wait_until_drained()
        assert environment.state(holding.id) == "SUCCESS"
        assert [fact["what"] for fact in environment.history(id=holding.id)] == ["in", "out"]
        assert not environment.locked(task, n)

    def test_duplicate_delivery_is_republished_with_a_growing_delay(self, environment, tasks):
        holding, _ = copied(environment, tasks.skips_late)
        eventually(lambda: len(environment.lines(holding.id, "is republished")) >= 2)
        assert "is republished, retrying in 1 s" in environment.lines(holding.id, "is republished")[0]
        assert "is republished, retrying in 2 s" in environment.lines(holding.id, "is republished")[1]
        holding.end()
        environment.wait_until_drained()

    def test_its_copy_has_no_expiry_which_could_end_the_holders_result(self, environment, tasks):
        holding, message = copied(environment, tasks.skips_late, expires=30)
        assert message["headers"]["expires"]
        kept = eventually(lambda: (m := environment.unacked(holding.id))["headers"].get("dlock") and m)
        assert kept["headers"]["expires"] is None
        holding.end()
        environment.wait_until_drained()

    def test_duplicate_delivery_beside_a_skip_result_changes_nothing(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.skips_as_value_late, n)
        environment.deliver_again(environment.unacked(holding.id))
        environment.wait_for_line(holding.id, "is republished")
        assert environment.state(holding.id) == "PENDING"
        assert holding.end() == n
        environment.wait_until_drained()


class TestAfterTheHoldersEnd:
    @pytest.mark.core
    def test_a_redelivered_copy_of_a_finished_message_does_not_run(self, environment, tasks):
        holding, message = copied(environment, tasks.skips_late)
        value = holding.end()
        environment.wait_until_drained()
        environment.deliver_again(message)
        environment.wait_for_line(holding.id, "is a duplicate")
        environment.wait_until_drained()
        assert len(environment.history(what="in", id=holding.id)) == 1
        assert holding.result.get(timeout=1) == value

    @pytest.mark.parametrize("end", ["", "fail"], ids=["success", "failure"])
    def test_a_duplicate_leaves_the_stored_end_alone(self, environment, tasks, end):
        holding, message = copied(environment, tasks.tracked_late, end=end)
        assert environment.state(holding.id) == "STARTED"
        holding.let_go()
        expected = "FAILURE" if end else "SUCCESS"
        eventually(lambda: environment.state(holding.id) == expected)
        environment.wait_until_drained()
        environment.deliver_again(message)
        eventually(lambda: len(environment.lines(holding.id, "is a duplicate")) == 2)
        environment.wait_until_drained()
        assert environment.state(holding.id) == expected
        assert len(environment.history(what="in", id=holding.id)) == 1

    def test_a_copy_of_a_message_that_retried_itself_does_not_run_beside_the_retry(self, environment, tasks):
        holding, message = copied(environment, tasks.skips_late, end="retry")
        n = holding.end()
        environment.wait_until_drained()
        environment.deliver_again(message)
        environment.wait_for_line(holding.id, "is a duplicate")
        assert [fact["retries"] for fact in environment.history(what="in", n=n)] == [0, 1]
        assert holding.result.get(timeout=1) == n

    @pytest.mark.invariant("visibility-timeout-runs-nothing-twice")
    @pytest.mark.parametrize("flagged", [True, False])
    def test_message_republished_at_a_conflict_is_a_duplicate_after_its_copy(self, environment, tasks, flagged):
        """The original is flagged as redelivered; a later copy of the same chain carries a rank instead."""
        task, n = tasks.retries, environment.fresh()
        with environment.hold(task, n):
            result = task.delay(n)
            original = environment.unacked(result.id)
            eventually(lambda: environment.lines(result.id, "is republished"))
            copy = environment.unacked(result.id)
        result.get(timeout=15)
        environment.wait_until_drained()
        environment.deliver_again(original if flagged else copy, flagged=flagged)
        environment.wait_for_line(result.id, "is a duplicate")
        assert len(environment.history(what="in", id=result.id)) == 1

    @pytest.mark.invariant("duplicates-do-not-run")
    def test_a_fresh_message_with_the_id_of_a_finished_one_runs(self, environment, tasks):
        holding, _ = copied(environment, tasks.skips_late)
        n = holding.end()
        environment.wait_until_drained()
        tasks.skips_late.apply_async((n,), task_id=holding.id)
        environment.entered(id=holding.id, count=2)
        environment.wait_until_drained()

    def test_copy_runs_if_the_holders_child_died_and_the_message_is_requeued(self, environment, tasks):
        holding, _ = copied(environment, tasks.comes_back_late)
        (body,) = environment.history(what="in", id=holding.id)
        os.kill(body["pid"], signal.SIGKILL)
        environment.entered(id=holding.id, count=2)
        environment.open(holding.gate)
        assert holding.result.get(timeout=15)
        environment.wait_until_drained(20)
        assert len(environment.history(what="out", id=holding.id)) == 1

    @pytest.mark.invariant("done-is-final")
    def test_a_message_whose_child_died_for_good_is_not_run_again_by_its_late_copy(self, environment, tasks):
        holding, message = copied(environment, tasks.skips_late)
        (body,) = environment.history(what="in", id=holding.id)
        # 8 s until it is delivered again: Celery may need 5 s to see a child's death, and only then its end is stored.
        eventually(lambda: len(environment.lines(holding.id, "is republished")) >= 4, 15)
        os.kill(body["pid"], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            holding.result.get(timeout=15)
        environment.wait_until_drained(20)
        environment.deliver_again(message)
        eventually(lambda: len(environment.lines(holding.id, "is a duplicate")) >= 1)
        environment.wait_until_drained()
        assert len(environment.history(what="in", id=holding.id)) == 1
        assert environment.state(holding.id) == "FAILURE"
