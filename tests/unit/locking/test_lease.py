"""One lease, on a clock and a store of its own."""

from __future__ import annotations

import pytest

from celery_dlock.errors import LockLost, StoreUnavailable
from celery_dlock.locking.lease import NullLease, drift_margin, loss_grace
from tests.unit.fakes import LockClientHarness, a_name

NAME = a_name()
TTL = 30.0


@pytest.fixture
def harness() -> LockClientHarness:
    return LockClientHarness()


# What a lease shows


def test_a_lease_shows_whose_it_is_and_how_long_it_lives(harness: LockClientHarness) -> None:
    lease = harness.take()
    assert (lease.name, lease.owner, lease.task, lease.task_id) == (NAME.text, "me", "app.post", "id1")
    assert (lease.token, lease.hold_count, lease.held, lease.lost) == (1, 1, True, False)
    assert lease.remaining() == pytest.approx(TTL - drift_margin(TTL))
    harness.clock.now += 10
    assert lease.remaining() == pytest.approx(TTL - drift_margin(TTL) - 10)
    harness.clock.now += 25
    assert lease.remaining() == 0
    assert not lease.held
    assert "remaining=0.000" in repr(lease)


@pytest.mark.invariant("lease-deadline-precedes-request")
def test_the_deadline_counts_from_before_the_request_was_sent(harness: LockClientHarness) -> None:
    harness.store.call_time = 5.0
    assert harness.take().remaining() == pytest.approx(TTL - drift_margin(TTL) - 5)


@pytest.mark.invariant("lease-deadline-precedes-request")
def test_the_margin_is_one_percent_and_two_milliseconds() -> None:
    assert drift_margin(30.0) == pytest.approx(0.302)
    assert drift_margin(1.0) == pytest.approx(0.012)


def test_a_lease_that_is_released_or_lost_is_over_at_once(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.lock_client.release(lease, harness.context)
    assert (lease.held, lease.remaining()) == (False, 0.0)
    again = harness.take()
    again.record.lose()
    assert (again.held, again.remaining(), again.lost) == (False, 0.0, True)


# ensure


def test_ensure_asks_the_store_and_renews(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.clock.now += 10
    lease.ensure()
    assert lease.remaining() == pytest.approx(TTL - drift_margin(TTL))


def test_ensure_of_a_lease_that_the_store_has_lost_raises_and_tells_once(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.store.lose(NAME)
    for _ in range(2):
        with pytest.raises(LockLost, match="is over"):
            lease.ensure()
    assert lease.lost
    assert harness.kinds() == ["acquired", "lost"]
    assert len(harness.store.asked) == 1


def test_ensure_believes_the_deadline_while_the_store_is_away_and_no_longer(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.store.away = StoreUnavailable("away")
    harness.clock.now += 29
    lease.ensure()
    harness.clock.now += 1
    with pytest.raises(LockLost):
        lease.ensure()
    assert harness.kinds() == ["acquired", "lost"]
    # A reported loss is final: the lease stays lost when the store is back and would renew it.
    harness.store.away = None
    with pytest.raises(LockLost):
        lease.ensure()


def test_ensure_reads_the_time_after_the_store_failed(harness: LockClientHarness) -> None:
    """The deadline may pass while it waits for an answer."""
    lease = harness.take()
    harness.clock.now += 28

    def late(*_: object) -> list[bool]:
        harness.clock.now += 3.0
        raise StoreUnavailable("no answer")

    harness.store.renew = late  # type: ignore[method-assign]
    with pytest.raises(LockLost):
        lease.ensure()


@pytest.mark.invariant("lease-deadline-precedes-request")
def test_ensure_deadline_is_counted_from_before_the_request(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.clock.now += 10
    harness.store.call_time = 0.9
    sent = harness.clock.now
    lease.ensure()
    assert lease.record.deadline == pytest.approx(sent + TTL - drift_margin(TTL))


@pytest.mark.invariant("lost-lease-is-reported")
def test_ensure_within_the_grace_of_an_unanswered_lease_raises(harness: LockClientHarness) -> None:
    """Its holder needs that time to stop."""
    lease = harness.take()
    harness.store.away = StoreUnavailable("away")
    harness.clock.now = lease.record.deadline - loss_grace(TTL) * 1.5
    lease.ensure()
    harness.clock.now = lease.record.deadline - loss_grace(TTL) / 2
    with pytest.raises(LockLost):
        lease.ensure()
    assert harness.kinds() == ["acquired", "lost"]


@pytest.mark.invariant("hold-times-are-kept")
def test_ensure_beyond_max_hold_raises_without_asking_the_store(harness: LockClientHarness) -> None:
    lease = harness.take()
    lease.record.set_max_hold(harness.clock.now + 5)
    harness.clock.now += 4
    lease.ensure()
    asked = len(harness.store.asked)
    harness.clock.now += 2
    with pytest.raises(LockLost):
        lease.ensure()
    assert len(harness.store.asked) == asked
    assert [event.reason for event in harness.told if event.kind == "lost"] == [
        "it was held for as long as max_hold allows"
    ]


def test_ensure_of_a_released_lease_raises(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.lock_client.release(lease, harness.context)
    with pytest.raises(LockLost):
        lease.ensure()
    assert not harness.store.asked


# extend


def test_extend_makes_it_live_so_long_from_now_and_never_shortens_it(harness: LockClientHarness) -> None:
    lease = harness.take()
    lease.extend(100)
    assert lease.remaining() == pytest.approx(100 - drift_margin(100))
    for shorter in (5, 99):
        lease.extend(shorter)
    lease.ensure()
    assert lease.remaining() == pytest.approx(100 - drift_margin(100))


@pytest.mark.invariant("lease-deadline-precedes-request")
def test_extend_deadline_is_counted_from_before_the_request(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.clock.now += 10
    harness.store.call_time = 0.9
    sent = harness.clock.now
    lease.extend(100)
    assert lease.record.deadline == pytest.approx(sent + 100 - drift_margin(100))


def test_extend_beyond_max_hold_raises_without_asking_the_store(harness: LockClientHarness) -> None:
    lease = harness.take()
    lease.record.set_max_hold(harness.clock.now + 5)
    harness.clock.now += 6
    with pytest.raises(LockLost):
        lease.extend(60)
    assert not harness.store.asked


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_extend_by_nothing_is_refused(harness: LockClientHarness, seconds: float) -> None:
    lease = harness.take()
    with pytest.raises(ValueError, match=r"seconds from 0\.001"):
        lease.extend(seconds)
    assert not harness.store.asked


def test_extend_while_the_store_is_away_raises_and_changes_nothing(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.store.away = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        lease.extend(100)
    assert lease.remaining() == pytest.approx(TTL - drift_margin(TTL))
    assert not lease.lost


@pytest.mark.parametrize("how", ["lost", "released"])
def test_extend_of_a_lease_that_is_over_raises(harness: LockClientHarness, how: str) -> None:
    lease = harness.take()
    if how == "lost":
        harness.store.lose(NAME)
    else:
        harness.lock_client.release(lease, harness.context)
    with pytest.raises(LockLost):
        lease.extend(100)


def test_a_null_lease_passes_everything_and_holds_nothing() -> None:
    lease = NullLease()
    lease.ensure()
    lease.extend(5)
    assert (lease.name, lease.owner, lease.token, lease.hold_count) == (None, None, None, 0)
    assert (lease.held, lease.lost, lease.remaining()) == (False, False, 0.0)
    assert repr(lease) == "<NullLease>"
