"""The facts that a republished message carries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlock.errors import StoreUnavailable
from celery_dlock.messaging.message import Delivery, FirstReceipt
from celery_dlock.store.model import Identity
from celery_dlock.task import outcomes
from celery_dlock.task.run import Run
from tests.unit.fakes import FakeClock, a_name

NAME = a_name()


def a_run(clock: FakeClock, **of_delivery: Any) -> Run:
    run = object.__new__(Run)
    run.task = SimpleNamespace(name="app.pay", app=None, acks_late=True)  # type: ignore[assignment]  # what is read
    run.request = SimpleNamespace(id="id1")
    run.runtime = SimpleNamespace(clock=clock)  # type: ignore[assignment]  # what is read
    run.identity = Identity("id1")
    run.delivery = Delivery("o", clock.now, clock.now, monitored=False, raw=(), **of_delivery)
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
