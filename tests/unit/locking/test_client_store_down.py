"""The lock client beside a store that is silent: who waits for it, who does not, and what the watchdog is left with."""

from __future__ import annotations

import pytest

from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreRefused, StoreUnavailable
from celery_dlock.locking.client import LockClient
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.owner import OwnerContext
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.circuit_breaker import CircuitBreaker, ShardStates
from celery_dlock.store.model import AcquireRequest, Identity, Requester
from tests.unit.fakes import LockClientScene, a_name

TIMEOUT, BREAKER_RESET = 3.0, 2.0
BY = Requester("", "", "", "")
MESSAGE, LOCK = AcquireRequest(BY, Identity("id1")), AcquireRequest(BY)


class Scene(LockClientScene):
    """One worker: one call that fails tells all of them."""

    def __init__(self) -> None:
        super().__init__()
        breaker = CircuitBreaker(ShardStates([0], [0]), self.clock, BREAKER_RESET, TIMEOUT)
        self.lock_client = LockClient(
            self.store, self.slots, self._wake, self.clock, self.lock_client._listeners, breaker=breaker
        )
        self.context = self.delivery("me")

    def delivery(self, owner: str) -> OwnerContext:
        return OwnerContext(owner, BY, "app.post", "id1", delivered=True)

    def go_silent(self) -> None:
        self.store.away, self.store.call_time = ReplyTimeout("late"), TIMEOUT

    def come_back(self) -> None:
        self.store.away, self.store.call_time = None, 0.0

    def ask(self, context: OwnerContext, request: AcquireRequest = MESSAGE, name: str = "x") -> object:
        return self.lock_client.acquire(a_name(name), context, 30.0, request)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_acquire_waits_for_one_timeout_and_leaves_the_rollback_to_the_watchdog(scene: Scene) -> None:
    scene.go_silent()
    with pytest.raises(ReplyTimeout):
        scene.ask(scene.context)
    assert scene.store.calls == 1
    (slot,) = scene.slots.records()
    assert (slot.state, ReleaseRequest.from_text(slot.ending)) == (
        LeaseState.RELEASE_DELEGATED,
        ReleaseRequest(outcome_unknown=True, rolled_back=True),
    )


def test_a_renewal_waits_for_one_timeout(scene: Scene) -> None:
    lease = scene.take()
    calls = scene.store.calls
    scene.go_silent()
    with pytest.raises(ReplyTimeout):
        scene.lock_client.renew(lease, lease.ttl)
    assert scene.store.calls == calls + 1


def test_the_next_message_does_not_ask_and_takes_no_slot(scene: Scene) -> None:
    scene.go_silent()
    with pytest.raises(ReplyTimeout):
        scene.ask(scene.context)
    calls, slots = scene.store.calls, len(scene.slots.records())
    with pytest.raises(StoreUnavailable, match="was not asked"):
        scene.ask(scene.delivery("other"), name="y")
    assert (scene.store.calls, len(scene.slots.records())) == (calls, slots)


@pytest.mark.parametrize("asked", [LOCK, MESSAGE], ids=["a Lock", "an eager call"])
def test_who_has_no_message_always_asks(scene: Scene, asked: AcquireRequest) -> None:
    scene.go_silent()
    for number in range(3):
        with pytest.raises(ReplyTimeout):
            scene.ask(OwnerContext("thread", BY), asked, f"n{number}")
    assert scene.store.calls == 3


def test_a_lock_inside_a_body_always_asks(scene: Scene) -> None:
    scene.go_silent()
    for number in range(3):
        with pytest.raises(ReplyTimeout):
            scene.ask(scene.context, LOCK, f"n{number}")
    assert scene.store.calls == 3


def test_a_body_that_ends_does_not_ask_and_leaves_its_release_to_the_watchdog(scene: Scene) -> None:
    lease = scene.ask(scene.context)
    assert isinstance(lease, Lease)
    scene.go_silent()
    with pytest.raises(ReplyTimeout):
        scene.ask(scene.delivery("other"), name="y")
    calls, ending = scene.store.calls, ReleaseRequest(final=True, identity="abc")
    assert scene.lock_client.release(lease, scene.context, ending)
    assert scene.store.calls == calls
    assert (lease.record.state, ReleaseRequest.from_text(lease.record.ending)) == (LeaseState.RELEASE_DELEGATED, ending)


def test_the_release_of_a_lock_outside_any_message_always_asks(scene: Scene) -> None:
    """The process may end right after it, and its watchdog with it."""
    thread = OwnerContext("thread", BY)
    lease = scene.ask(thread, LOCK)
    assert isinstance(lease, Lease)
    scene.go_silent()
    with pytest.raises(ReplyTimeout):
        scene.ask(scene.context, name="y")
    scene.come_back()
    assert scene.lock_client.release(lease, thread)
    assert not scene.store.locks
    assert lease.record.state is LeaseState.FREE


def test_the_first_answer_lets_all_ask_again(scene: Scene) -> None:
    scene.go_silent()
    with pytest.raises(ReplyTimeout):
        scene.ask(scene.context)
    scene.come_back()
    assert isinstance(scene.ask(OwnerContext("thread", BY), LOCK, "y"), Lease)
    assert isinstance(scene.ask(scene.delivery("other"), name="z"), Lease)


@pytest.mark.parametrize("error", [ReplyLost("cut"), StoreRefused("NOPERM")])
def test_a_store_that_refuses_or_cuts_is_asked_for_each_message(scene: Scene, error: StoreUnavailable) -> None:
    scene.store.away = error
    for number in range(3):
        with pytest.raises(type(error)):
            scene.ask(scene.delivery(f"d{number}"), name=f"n{number}")
    assert scene.store.calls >= 3
