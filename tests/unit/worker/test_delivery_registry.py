"""Causes for which the main process doubts that the broker received a holder's acknowledgement."""

import time
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.utils.collections import LimitedSet

from celery_dlock.keys.key_spec import LockName
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import Identity
from celery_dlock.worker.delivery_registry import COMPARED, OVERDUE, DeliveryRegistry

NAME = LockName("n:x", 7)


class EarlyAcknowledged:
    acknowledged = True
    dlock_owner = "owner"

    def __init__(self, *, told: bool = False, failed: bool = False, closed: bool = False, ago: float = -60.0) -> None:
        self.message = SimpleNamespace(acknowledged=told, channel=SimpleNamespace(closed=closed))
        self.dlock_ack_lost = failed
        self.dlock_ack_requested_at = time.monotonic() - ago


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"told": True, "ago": OVERDUE}, False),
        ({"told": True, "failed": True}, True),
        ({"closed": True}, True),
        ({}, False),
        ({"ago": OVERDUE}, True),
    ],
    ids=["heard", "failed", "its channel is gone", "on its way", "overdue"],
)
def test_early_ack_is_doubted_if_it_failed_or_is_overdue_and_not_while_in_transit(
    state: dict[str, bool], expected: bool
) -> None:
    """Needless doubt costs a script; each look of the watchdog may fall between the asking and the telling."""
    deliveries = DeliveryRegistry(Runtime(Celery("deliveries", set_as_current=False)))
    request = EarlyAcknowledged(**state)
    deliveries.add(request)  # type: ignore[arg-type]  # what is asked of it here
    assert deliveries.may_be_redelivered("owner.1") is expected


class Waits:
    """The delivery registry's knowledge of a message that may wait."""

    dlock_owner = "owner"

    def __init__(self, task_id: str) -> None:
        self.id = task_id
        self.dlock_identity = Identity(task_id)


@pytest.mark.invariant("removed-waiters-end-revoked")
def test_a_revocation_is_noticed_when_celerys_bounded_set_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full set keeps its length (50,000 ids by default)."""
    revoked = LimitedSet(maxlen=2)
    revoked.update(["others 1", "others 2"])
    monkeypatch.setattr("celery_dlock.worker.delivery_registry.revoked", revoked)
    deliveries = DeliveryRegistry(Runtime(Celery("deliveries", set_as_current=False)))
    number = 2 * COMPARED + 1
    for place in range(number):
        deliveries.number(Waits(f"task {place}"), NAME)  # type: ignore[arg-type]  # what is asked of it here
    assert deliveries.newly_revoked() == []
    revoked.add("task 0")
    assert len(revoked) == 2
    looks = [deliveries.newly_revoked() for _ in range(4)]
    assert [place for look in looks for place in look] == [(NAME, Identity("task 0").digest)]


def test_a_revocation_is_noticed_at_once_when_the_length_of_the_set_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    revoked = LimitedSet(maxlen=10)
    monkeypatch.setattr("celery_dlock.worker.delivery_registry.revoked", revoked)
    deliveries = DeliveryRegistry(Runtime(Celery("deliveries", set_as_current=False)))
    for place in range(2 * COMPARED):
        deliveries.number(Waits(f"task {place}"), NAME)  # type: ignore[arg-type]  # what is asked of it here
    revoked.update(["task 0", "task 1500", "another"])
    assert {identity for _, identity in deliveries.newly_revoked()} == {
        Identity("task 0").digest,
        Identity("task 1500").digest,
    }
    assert deliveries.newly_revoked() == []
