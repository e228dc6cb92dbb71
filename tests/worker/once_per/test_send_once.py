"""once_per where bodies die: what is sent twice, what is held back, and what operators see and settle."""

import json
import os
import signal

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError, WorkerLostError

from celery_dlock import DLockError, InvalidLockOptions, NameUsed, UnknownOutcome
from tests.support.apps.send_once_gateway import running_gateway
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.send_once"
STEPS = ["before", "during", "after"]


class Environment:
    """A worker, a gateway that counts what reaches it, and what the bodies noted."""

    def __init__(self, tasks, gateway, client, urls):
        self.tasks = tasks
        self.gateway = gateway
        self.client = client
        self.urls = urls
        self.workers = []
        self._count = 0

    @property
    def port(self):
        return self.gateway.port

    def fresh(self):
        self._count += 1
        return f"n{self._count}"

    def send(self, task, n, end="", gate="", **options):
        return task.apply_async((n, self.port, end, gate), **options)

    def sent(self, n):
        """Return how often SMS `n` reached the gateway."""
        return self.gateway.sent[n]

    def runs(self, n):
        facts = [json.loads(text) for text in self.client.lrange("runs", 0, -1)]
        return [fact for fact in facts if fact["n"] == n]

    def until_used(self, task, n):
        """A result is there a moment before its run has used the name."""
        eventually(lambda: task.used(n).state == "used")

    def die(self, task, n, end, **options):
        """A first run that dies so; its lock is free when this returns."""
        result = self.send(task, n, end, **options)
        # The watchdog sees the death within a second. Celery stores the end some seconds later.
        eventually(lambda: (use := task.used(n)) and use.state == "unknown", 10)
        return result


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("send_once")
    with Server(folder / "server") as server, running_gateway() as gateway:
        urls = Urls(server.url(0), server.url(1), server.lock_url(2))
        with (
            loaded_app(APP, urls) as tasks,
            running_worker(APP, folder=folder, urls=urls, pool="prefork", concurrency=4) as worker,
        ):
            made = Environment(tasks, gateway, server.client(1), urls)
            made.workers.append(worker)
            yield made
            tasks.app.backend.result_consumer.stop()
            tasks.app.backend.result_consumer._pubsub = None


@pytest.mark.core
@pytest.mark.parametrize("step", STEPS)
class TestAChildDies:
    @pytest.mark.invariant("death-is-no-failure", "after-crash-hold-blocks")
    def test_no_further_call_under_hold_runs_until_the_outcome_is_resolved(self, environment, tasks, step):
        n = environment.fresh()
        died = environment.die(tasks.holds, n, step)
        with pytest.raises(UnknownOutcome) as raised:
            environment.send(tasks.holds, n).get(timeout=10)
        assert f"outcome unknown: send_once.holds[{died.id}] on {environment.workers[0].node} started at" in str(
            raised.value
        )
        assert (raised.value.task_id, raised.value.node) == (died.id, environment.workers[0].node)
        assert environment.sent(n) == (0 if step == "before" else 1)
        assert len(environment.runs(n)) == 1
        arrived = environment.sent(n) == 1  # as an operator finds out at the gateway
        assert tasks.holds.resolve(n, sent=arrived)
        result = environment.send(tasks.holds, n)
        if arrived:
            with pytest.raises(TaskRevokedError, match=f"already done by send_once.holds.{died.id}"):
                result.get(timeout=10)
        else:
            assert result.get(timeout=10) == f"sent {n}"
        assert environment.sent(n) == 1

    @pytest.mark.invariant("death-is-no-failure", "after-crash-run-continues")
    def test_next_call_under_run_knows_of_the_crash_and_has_the_same_key(self, environment, tasks, step):
        n = environment.fresh()
        environment.die(tasks.runs, n, step)
        assert environment.send(tasks.runs, n).get(timeout=10) == f"sent {n}"
        first, second = environment.runs(n)
        assert (first["after_crash"], second["after_crash"]) == (False, True)
        assert first["key"] == second["key"]
        assert len(first["key"]) == 32
        assert environment.sent(n) == (1 if step == "before" else 2)
        assert environment.gateway.keys[n] == {first["key"]}
        environment.until_used(tasks.runs, n)
        with pytest.raises(TaskRevokedError, match="already done by"):
            environment.send(tasks.runs, n).get(timeout=10)


@pytest.mark.invariant("death-is-no-failure")
def test_unwound_body_leaves_an_unknown_outcome(environment, tasks):
    n = environment.fresh()
    environment.send(tasks.holds, n, "exit")
    eventually(lambda: (use := tasks.holds.used(n)) and use.state == "unknown", 10)
    with pytest.raises(UnknownOutcome):
        environment.send(tasks.holds, n).get(timeout=10)


