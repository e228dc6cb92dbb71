"""The facts that a republished message carries, and what becomes of a run whose message the broker refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject
from kombu import Queue

from celery_dlock.errors import LockHeld, StoreBusy, StoreUnavailable, Unpublishable
from celery_dlock.messaging.message import Delivery, FirstReceipt
from celery_dlock.options.lock_options import LockOptions
from celery_dlock.store.model import Identity
from celery_dlock.task import outcomes
from celery_dlock.task.execution import Execution
from tests.unit.fakes import FakeClock, a_name

NAME = a_name()


def a_run(clock: FakeClock, **of_delivery: Any) -> Execution:
    run = object.__new__(Execution)
    run.task = SimpleNamespace(name="app.pay", app=None, acks_late=True)  # type: ignore[assignment]  # what is read
    run.request = SimpleNamespace(id="id1", delivery_info={})
    run.runtime = SimpleNamespace(clock=clock, disconnected_at=0.0)  # type: ignore[assignment]  # what is read
    run.identity = Identity("id1")
    run.delivery = Delivery("o", clock.now, clock.now, **{"monitored": False, "raw": (), **of_delivery})
    return run


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    copies: list[dict[str, Any]] = []
    monkeypatch.setattr(outcomes, "publish_again", lambda *_, **facts: copies.append(facts))
    return copies


@pytest.mark.invariant("duplicates-do-not-run")
def test_message_that_the_store_did_not_answer_carries_its_first_receipt(published: list[dict[str, Any]]) -> None:
    clock = FakeClock()
    run = a_run(clock)
    received = FirstReceipt.of(run.delivery, clock)  # type: ignore[arg-type]  # it has one
    clock.now += 5
    for _ in range(2):
        with pytest.raises(outcomes.Postponed):
            outcomes._retry_uncounted(run, NAME, StoreUnavailable("away"))
        assert (published[-1]["rank_us"], published[-1]["first_receipt"]) == (None, received)
        # The next delivery of the copy, by another machine.
        run = a_run(FakeClock(), first_receipt=received)


@pytest.mark.parametrize("policy", ["fail", "retry", "run", "local"])
def test_call_whose_name_is_busy_is_published_again_under_every_policy(
    published: list[dict[str, Any]], policy: str
) -> None:
    """The store answers, so another body may run: without its lock, this one would run beside it."""
    run = a_run(FakeClock())
    run.options = LockOptions(on_store_error=policy)  # type: ignore[arg-type]  # one of the values
    with pytest.raises(outcomes.Postponed):
        outcomes.apply_on_store_error(run, NAME, StoreBusy("other transactions changed it"))
    assert len(published) == 1


QUORUM = Celery("a", broker="amqp://", set_as_current=False)
QUORUM.conf.task_queues = [Queue("counted", queue_arguments={"x-queue-type": "quorum"}), Queue("plain")]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """The error of each publication is the last one of this list."""
    errors: list[Exception] = [ConnectionError("refused")]

    def refuse(*_: Any, **__: Any) -> None:
        raise errors[-1]

    monkeypatch.setattr(outcomes, "publish_again", refuse)
    return errors


def a_counted_run(
    clock: FakeClock, *, queue: str = "counted", count: int | None = None, late: bool = True
) -> Execution:
    headers = {} if count is None else {"x-delivery-count": count}
    run = a_run(clock, raw=("[]", "application/json", "utf-8", headers, {}, queue))
    run.task.app, run.task.acks_late = QUORUM, late  # type: ignore[misc]  # what is read
    run.request.delivery_info = {"redelivered": bool(count)}
    return run


def republish(run: Execution, *, duplicate: bool = False) -> None:
    outcomes._republish(run, NAME, 0.1, LockHeld("held"), conflict=True, duplicate=duplicate)


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(("queue", "count"), [("counted", None), ("counted", 2), ("plain", 1), ("another", 1)])
def test_counted_delivery_is_kept_for_a_while_and_ends_with_an_error(
    queue: str, count: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each requeue would count, and RabbitMQ drops the message at its limit."""
    monkeypatch.setattr(outcomes, "rng", SimpleNamespace(random=lambda: 1.0))
    clock = FakeClock()
    delays = []
    run = a_counted_run(clock, queue=queue, count=count)
    for _ in range(20):
        try:
            republish(run)
        except outcomes.NotRepublished as kept:
            delays.append(kept.delay)
            clock.now += kept.delay
        except LockHeld:
            break
    assert delays == [1, 1, 2, 4, 8, 8]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 6 + ["ERROR"]
    assert "cannot be republished; it fails" in caplog.text


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.usefixtures("refused")
def test_calls_that_were_refused_together_do_not_all_ask_together() -> None:
    """Only one of them would get the lock, and at the last attempt the others would fail although it is free."""
    delays = set()
    for _ in range(20):
        with pytest.raises(outcomes.NotRepublished) as kept:
            republish(a_counted_run(FakeClock()))
        delays.add(kept.value.delay)
    assert len(delays) == 20
    assert 0.5 <= min(delays) < max(delays) <= 1


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.usefixtures("refused")
def test_counted_duplicate_is_kept_as_long_as_the_other_one_runs() -> None:
    clock = FakeClock()
    run = a_counted_run(clock)
    for _ in range(100):
        with pytest.raises(outcomes.NotRepublished):
            republish(run, duplicate=True)
        clock.now += 8
    # The other one died, and a third call took the lock.
    with pytest.raises(outcomes.NotRepublished):
        republish(run)


@pytest.mark.usefixtures("refused")
def test_delivery_that_no_limit_counts_is_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "REQUEUE_DELAY", 0.0)
    with pytest.raises(Reject) as rejected:
        republish(a_counted_run(FakeClock(), queue="plain"))
    assert rejected.value.requeue


@pytest.mark.usefixtures("refused")
def test_delivery_of_a_lost_connection_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker delivers it again, so a failure would be stored of a call that runs."""
    monkeypatch.setattr(outcomes, "REQUEUE_DELAY", 0.0)
    clock = FakeClock()
    run = a_counted_run(clock)
    run.runtime.disconnected_at = clock.now + 1
    with pytest.raises(Reject):
        republish(run)


@pytest.mark.usefixtures("refused")
def test_delivery_that_is_acknowledged_already_fails_at_once() -> None:
    run = a_counted_run(FakeClock(), late=False)
    with pytest.raises(LockHeld):
        republish(run)
    with pytest.raises(outcomes.HandledElsewhere, match="this copy is dropped"):
        republish(run, duplicate=True)


def test_counted_message_that_can_never_be_published_fails_at_once(refused: list[Exception]) -> None:
    refused.append(Unpublishable("protocol 1"))
    with pytest.raises(LockHeld):
        republish(a_counted_run(FakeClock()))
