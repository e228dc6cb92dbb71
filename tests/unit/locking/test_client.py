"""The story of a lock, on a clock and a store of its own: records, entries, waiting."""

from __future__ import annotations

import os

import pytest

from celery_dlock.errors import LockLost, ReplyLost, StoreNotReady, StoreUnavailable
from celery_dlock.locking.client import UNWATCHED
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.waiting import POLL
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Held, Identity, Requester, Used
from celery_dlock.store.redis.keys import LockKeys
from tests.unit.fakes import FakeListener, LockClientHarness, a_name

NAME = a_name()
TTL = 30.0


@pytest.fixture
def harness() -> LockClientHarness:
    return LockClientHarness()


# The record: what the watchdog sees


@pytest.mark.invariant("lease-is-recorded-before-acquire")
def test_a_record_is_written_before_the_store_is_asked(harness: LockClientHarness) -> None:
    seen = []
    acquire = harness.store.acquire

    def looking(*args: object) -> object:
        seen.append([(record.acquisition, record.state) for record in harness.lease_table.records()])
        return acquire(*args)  # type: ignore[arg-type]

    harness.store.acquire = looking  # type: ignore[method-assign, assignment]
    lease = harness.take()
    assert seen == [[("me.1", LeaseState.ACQUIRING)]]
    assert lease.record.state is LeaseState.HELD
    assert harness.woken == 1


def test_a_refusal_leaves_no_record(harness: LockClientHarness) -> None:
    harness.take()
    other = harness.new_context("other")
    assert isinstance(harness.lock_client.acquire(NAME, other, TTL, AcquireRequest(other.requester)), Held)
    assert [record.acquisition for record in harness.lease_table.records()] == ["me.1"]


def test_announced_release_that_the_store_does_not_take_is_logged_with_its_lock(
    harness: LockClientHarness, caplog: pytest.LogCaptureFixture
) -> None:
    lease = harness.take()
    harness.store.away = StoreUnavailable("away")
    harness.lock_client.announce_release(lease)
    assert caplog.messages == [f"cannot mark {lease.name} as about to be released: away"]


def test_a_release_that_fails_is_left_to_the_watchdog_with_its_ending_and_is_no_loss(
    harness: LockClientHarness,
) -> None:
    lease = harness.take()
    harness.store.away = StoreUnavailable("away")
    ending = ReleaseRequest(final=True, identity=Identity("id1").digest, used_ms=5, requester="me")
    assert harness.lock_client.release(lease, harness.context, ending)
    (record,) = harness.lease_table.records()
    assert (record.state, ReleaseRequest.from_text(record.ending)) == (LeaseState.RELEASE_DELEGATED, ending)
    assert harness.woken == 2
    assert harness.kinds() == ["acquired", "released"]


def test_unknown_acquire_whose_release_fails_too_is_left_to_the_watchdog(harness: LockClientHarness) -> None:
    harness.store.away = ReplyLost("cut")
    with pytest.raises(StoreUnavailable):
        harness.take()
    (record,) = harness.lease_table.records()
    assert (record.state, ReleaseRequest.from_text(record.ending)) == (
        LeaseState.RELEASE_DELEGATED,
        ReleaseRequest(outcome_unknown=True, rolled_back=True),
    )
    assert harness.woken == 1
    assert not harness.told