@pytest.mark.invariant("no-unknown-outcome-without-a-body")
@pytest.mark.parametrize("task", ["holds", "runs"])
@pytest.mark.parametrize("end", ["fail", "retry"])
def test_failed_or_retried_body_keeps_the_key_and_no_unknown_outcome(environment, tasks, task, end):
    n = environment.fresh()
    result = environment.send(tasks.__dict__[task], n, end)
    if end == "fail":
        with pytest.raises(ValueError, match="as asked"):
            result.get(timeout=10)
        eventually(lambda: not tasks.__dict__[task].lock_for(n).locked())
        result = environment.send(tasks.__dict__[task], n)
    assert result.get(timeout=10) == f"sent {n}"
    first, second = environment.runs(n)
    assert not second["after_crash"]
    assert first["key"] == second["key"]
    assert environment.sent(n) == 1


@pytest.mark.parametrize("task", ["runs", "holds"])
def test_body_that_returned_has_used_the_name_if_its_result_could_not_be_stored(environment, tasks, task):
    task, n = getattr(tasks, task), environment.fresh()
    with pytest.raises(Exception, match="object"):
        environment.send(task, n, "unreadable").get(timeout=10)
    eventually(lambda: (use := task.used(n)) and use.state == "used")
    with pytest.raises(TaskRevokedError, match="already done"):
        environment.send(task, n).get(timeout=10)
    assert environment.sent(n) == 1


def test_result_of_a_truncated_task_id_is_not_looked_up(environment, tasks):
    n = environment.fresh()
    environment.send(tasks.returns, n, task_id="i" * 300).get(timeout=10)
    eventually(lambda: tasks.returns.used(n).state == "used")
    with pytest.raises(TaskRevokedError, match="already done"):
        environment.send(tasks.returns, n).get(timeout=10)


def test_run_inside_a_held_lock_uses_its_name(environment, tasks):
    n = environment.fresh()
    with tasks.runs.lock_for(n):
        states = [tasks.runs.apply((n, environment.port)).state for _ in range(3)]
    assert states == ["SUCCESS", "REVOKED", "REVOKED"]
    with tasks.runs.lock_for(n):
        assert tasks.runs.apply((n, environment.port)).state == "REVOKED"
    assert environment.sent(n) == 1


def test_used_and_resolve_accept_a_calls_own_window_and_key(environment, tasks):
    task, n = tasks.raises, environment.fresh()
    own = {"key": "own:{n}", "after_crash": "hold"}
    environment.send(task, n, "after", dlock=own)
    eventually(lambda: (use := task.used(n, dlock=own)) and use.state == "unknown", 10)
    assert task.used(n) is None
    assert task.resolve(n, sent=True, dlock=own)
    assert task.used(n, dlock=own).state == "used"
    assert task.forget(n, dlock=own)
    assert task.used(n, dlock=own) is None


def test_unknown_outcome_stays_if_the_next_run_fails(environment, tasks):
    n = environment.fresh()
    died = environment.die(tasks.runs, n, "after")
    environment.send(tasks.runs, n, gate=n)
    eventually(lambda: len(environment.runs(n)) == 2)
    assert tasks.runs.used(n).state == "running"
    assert not tasks.runs.resolve(n, sent=True)  # it runs
    os.kill(environment.runs(n)[1]["pid"], signal.SIGUSR1)  # as a soft limit: an exception in the body
    eventually(lambda: tasks.runs.used(n).state == "unknown", 10)
    assert tasks.runs.used(n).task_id == died.id
    assert environment.send(tasks.runs, n).get(timeout=10) == f"sent {n}"
    assert environment.runs(n)[2]["after_crash"]


@pytest.mark.invariant("after-crash-hold-blocks")
def test_message_redelivered_after_its_child_died_is_held_too(environment, tasks):
    """Its own redelivery is a further call: at most once means not even for itself."""
    n = environment.fresh()
    result = environment.send(tasks.holds_late, n, "during")
    with pytest.raises(UnknownOutcome):
        result.get(timeout=20)
    assert (environment.sent(n), len(environment.runs(n))) == (1, 1)


def test_queue_policy_decides_at_the_grant_and_later_waiters_end_too(environment, tasks):
    n = environment.fresh()
    first = environment.send(tasks.holds_queue, n, gate=n)
    (run,) = eventually(lambda: environment.runs(n))
    waiting = [environment.send(tasks.holds_queue, n) for _ in range(2)]
    eventually(lambda: tasks.holds_queue.waiting(n).count == 2, 10)
    os.kill(run["pid"], signal.SIGKILL)
    for result in waiting:
        with pytest.raises(UnknownOutcome):
            result.get(timeout=20)
    with pytest.raises(WorkerLostError):
        first.get(timeout=20)
    assert (environment.sent(n), len(environment.runs(n))) == (0, 1)
    assert tasks.holds_queue.waiting(n).count == 0


@pytest.mark.invariant("death-is-no-failure", "after-crash-hold-blocks")
def test_call_of_a_dead_worker_is_held_after_its_lease_expires(environment, tasks, tmp_path):
    n = environment.fresh()
    with running_worker(
        APP, "-Q", "dying", folder=tmp_path, urls=environment.urls, pool="prefork", concurrency=1
    ) as worker:
        died = environment.send(tasks.holds_briefly, n, gate=n, queue="dying")
        eventually(lambda: environment.runs(n), 20)
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: not tasks.holds_briefly.lock_for(n).locked(), 10)
    with pytest.raises(UnknownOutcome, match=died.id):
        environment.send(tasks.holds_briefly, n).get(timeout=10)
    assert (environment.sent(n), len(environment.runs(n))) == (0, 1)


