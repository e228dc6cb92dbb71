"""Hard time limits that Celery has enforced, and the consequences if the process lives on."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.worker.request import Request as CeleryRequest

from celery_dlock.locking.watchdog import KILL_GRACE, ROUND
from celery_dlock.worker.delivery_registry import REMEMBERED, DeliveryRegistry
from celery_dlock.worker.request import SingletonRequest
from tests.unit.fakes import WatchdogHarness

REASON = "its process did not end within 10 s after its hard time limit"


class Request(SingletonRequest):
    """A delivery of which only the time limit matters here."""

    def __init__(self, app: Celery, owner: str = "owner") -> None:
        self._app = app
        self._dlock_deliveries = DeliveryRegistry.of(app)
        self.dlock_owner = owner

    def dlock_acknowledge(self) -> None: ...
    def _dlock_settle(self, ended_at: float) -> None: ...
    def _dlock_died(self) -> None: ...


@pytest.fixture
def app() -> Celery:
    return Celery("limits", set_as_current=False)


@pytest.mark.invariant("hard-limit-frees-after-death")
def test_lease_is_lost_when_the_killed_process_outlives_the_grace() -> None:
    harness = WatchdogHarness()
    slot = harness.hold()
    harness.killed_by[slot.acquisition] = harness.clock.now + KILL_GRACE
    harness.run(KILL_GRACE - 2 * ROUND)
    assert not harness.lost
    harness.run(3 * ROUND)
    assert [(who, why) for who, why, _ in harness.lost] == [(slot.acquisition, REASON)]
    asked = len(harness.store.asked)
    harness.run(60)
    assert len(harness.store.asked) == asked, "a lost lease was renewed"


@pytest.mark.parametrize("raises", [False, True])
def test_grace_begins_only_when_celery_has_handled_the_hard_limit(
    app: Celery, monkeypatch: pytest.MonkeyPatch, *, raises: bool
) -> None:
    """If the handler raises, billiard does not come to kill the process."""

    def on_timeout(*_: Any) -> None:
        if raises:
            raise ConnectionError

    monkeypatch.setattr(CeleryRequest, "on_timeout", on_timeout)
    deliveries = DeliveryRegistry.of(app)
    request = Request(app)
    if raises:
        with pytest.raises(ConnectionError):
            request.on_timeout(soft=False, timeout=2)
        assert deliveries.runtime.worker.kill_deadline("owner.1") == 0
        return
    request.on_timeout(soft=True, timeout=1)
    assert deliveries.runtime.worker.kill_deadline("owner.1") == 0
    request.on_timeout(soft=False, timeout=2)
    now = deliveries.runtime.clock.monotonic()
    assert now < deliveries.runtime.worker.kill_deadline("owner.1") <= now + KILL_GRACE
    assert deliveries.runtime.worker.kill_deadline("other.1") == 0


def test_time_limit_after_the_kill_of_a_replaced_body_stores_no_second_end(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may strike before Celery notices that the child is dead."""
    seen: list[bool] = []
    monkeypatch.setattr(CeleryRequest, "on_timeout", lambda _self, soft, _timeout: seen.append(soft))
    request = Request(app)
    request.on_timeout(soft=True, timeout=1)
    request._dlock_was_killed = True
    request.on_timeout(soft=False, timeout=2)
    assert seen == [True]


def test_only_the_latest_killed_processes_are_remembered(app: Celery) -> None:
    deliveries = DeliveryRegistry.of(app)
    for number in range(REMEMBERED + 1):
        deliveries.killing(Request(app, str(number)))
    assert deliveries.kill_deadline("0.1") == 0 < deliveries.kill_deadline("1.1")
