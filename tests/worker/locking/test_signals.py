"""Celery signals and monitor events of locks, in the worker and outside of it."""

import json
from contextlib import suppress
from threading import Thread

import pytest
from celery.events.state import State

from celery_dlock import Lock, signals
from tests.support.environments.policies import running_environment, timed
from tests.support.polling import eventually

KINDS = ["acquired", "refused", "released", "lost"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Its worker sends events."""
    with running_environment(tmp_path_factory.mktemp("signals"), "-E", concurrency=3) as made:
        yield made


class Monitor:
    """Everything that workers tell monitors."""

    def __init__(self, app):
        self.events = []
        self.state = State()
        self._app = app
        self._stop = False
        self._ready = False
        self._thread = Thread(target=self._listen)

    def __enter__(self):
        self._thread.start()
        eventually(lambda: self._ready)
        return self

    def __exit__(self, *_):
        self._stop = True
        self._thread.join(10)

    def _listen(self):
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self._heard})
            with receiver.consumer_context(wakeup=False) as (own, _, _):
                while not self._stop:
                    with suppress(TimeoutError):
                        own.drain_events(timeout=0.2)
                    self._ready = True  # not before: kombu subscribes at the first look

    def _heard(self, event):
        self.events.append(event)
        self.state.event(dict(event))

    def of(self, task_id):
        return [event["type"] for event in self.events if event.get("uuid") == task_id]

    def wait_for(self, task_id, kind):
        eventually(lambda: kind in self.of(task_id), message=f"{kind} of {task_id}")
        return next(event for event in self.events if event.get("uuid") == task_id and event["type"] == kind)


class TestMonitorEvents:
    def test_run_sends_acquired_and_released_and_keeps_celerys_state(self, environment, tasks):
        n = environment.fresh()
        with Monitor(environment.app) as monitor:
            result = tasks.skips.delay(n)
            result.get(timeout=10)
            acquired = monitor.wait_for(result.id, "dlock-acquired")
            monitor.wait_for(result.id, "dlock-released")
            monitor.wait_for(result.id, "task-succeeded")
        assert acquired["name"] == tasks.skips.lock_name(n)
        assert acquired["token"] == environment.history(what="in", id=result.id)[0]["token"]
        assert acquired["hostname"] == environment.worker.node
        assert monitor.state.tasks[result.id].state == "SUCCESS"

    @pytest.mark.core
    def test_skip_sends_signal_and_monitors_leave_started(self, environment, tasks):
        n = environment.fresh()
        with Monitor(environment.app) as monitor, environment.hold(tasks.skips, n) as holding:
            result = tasks.skips.delay(n)
            result.get(timeout=10, propagate=False)
            skipped = monitor.wait_for(result.id, "dlock-skipped")
            monitor.wait_for(result.id, "dlock-refused")
            monitor.wait_for(result.id, "task-revoked")
            monitor.wait_for(holding.id, "task-started")
            assert monitor.state.tasks[holding.id].state == "STARTED"
        assert holding.id in skipped["reason"]
        assert monitor.state.tasks[result.id].state == "REVOKED"

    @pytest.mark.core
    @pytest.mark.parametrize("policy", ["retry", "queue"])
    def test_call_that_waits_is_shown_as_retry_until_its_body_starts(self, environment, tasks, policy):
        """Celery has sent task-started before a pool child looks at the lock."""
        n, gate = environment.fresh(), environment.fresh()
        with Monitor(environment.app) as monitor:
            with environment.hold(tasks.skips, n) as holding:
                result = tasks.skips.apply_async((n, gate), dlock={"on_conflict": policy, "retry_delay": 1.5})
                retried = monitor.wait_for(result.id, "task-retried")
                assert monitor.of(result.id).index("task-started") < monitor.of(result.id).index("task-retried")
                assert retried["exception"].startswith(f"Postponed('{tasks.skips.lock_name(n)}: held by ")
                assert holding.id in retried["exception"]
                # Of `retry`, the copy may have been received.
                assert (
                    monitor.state.tasks[result.id].state
                    in {"retry": ("RETRY", "RECEIVED"), "queue": ("RETRY",)}[policy]
                )
            environment.entered(id=result.id)
            eventually(lambda: monitor.state.tasks[result.id].state == "STARTED")
            # Without task_track_started only a call that read QUEUED is stored as STARTED.
            assert environment.state(result.id) == {"retry": "PENDING", "queue": "STARTED"}[policy]
            environment.open(gate)
            assert result.get(timeout=10) == n
            monitor.wait_for(result.id, "task-succeeded")
        assert monitor.state.tasks[result.id].state == "SUCCESS"

    def test_waiter_that_ends_without_running_is_shown_as_revoked(self, environment, tasks):
        n, latest = environment.fresh(), {"on_conflict": "queue", "queue_limit": 1, "queue_overflow": "drop_oldest"}
        with Monitor(environment.app) as monitor, environment.hold(tasks.skips, n):
            ousted = tasks.skips.apply_async((n,), dlock=latest)
            monitor.wait_for(ousted.id, "task-retried")
            revoked = tasks.skips.apply_async((n,), dlock=latest)
            monitor.wait_for(revoked.id, "task-retried")
            monitor.wait_for(ousted.id, "task-revoked")
            revoked.revoke()
            monitor.wait_for(revoked.id, "task-revoked")
            assert [monitor.state.tasks[each.id].state for each in (ousted, revoked)] == ["REVOKED", "REVOKED"]

    def test_lost_lease_sends_signal(self, environment, tasks):
        n = environment.fresh()
        with Monitor(environment.app) as monitor, environment.hold(tasks.skips, n) as holding:
            environment.lose_lock(tasks.skips, n)
            holding.end()
            monitor.wait_for(holding.id, "dlock-lost")

    @pytest.mark.invariant("arguments-stay-secret")
    def test_no_event_holds_an_argument(self, environment, tasks):
        n = environment.fresh()
        with Monitor(environment.app) as monitor:
            result = tasks.skips.delay(n, text="s3cret")
            result.get(timeout=10)
            monitor.wait_for(result.id, "dlock-released")
        told = [event for event in monitor.events if event["type"].startswith("dlock-")]
        assert told
        assert "s3cret" not in json.dumps(told)

    def test_a_worker_without_events_tells_monitors_nothing(self, environment, tmp_path):
        with running_environment(tmp_path) as quiet, Monitor(quiet.app) as monitor:
            n = quiet.fresh()
            with quiet.hold(quiet.tasks.skips, n) as holding:
                result = quiet.tasks.skips.delay(n)
                result.get(timeout=10, propagate=False)
            holding.result.get(timeout=5)
        assert [event for event in monitor.events if event["type"].startswith(("dlock-", "task-"))] == []


class TestCelerySignals:
    def test_receivers_in_the_worker_hear_the_task_and_the_event(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.heard, n) as holding:
            tasks.heard.delay(n).get(timeout=10, propagate=False)
        eventually(lambda: len(environment.history(what="signal", name=tasks.heard.lock_name(n))) >= 4)
        told = environment.history(what="signal", name=tasks.heard.lock_name(n))
        assert [fact["kind"] for fact in told] == ["acquired", "refused", "skipped", "released"]
        assert {fact["sender"] for fact in told} == {"policies.heard"}
        assert told[0]["id"] == told[-1]["id"] == holding.id
        assert told[0]["token"] == told[-1]["token"] > 0
        assert holding.id in told[1]["reason"]

    def test_a_lost_lease_is_a_signal(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.heard, n) as holding:
            environment.lose_lock(tasks.heard, n)
            holding.end()
        eventually(lambda: environment.history(what="signal", kind="lost", name=tasks.heard.lock_name(n)))

    @pytest.mark.core
    def test_a_receiver_that_raises_breaks_neither_lock_nor_task(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.heard, n):
            assert timed(lambda: tasks.heard.delay(n).get(timeout=10))[1].__class__.__name__ == "CallSkipped"
        environment.free(tasks.heard, n)
        assert tasks.heard.delay(n).get(timeout=10) == n

    @pytest.mark.parametrize("kind", KINDS)
    def test_outside_a_worker_a_receiver_that_raises_is_logged_and_breaks_nothing(
        self, environment, tasks, kind, caplog
    ):
        lock = Lock(environment.fresh(), app=environment.app)
        heard = []

        def receiver(sender, event, **_):
            heard.append((sender, event.kind, event.name))
            raise RuntimeError("as asked")

        signal = getattr(signals, f"lock_{kind}")
        signal.connect(receiver, weak=False)
        try:
            _everything(environment, lock)
        finally:
            signal.disconnect(receiver)
        assert heard[0] == (None, kind, lock.name)
        assert not lock.locked()
        assert "as asked" in caplog.text


def _everything(environment, lock):
    """Acquire, be refused, lose, release."""
    refused = []
    assert lock.acquire()
    other = Thread(target=lambda: refused.append(lock.acquire(blocking=False)))
    other.start()
    other.join(10)
    assert refused == [False]
    lock.release()
    assert lock.acquire()
    environment.locks.delete(*[key for key in environment.locks.keys("dlock*") if lock.name in key])
    timed(lock.release)
    assert lock.acquire(blocking=False)
    lock.release()
