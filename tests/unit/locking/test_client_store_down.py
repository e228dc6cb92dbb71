"""The lock client beside a store that is silent: who waits for it, who does not, and what the watchdog is left with."""

from __future__ import annotations

from typing import NoReturn

import pytest

from celery_dlock.errors import ReplyLost, ReplyTimeout, ScriptStopped, StoreRefused, StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.locking.client import LockClient
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.owner import OwnerContext
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.circuit_breaker import CircuitBreaker, ShardStates
from celery_dlock.store.model import AcquireRequest, Identity, Requester
from tests.unit.fakes import LockClientHarness, a_name

TIMEOUT, BREAKER_RESET = 3.0, 2.0
BY = Requester("", "", "", "")
MESSAGE, LOCK = AcquireRequest(BY, Identity("id1")), AcquireRequest(BY)


class Harness(LockClientHarness):
    """One worker: one call that fails tells all of them."""

    def __init__(self) -> None:
        super().__init__()
        breaker = CircuitBreaker(ShardStates([0], [0]), self.clock, BREAKER_RESET, TIMEOUT)
        self.lock_client = LockClient(
            self.store, self.lease_table, self.clock, self.lock_client._listeners, breaker=breaker
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
def harness() -> Harness:
    return Harness()


def test_acquire_waits_for_one_timeout_and_leaves_the_rollback_to_the_watchdog(harness: Harness) -> None:
    harness.go_silent()
    with pytest.raises(ReplyTimeout):
        harness.ask(harness.context)
    assert harness.store.calls == 1
    (record,) = harness.lease_table.records()
    assert (record.state, ReleaseRequest.from_text(record.ending)) == (
        LeaseState.RELEASE_DELEGATED,
        ReleaseRequest(outcome_unknown=True, rolled_back=True),
    )


def test_a_renewal_waits_for_one_timeout(harness: Harness) -> None:
    lease = harness.take()
    calls = harness.store.calls
    harness.go_silent()
    with pytest.raises(ReplyTimeout):
        harness.lock_client.renew(lease, lease.ttl)
    assert harness.store.calls == calls + 1


def test_the_next_message_does_not_ask_and_takes_no_record(harness: Harness) -> None:
    harness.go_silent()
    with pytest.raises(ReplyTimeout):
        harness.ask(harness.context)
    calls, records = harness.store.calls, len(harness.lease_table.records())
    with pytest.raises(StoreUnavailable, match="was not asked"):
        harness.ask(harness.delivery("other"), name="y")
    assert (harness.store.calls, len(harness.lease_table.records())) == (calls, records)


@pytest.mark.parametrize("asked", [LOCK, MESSAGE], ids=["a Lock", "an eager call"])
def test_who_has_no_message_always_asks(harness: Harness, asked: AcquireRequest) -> None:
    harness.go_silent()
    for number in range(3):
        with pytest.raises(ReplyTimeout):
            harness.ask(OwnerContext("thread", BY), asked, f"n{number}")
    assert harness.store.calls == 3


def test_a_lock_inside_a_body_always_asks(harness: Harness) -> None:
    harness.go_silent()
    for number in range(3):
        with pytest.raises(ReplyTimeout):
            harness.ask(harness.context, LOCK, f"n{number}")
    assert harness.store.calls == 3


def test_a_body_that_ends_does_not_ask_and_leaves_its_release_to_the_watchdog(harness: Harness) -> None:
    lease = harness.ask(harness.context)
    assert isinstance(lease, Lease)
    harness.go_silent()
    with pytest.raises(ReplyTimeout):
        harness.ask(harness.delivery("other"), name="y")
    calls, ending = harness.store.calls, ReleaseRequest(final=True, identity="abc")
    assert harness.lock_client.release(lease, harness.context, ending)
    assert harness.store.calls == calls
    assert (lease.record.state, ReleaseRequest.from_text(lease.record.ending)) == (LeaseState.RELEASE_DELEGATED, ending)


def test_the_release_of_a_lock_outside_any_message_always_asks(harness: Harness) -> None:
    """The process may end right after it, and its watchdog with it."""
    thread = OwnerContext("thread", BY)
    lease = harness.ask(thread, LOCK)
    assert isinstance(lease, Lease)
    harness.go_silent()
    with pytest.raises(ReplyTimeout):
        harness.ask(harness.context, name="y")
    harness.come_back()
    assert harness.lock_client.release(lease, thread)
    assert not harness.store.locks
    assert lease.record.state is LeaseState.FREE


def test_the_first_answer_lets_all_ask_again(harness: Harness) -> None:
    harness.go_silent()
    with pytest.raises(ReplyTimeout):
        harness.ask(harness.context)
    harness.come_back()
    assert isinstance(harness.ask(OwnerContext("thread", BY), LOCK, "y"), Lease)
    assert isinstance(harness.ask(harness.delivery("other"), name="z"), Lease)


@pytest.mark.parametrize("error", [ReplyLost("cut"), StoreRefused("NOPERM")])
def test_a_store_that_refuses_or_cuts_is_asked_for_each_message(harness: Harness, error: StoreUnavailable) -> None:
    harness.store.away = error
    for number in range(3):
        with pytest.raises(type(error)):
            harness.ask(harness.delivery(f"d{number}"), name=f"n{number}")
    assert harness.store.calls >= 3


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
def test_acquire_whose_script_stopped_is_rolled_back(harness: Harness) -> None:
    """It may have taken the lock before it stopped."""
    taken = []

    def stop(name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> NoReturn:
        taken.append(real(name, acquisition, ttl_ms, request))
        raise ScriptStopped("NOPERM pexpire")

    real, harness.store.acquire = harness.store.acquire, stop  # type: ignore[method-assign]
    with pytest.raises(ScriptStopped):
        harness.ask(harness.context)
    assert taken
    assert not harness.store.locks
    assert not harness.context.open_acquisitions


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
def test_acquire_whose_rollback_is_refused_too_is_left_to_its_ttl(harness: Harness) -> None:
    """A right that is missing for long must not fill the lease table with releases to repeat."""
    harness.store.away = ScriptStopped("NOPERM pexpire")
    with pytest.raises(ScriptStopped):
        harness.ask(harness.context)
    assert not harness.context.open_acquisitions
    assert list(harness.lease_table.records()) == []
