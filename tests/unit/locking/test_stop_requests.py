"""A newer call asks a holder to stop: what the watchdog and the lease make of it."""

from __future__ import annotations

import os

import pytest

from celery_dlock import Replaced
from celery_dlock.locking.shared_lease_table import SharedLeaseTable
from celery_dlock.locking.watchdog import ROUND
from celery_dlock.store.model import Renewal, RenewalResult, StopRequest
from tests.unit.fakes import FakeStore, LockClientHarness, WatchdogHarness, a_name

pytestmark = pytest.mark.invariant("newest-call-stops-the-running-one")


def ask_to_stop(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the store answers a stoppable renewal with the request of the call "newer"."""
    plain = store._renew

    def renew(renewal: Renewal) -> RenewalResult:
        return StopRequest("newer") if plain(renewal) and renewal.stoppable else plain(renewal)

    monkeypatch.setattr(store, "_renew", renew)


def test_stoppable_lease_is_renewed_each_second(harness: WatchdogHarness) -> None:
    record = harness.hold(ttl=30.0)
    record.set_stoppable()
    times = harness.asked_at(rounds=25)
    assert len(times) >= 4
    assert times[1] - times[0] <= 1.0 + ROUND


def test_plain_lease_is_renewed_at_a_third_beside_a_stoppable_one(harness: WatchdogHarness) -> None:
    harness.hold("stoppable", ttl=30.0).set_stoppable()
    harness.hold("plain", ttl=30.0)
    for _ in range(40):
        harness.run(ROUND)
    asked = [renewal.name for renewal in harness.store.asked]
    assert a_name("stoppable") in asked
    assert a_name("plain") not in asked


def test_watchdog_stops_the_body_at_each_renewal_until_it_is_out(
    harness: WatchdogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request may come before the body is entered."""
    record, reasons = harness.hold(ttl=30.0), []
    record.set_stoppable()
    ask_to_stop(harness.store, monkeypatch)
    for _ in range(8):
        harness.run(ROUND)
    assert record.replaced
    record.on_stop(reasons.append)
    for _ in range(8):
        harness.run(ROUND)
    assert reasons
    assert set(reasons) == {"replaced"}
    assert not record.lost


def test_ensure_raises_the_error_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = LockClientHarness()
    lease = harness.take()
    lease.watch_for_stop(Replaced)
    lease.ensure()
    assert not lease.replaced
    ask_to_stop(harness.store, monkeypatch)
    with pytest.raises(Replaced, match="replaced by newer") as raised:
        lease.ensure()
    assert (lease.replaced, raised.value.task_id, lease.lost) == (True, "newer", False)


def test_ensure_of_a_lease_that_cannot_be_replaced_asks_for_no_stop() -> None:
    harness = LockClientHarness()
    harness.take().ensure()
    assert not harness.store.asked[-1].stoppable


def test_main_process_and_child_share_the_stop_request() -> None:
    table = SharedLeaseTable()
    table.adopt()
    interrupts: list[int] = []
    table.interrupt = lambda: interrupts.append(1)
    record = table.open(a_name(), "o.1", 30.0)
    record.held(30.0)
    (seen,) = table.records()
    assert (seen.stoppable, record.replaced) == (False, False)
    record.set_stoppable()
    assert seen.stoppable
    seen.request_stop("newer")
    seen.stop("replaced")
    assert (record.replaced, interrupts) == (True, [])
    record.on_stop(lambda reason: None)
    seen.stop("replaced")
    assert interrupts == [1]


def test_next_acquisition_in_the_same_place_is_not_replaced() -> None:
    table = SharedLeaseTable()
    table.adopt()
    first = table.open(a_name(), "o.1", 30.0)
    first.set_stoppable()
    first.request_stop("newer")
    first.clear()
    second = table.open(a_name(), "o.2", 30.0)
    assert (second.stoppable, second.replaced) == (False, False)


def test_body_must_end_while_it_may_be_killed_and_was_asked_to_stop() -> None:
    table = SharedLeaseTable()
    table.adopt()
    record = table.open(a_name(), "o.1", 30.0)
    record.held(30.0)
    (seen,) = table.records()
    assert (seen.must_end, seen.replaced_by) == (False, None)
    record.set_kill_after(5.0)
    assert not seen.must_end
    seen.request_stop("newer")
    assert (seen.must_end, seen.replaced_by, seen.kill_after) == (True, "newer", 5.0)
    record.set_kill_after(None)
    assert not seen.must_end


@pytest.mark.parametrize("end", ["begin_release", "clear", "delegate_release"])
def test_body_whose_lease_is_released_is_not_to_be_killed(end: str) -> None:
    table = SharedLeaseTable()
    table.adopt()
    record = table.open(a_name(), "o.1", 30.0)
    record.held(30.0)
    record.set_kill_after(0.0)
    (seen,) = table.records()
    seen.request_stop("newer")
    assert seen.must_end
    getattr(record, end)(*([""] if end == "delegate_release" else []))
    assert not seen.must_end


def test_next_body_in_the_same_place_is_not_to_be_killed() -> None:
    table = SharedLeaseTable()
    table.adopt()
    first = table.open(a_name(), "o.1", 30.0)
    first.held(30.0)
    first.set_kill_after(0.0)
    (of_first,) = table.records()
    of_first.request_stop("newer")
    first.clear()
    second = table.open(a_name(), "o.2", 30.0)
    second.held(30.0)
    second.set_kill_after(0.0)
    (of_second,) = table.records()
    assert (of_first.must_end, of_second.must_end, of_second.replaced_by) == (False, False, None)


def test_process_that_the_body_forked_does_not_change_whether_it_may_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SharedLeaseTable()
    table.adopt()
    record = table.open(a_name(), "o.1", 30.0)
    record.held(30.0)
    record.set_kill_after(0.0)
    (seen,) = table.records()
    seen.request_stop("newer")
    monkeypatch.setattr(os, "getpid", lambda: table.pid + 1)
    record.set_kill_after(None)
    assert seen.must_end


@pytest.fixture
def harness() -> WatchdogHarness:
    return WatchdogHarness()