class TestOnUsed:
    @pytest.mark.invariant("used-name-is-not-run")
    def test_return_gives_the_first_runs_result_and_the_chain_goes_on(self, environment, tasks):
        n = environment.fresh()
        assert environment.send(tasks.returns, n).get(timeout=10) == f"sent {n}"
        environment.until_used(tasks.returns, n)
        again = chain(tasks.returns.si(n, environment.port), tasks.shout.s()).apply_async()
        assert again.get(timeout=10) == f"SENT {n.upper()}"
        assert again.parent.get(timeout=10) == f"sent {n}"  # stored once the next step is published
        assert environment.sent(n) == 1

    def test_return_skips_if_the_first_result_has_expired(self, environment, tasks):
        n = environment.fresh()
        first = environment.send(tasks.returns, n)
        first.get(timeout=10)
        environment.until_used(tasks.returns, n)
        first.forget()
        with pytest.raises(TaskRevokedError, match="already done by"):
            environment.send(tasks.returns, n).get(timeout=10)
        assert environment.sent(n) == 1

    @pytest.mark.invariant("used-name-is-not-run")
    def test_raise_fails_the_call_and_names_the_first_run(self, environment, tasks):
        n = environment.fresh()
        first = environment.send(tasks.raises, n)
        first.get(timeout=10)
        environment.until_used(tasks.raises, n)
        again = environment.send(tasks.raises, n)
        with pytest.raises(NameUsed) as raised:
            again.get(timeout=10)
        assert again.state == "FAILURE"
        assert (raised.value.task_id, raised.value.node) == (first.id, environment.workers[0].node)
        assert raised.value.name == tasks.raises.lock_name(n)
        assert environment.sent(n) == 1


def test_forever_is_ten_years(environment, tasks):
    n = environment.fresh()
    environment.send(tasks.forever, n).get(timeout=10)
    eventually(lambda: tasks.forever.used(n).state == "used")
    assert 9.9 < tasks.forever.used(n).expires_in / (366 * 24 * 3600) <= 10


@pytest.mark.core
class TestOperators:
    def test_used_returns_the_last_run(self, environment, tasks):
        n = environment.fresh()
        assert tasks.runs.used(n) is None
        running = environment.send(tasks.runs, n, gate=n)
        (run,) = eventually(lambda: environment.runs(n))
        use = tasks.runs.used(n)
        node = environment.workers[0].node
        assert (use.state, use.task, use.task_id, use.worker) == ("running", "send_once.runs", running.id, node)
        assert use.idempotency_key == run["key"]
        environment.client.rpush(f"gate:{n}", "go")
        running.get(timeout=10)
        eventually(lambda: tasks.runs.used(n).state == "used")
        use = tasks.runs.used(n)
        assert (use.task_id, use.idempotency_key) == (running.id, run["key"])
        assert 50 < use.expires_in <= 60

    def test_forget_makes_the_name_free_with_a_new_key(self, environment, tasks):
        n = environment.fresh()
        assert not tasks.runs.forget(n)
        environment.send(tasks.runs, n).get(timeout=10)
        eventually(lambda: not tasks.runs.lock_for(n).locked())
        assert tasks.runs.forget(n)
        assert tasks.runs.used(n) is None
        assert not tasks.runs.forget(n)
        environment.send(tasks.runs, n).get(timeout=10)
        first, second = environment.runs(n)
        assert first["key"] != second["key"]

    def test_resolve_settles_an_unknown_outcome_only(self, environment, tasks):
        n = environment.fresh()
        assert not tasks.holds.resolve(n, sent=True)
        environment.send(tasks.holds, n).get(timeout=10)
        eventually(lambda: tasks.holds.used(n).state == "used")
        assert not tasks.holds.resolve(n, sent=False)
        assert tasks.holds.used(n).state == "used"

    @pytest.mark.parametrize("sent", [None, 1, "yes"])
    def test_resolve_requires_a_bool(self, tasks, sent):
        with pytest.raises(InvalidLockOptions, match=r"invalid sent=.*: expected True or False"):
            tasks.holds.resolve("n", sent=sent)

    def test_resolve_requires_once_per(self, tasks):
        with pytest.raises(InvalidLockOptions, match=r"resolve\(\) needs once_per"):
            tasks.plainly_locked.resolve(sent=True)

    def test_task_without_once_per_has_no_idempotency_key(self, tasks):
        with pytest.raises(DLockError, match="no idempotency key: expected a task with once_per"):
            tasks.plainly_locked.delay().get(timeout=10)

    def test_direct_call_has_an_empty_idempotency_key(self, tasks):
        assert (tasks.runs.lease.after_crash, tasks.runs.lease.idempotency_key) == (False, "")