def test_a_lease_found_lost_at_its_release_is_told_lost_and_not_released(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.store.lose(NAME)
    assert not harness.lock_client.release(lease, harness.context)
    assert harness.kinds() == ["acquired", "lost"]
    assert type(harness.told[-1].reason) is str  # a receiver may pickle the event
    assert not harness.lease_table.records()


def test_a_second_release_and_one_in_a_forked_process_do_nothing(harness: LockClientHarness) -> None:
    lease = harness.take()
    lease.pid = os.getpid() + 1
    assert harness.lock_client.release(lease, harness.context)
    assert harness.store.kept(NAME)
    lease.pid = os.getpid()
    assert harness.lock_client.release(lease, harness.context)
    assert harness.lock_client.release(lease, harness.context)
    assert len(harness.store.ended) == 1


@pytest.mark.parametrize("why", ["it is over", "another process"])
def test_a_release_that_has_nothing_to_free_still_takes_the_entry_off_the_record(
    harness: LockClientHarness, why: str
) -> None:
    """Otherwise, a release of everything on record would never come to an end."""
    lease = harness.take()
    if why == "it is over":
        harness.lock_client.release(lease, harness.context)
        harness.context.entered.append(lease)  # as an interrupted entry leaves it
    else:
        lease.pid += 1
    harness.lock_client.release(lease, harness.context)
    assert not harness.context.entered


@pytest.mark.invariant("store-calls-are-idempotent")
def test_second_try_after_a_lost_reply_says_that_a_copy_may_have_met_the_first(harness: LockClientHarness) -> None:
    """The word that a duplicate left in the first acquisition went with it."""
    harness.store.failures = [ReplyLost("cut"), None]
    lease = harness.take()
    assert [request.republished for request in harness.store.requests] == [False, True]
    assert lease.acquisition == "me.2"
    assert harness.store.ended == [("me.1", harness.context.rollback)]


def test_second_try_after_a_lost_reply_sends_the_age_that_its_message_has_by_then(harness: LockClientHarness) -> None:
    """Another copy of the message may have run and ended meanwhile: a stale age would make this one a new message."""
    harness.store.failures = [ReplyLost("cut"), None]
    harness.store.call_time = 2.0
    harness.lock_client.acquire(NAME, harness.context, 30.0, AcquireRequest(harness.context.requester, age_us=5))
    first, second = (request.age_us for request in harness.store.requests)
    assert (first, second) == (5, 4_000_005)  # the lost call, and the release that rolls it back


# The watchdog


@pytest.mark.invariant("thread-start-is-retried")
def test_acquire_that_no_watchdog_can_keep_gives_the_lock_back_and_raises(harness: LockClientHarness) -> None:
    harness.wakes = False
    for number in (1, 2):
        with pytest.raises(StoreNotReady, match="the thread that renews leases cannot be started"):
            harness.take()
        assert harness.store.ended[-1] == (f"me.{number}", harness.context.rollback)
    assert not harness.store.locks
    assert not harness.lease_table.records()
    assert not harness.context.entered
    assert not harness.told
    harness.wakes = True
    assert harness.take().held


def test_acquire_that_nothing_can_keep_nor_give_back_is_left_to_the_watchdog(harness: LockClientHarness) -> None:
    harness.wakes = False
    harness.store.failures = [None, StoreUnavailable("away")]
    with pytest.raises(StoreUnavailable, match="away"):
        harness.take()
    (record,) = harness.lease_table.records()
    assert (record.state, ReleaseRequest.from_text(record.ending)) == (
        LeaseState.RELEASE_DELEGATED,
        harness.context.rollback,
    )


@pytest.mark.invariant("thread-start-is-retried")
def test_acquire_under_a_watchdog_that_has_not_looked_lately_warns_once(
    harness: LockClientHarness, caplog: pytest.LogCaptureFixture
) -> None:
    def take(text: str) -> list[str]:
        caplog.clear()
        assert harness.take(a_name(text)).held
        return [record.getMessage() for record in caplog.records]

    assert take("before its first look") == []
    harness.lease_table.scanned_at = harness.clock.now
    harness.clock.now += UNWATCHED - 0.1
    assert take("while it takes long") == []
    harness.clock.now += 2
    (line,) = take("late")
    assert line.endswith(
        ": the watchdog has not looked at the leases of this process for 12 s; unless it does, this lease is not "
        "renewed and ends in 30 s"
    )
    assert take("told already") == []
    harness.lease_table.scanned_at = harness.clock.now
    assert take("it looks again") == []
    harness.clock.now += UNWATCHED + 1
    assert len(take("late once more")) == 1


# Reentrancy


def test_an_inner_entry_states_the_count_absolutely_and_the_outermost_leaving_frees(harness: LockClientHarness) -> None:
    lease = harness.take()
    assert harness.take() is lease
    assert harness.take() is lease
    kept = harness.store.kept(NAME)
    assert kept
    assert (kept.notes, kept.token, lease.hold_count) == ({"count": "3"}, 1, 3)
    harness.lock_client.release(lease, harness.context)
    harness.lock_client.release(lease, harness.context)
    assert kept.notes == {"count": "1"}
    assert harness.store.kept(NAME)
    harness.lock_client.release(lease, harness.context)
    assert not harness.store.kept(NAME)
    assert harness.kinds() == ["acquired", "released"]


@pytest.mark.invariant("owner-is-one-delivery")
def test_an_entry_nested_in_a_lost_lease_raises_and_never_acquires_anew(harness: LockClientHarness) -> None:
    lease = harness.take()
    harness.store.lose(NAME)
    with pytest.raises(LockLost, match="cannot be entered again"):
        harness.take()
    assert not harness.store.kept(NAME)
    assert lease.hold_count == 1
    harness.lock_client.release(lease, harness.context)
    assert harness.take().token == 2  # outside of it, it is a new entry


@pytest.mark.parametrize(("tick", "used"), [("t1", True), ("t2", False), ("", False)])
def test_nested_run_of_another_tick_is_not_told_its_name_was_used(
    harness: LockClientHarness, tick: str, used: bool
) -> None:
    lease = harness.take()
    by = Requester.of("app.post", "inner", "node", 1)
    lease.inner_use = ReleaseRequest(tick="t1", used_ms=1, requester=by.text)
    answer = harness.lock_client.acquire(
        NAME, harness.context, TTL, AcquireRequest(harness.context.requester, once=True, tick=tick)
    )
    if used:
        assert isinstance(answer, Used)
        assert (answer.by.task_id, answer.same_message) == ("inner", False)
    else:
        assert answer is lease
        assert lease.hold_count == 2


# Waiting


def test_a_waiter_that_nobody_wakes_asks_when_the_holders_lease_ends_and_else_seldom(
    harness: LockClientHarness,
) -> None:
    holder = harness.new_context("other")
    assert isinstance(harness.lock_client.acquire(NAME, holder, 5.0, AcquireRequest(holder.requester)), Lease)
    start, calls = harness.clock.now, harness.store.calls
    lease = harness.lock_client.acquire_within(
        NAME, harness.context, TTL, AcquireRequest(harness.context.requester), None
    )
    assert isinstance(lease, Lease)
    assert 5.0 <= harness.clock.now - start < 5.1
    # Ask, and then at each POLL: 2, 4 and 5 s.
    assert (POLL, harness.store.calls - calls) == (2.0, 4)


def test_a_waiter_gives_up_in_time(harness: LockClientHarness) -> None:
    holder = harness.new_context("other")
    harness.lock_client.acquire(NAME, holder, 500.0, AcquireRequest(holder.requester))
    start = harness.clock.now
    assert isinstance(
        harness.lock_client.acquire_within(NAME, harness.context, TTL, AcquireRequest(harness.context.requester), 7.0),
        Held,
    )
    assert harness.clock.now - start == pytest.approx(7.0)


@pytest.mark.invariant("duplicates-do-not-run")
def test_waiter_keeps_the_rank_of_its_arrival_however_often_it_asks(harness: LockClientHarness) -> None:
    """Otherwise a waiting copy would get a later rank than the done mark of its duplicate, and would run again."""
    holder = harness.new_context("other")
    harness.lock_client.acquire(NAME, holder, 5.0, AcquireRequest(holder.requester))
    harness.store.requests.clear()
    lease = harness.lock_client.acquire_within(
        NAME, harness.context, TTL, AcquireRequest(harness.context.requester), None
    )
    assert isinstance(lease, Lease)
    first, *others = [request.rank_us for request in harness.store.requests]
    assert first is None
    assert len(others) >= 3
    assert set(others) == {harness.store.ranks}
    assert [request.notify for request in harness.store.requests] == [True] * (1 + len(others))
    assert [request.waited for request in harness.store.requests] == [False] + [True] * len(others)


@pytest.mark.parametrize("after", ["another holder", "nobody"])
def test_who_waits_for_a_holder_that_is_about_to_release_waits_for_nobody_else(
    harness: LockClientHarness, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is skipped where the lock is held is not to keep its slot waiting for the next one to end."""
    holder, rival = harness.new_context("other"), harness.new_context("rival")
    held = harness.lock_client.acquire(NAME, holder, 500.0, AcquireRequest(holder.requester))
    assert isinstance(held, Lease)
    harness.lock_client.announce_release(held)
    start = harness.clock.now

    def release_meanwhile(*_waits: object) -> bool:
        harness.clock.now += 0.5
        if harness.clock.now - start == 1.0:
            harness.lock_client.release(held, holder)
            if after == "another holder":
                harness.lock_client.acquire(NAME, rival, 500.0, AcquireRequest(rival.requester))
        return True

    monkeypatch.setattr(FakeListener, "wait", release_meanwhile)
    answer = harness.lock_client.acquire_within(
        NAME, harness.context, TTL, AcquireRequest(harness.context.requester), 7.0, while_releasing=True
    )
    assert isinstance(answer, Held if after == "another holder" else Lease)
    assert harness.clock.now - start == 1.0


def test_two_names_are_two_keys() -> None:
    assert LockKeys.of("dlock", a_name("x")) != LockKeys.of("dlock", a_name("y")) != LockKeys.of("other", a_name("y"))
