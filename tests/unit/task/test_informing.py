"""No call depends on what only informs of it: states before the end, the log, events, signals, spans."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.task import Context

from celery_dlock import CallSkipped, SingletonTask, signals, singleton_task
from celery_dlock.messaging.handoff import GrantPublisher
from celery_dlock.runtime import Runtime
from celery_dlock.task.outcomes import store_skipped
from celery_dlock.testing import DLockKit
from celery_dlock.tracing import Spans

pytestmark = pytest.mark.core


@pytest.fixture
def app() -> Celery:
    app = Celery("informing", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dlock_url="redis://127.0.0.1:1/0", worker_hijack_root_logger=False, task_default_queue="informing")
    return app


@pytest.fixture
def kit(app: Celery) -> Iterator[DLockKit]:
    with DLockKit(app, eager=False) as made:
        yield made


def a_task(app: Celery, name: str = "informing.run", **options: Any) -> Any:
    def run(number: int) -> int:
        return number

    return singleton_task(app=app, name=name, key="all", **options)(run)


@pytest.mark.invariant("informing-decides-nothing")
@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize("error", [ConnectionError("gone"), SoftTimeLimitExceeded()], ids=repr)
def test_call_is_parked_and_runs_although_queued_cannot_be_stored(
    app: Celery,
    kit: DLockKit,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    acks_late: bool,
) -> None:
    store_result = app.backend.store_result

    def refuse(task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state in {"QUEUED", "STARTED"} and not (state == "STARTED" and isinstance(error, SoftTimeLimitExceeded)):
            raise error
        return store_result(task_id, result, state, *args, **kwargs)

    monkeypatch.setattr(app.backend, "store_result", refuse)
    task = a_task(app, on_conflict="queue", acks_late=acks_late)
    with kit.held(task, 0):
        result = task.delay(1)
        kit.run_all()
        assert [waiter.task_id for waiter in kit.waiting(task)] == [result.id]
    kit.run_all()
    assert result.get(timeout=1) == 1
    assert f"Task informing.run[{result.id}] waits in the queue, but its state QUEUED cannot be stored" in caplog.text


@pytest.mark.invariant("queued-state-hides-no-end")
def test_backend_that_cannot_compare_stores_queued_before_the_message_is_parked(
    app: Celery, kit: DLockKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, the call may have been granted the lock and have ended."""
    task = a_task(app, on_conflict="queue")
    store_result, waiting = app.backend.store_result, []

    def note(task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == "QUEUED":
            waiting.append(len(kit.waiting(task)))
        return store_result(task_id, result, state, *args, **kwargs)

    monkeypatch.setattr(app.backend, "store_result", note)
    with kit.held(task, 0):
        result = task.delay(1)
        kit.run_all()
        assert (waiting, result.state) == ([0], "QUEUED")
    kit.run_all()


class Broken(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise ValueError("broken filter")


@pytest.fixture
def _broken_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "celery_dlock")
    log, broken = logging.getLogger("celery_dlock"), Broken()
    log.addFilter(broken)
    yield
    log.removeFilter(broken)


@pytest.fixture
def _broken_receivers() -> Iterator[None]:
    def fail(**_: Any) -> None:
        raise ValueError("broken receiver")

    told = (signals.lock_refused, signals.lock_skipped, signals.lock_queued)
    for signal in told:
        signal.connect(fail, weak=False)
    yield
    for signal in told:
        signal.disconnect(fail)


@pytest.fixture
def _broken_spans(app: Celery) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("broken tracer")

    runtime = Runtime.of(app)
    runtime.spans = spans = Spans(fail)
    spans.listen(runtime.listeners)


@pytest.mark.invariant("informing-decides-nothing")
@pytest.mark.parametrize("informer", ["_broken_log", "_broken_receivers", "_broken_spans"])
def test_skipped_and_parked_calls_end_as_they_should_beside(
    app: Celery, kit: DLockKit, informer: str, request: pytest.FixtureRequest
) -> None:
    skips, waits = a_task(app), a_task(app, on_conflict="queue", name="informing.waits")
    request.getfixturevalue(informer)
    with kit.held(skips, 0), kit.held(waits, 0):
        skipped, parked = skips.delay(1), waits.delay(2)
        kit.run_all()
        assert (skipped.state, parked.state) == ("REVOKED", "QUEUED")
    kit.run_all()
    assert parked.get(timeout=1) == 2


@pytest.mark.invariant("informing-decides-nothing")
def test_parked_call_runs_although_its_soft_limit_strikes_while_another_is_ended(
    app: Celery, kit: DLockKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of the other call, whose end it stores."""

    def limited(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded

    task = a_task(app, on_conflict="queue", queue_limit=1, queue_overflow="drop_oldest")
    with kit.held(task, 0):
        _, newer = task.delay(1), task.delay(2)
        kit.run_next()
        monkeypatch.setattr(GrantPublisher, "evict", limited)
        kit.run_next()
        assert newer.state == "QUEUED"
    kit.run_all()
    assert newer.get(timeout=1) == 2


@pytest.mark.invariant("informing-decides-nothing")
def test_skipped_call_ends_although_its_monitor_event_cannot_be_sent(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise, Celery would replace REVOKED by a failure."""

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no broker")

    task = a_task(app)
    monkeypatch.setattr(SingletonTask, "send_event", fail)
    run: Any = SimpleNamespace(task=task, request=Context(id="id1"), delivery=SimpleNamespace(monitored=True))
    store_skipped(run, CallSkipped("held"))
    assert app.backend.get_state("id1") == "REVOKED"
    assert "cannot send the event task-revoked of informing.run[id1]" in caplog.text
