"""The story of a lock, on a clock and a store of its own: slots, entries, waiting."""

from __future__ import annotations

import os

import pytest

from celery_dlock.errors import LockLost, ReplyLost, StoreNotReady, StoreUnavailable
from celery_dlock.locking.client import POLL, UNWATCHED
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Held, Identity, Requester, Used
from celery_dlock.store.redis.keys import LockKeys
from tests.unit.fakes import FakeWaker, LockerScene, a_name

NAME = a_name()
TTL = 30.0


@pytest.fixture
def scene() -> LockerScene:
    return LockerScene()


# The slot: what the keeper sees


@pytest.mark.invariant("lease-is-recorded-before-acquire")
def test_a_slot_is_written_before_the_store_is_asked(scene: LockerScene) -> None:
    seen = []
    acquire = scene.store.acquire

    def looking(*args: object) -> object:
        seen.append([(slot.acquisition, slot.state) for slot in scene.slots.records()])
        return acquire(*args)  # type: ignore[arg-type]

    scene.store.acquire = looking  # type: ignore[method-assign, assignment]
    lease = scene.take()
    assert seen == [[("me.1", LeaseState.ACQUIRING)]]
    assert lease.record.state is LeaseState.HELD
    assert scene.woken == 1


def test_a_refusal_leaves_no_slot(scene: LockerScene) -> None:
    scene.take()
    other = scene.new_scope("other")
    assert isinstance(scene.locker.acquire(NAME, other, TTL, AcquireRequest(other.requester)), Held)
    assert [slot.acquisition for slot in scene.slots.records()] == ["me.1"]


def test_a_release_that_fails_is_left_to_the_keeper_with_its_ending_and_is_no_loss(scene: LockerScene) -> None:
    lease = scene.take()
    scene.store.away = StoreUnavailable("away")
    ending = ReleaseRequest(final=True, identity=Identity("id1").digest, used_ms=5, requester="me")
    assert scene.locker.release(lease, scene.scope, ending)
    (slot,) = scene.slots.records()
    assert (slot.state, ReleaseRequest.from_text(slot.ending)) == (LeaseState.RELEASE_DELEGATED, ending)
    assert scene.woken == 2
    assert scene.kinds() == ["acquired", "released"]


def test_an_acquire_of_unknown_outcome_whose_release_fails_too_is_left_to_the_keeper(scene: LockerScene) -> None:
    scene.store.away = ReplyLost("cut")
    with pytest.raises(StoreUnavailable):
        scene.take()
    (slot,) = scene.slots.records()
    assert (slot.state, ReleaseRequest.from_text(slot.ending)) == (
        LeaseState.RELEASE_DELEGATED,
        ReleaseRequest(outcome_unknown=True, rolled_back=True),
    )
    assert scene.woken == 1
    assert not scene.told


def test_a_lease_found_lost_at_its_release_is_told_lost_and_not_released(scene: LockerScene) -> None:
    lease = scene.take()
    scene.store.lose(NAME)
    assert not scene.locker.release(lease, scene.scope)
    assert scene.kinds() == ["acquired", "lost"]
    assert not scene.slots.records()


def test_a_second_release_and_one_in_a_forked_process_do_nothing(scene: LockerScene) -> None:
    lease = scene.take()
    lease.pid = os.getpid() + 1
    assert scene.locker.release(lease, scene.scope)
    assert scene.store.kept(NAME)
    lease.pid = os.getpid()
    assert scene.locker.release(lease, scene.scope)
    assert scene.locker.release(lease, scene.scope)
    assert len(scene.store.ended) == 1


@pytest.mark.parametrize("why", ["it is over", "another process"])
def test_a_release_that_has_nothing_to_free_still_takes_the_entry_off_the_record(scene: LockerScene, why: str) -> None:
    """Else whoever releases all that is on record would never come to an end."""
    lease = scene.take()
    if why == "it is over":
        scene.locker.release(lease, scene.scope)
        scene.scope.entered.append(lease)  # as an interrupted entry leaves it
    else:
        lease.pid += 1
    scene.locker.release(lease, scene.scope)
    assert not scene.scope.entered


@pytest.mark.invariant("store-calls-are-idempotent")
def test_second_try_after_a_lost_reply_says_that_a_copy_may_have_met_the_first(scene: LockerScene) -> None:
    """The word that a twin left in the first acquisition went with it."""
    scene.store.failures = [ReplyLost("cut"), None]
    lease = scene.take()
    assert [claim.republished for claim in scene.store.claims] == [False, True]
    assert lease.acquisition == "me.2"
    assert scene.store.ended == [("me.1", scene.scope.rollback)]


# The watchdog


@pytest.mark.invariant("thread-start-is-retried")
def test_acquire_that_no_watchdog_can_keep_gives_the_lock_back_and_raises(scene: LockerScene) -> None:
    scene.wakes = False
    for number in (1, 2):
        with pytest.raises(StoreNotReady, match="the thread that renews leases cannot be started"):
            scene.take()
        assert scene.store.ended[-1] == (f"me.{number}", scene.scope.rollback)
    assert not scene.store.locks
    assert not scene.slots.records()
    assert not scene.scope.entered
    assert not scene.told
    scene.wakes = True
    assert scene.take().held


def test_acquire_that_nothing_can_keep_nor_give_back_is_left_to_the_watchdog(scene: LockerScene) -> None:
    scene.wakes = False
    scene.store.failures = [None, StoreUnavailable("away")]
    with pytest.raises(StoreUnavailable, match="away"):
        scene.take()
    (slot,) = scene.slots.records()
    assert (slot.state, ReleaseRequest.from_text(slot.ending)) == (LeaseState.RELEASE_DELEGATED, scene.scope.rollback)


@pytest.mark.invariant("thread-start-is-retried")
def test_acquire_under_a_watchdog_that_has_not_looked_lately_warns_once(
    scene: LockerScene, caplog: pytest.LogCaptureFixture
) -> None:
    def take(text: str) -> list[str]:
        caplog.clear()
        assert scene.take(a_name(text)).held
        return [record.getMessage() for record in caplog.records]

    assert take("before its first look") == []
    scene.slots.scanned_at = scene.clock.now
    scene.clock.now += UNWATCHED - 0.1
    assert take("while it takes long") == []
    scene.clock.now += 2
    (line,) = take("late")
    assert line.endswith(
        ": the watchdog has not looked at the leases of this process for 12 s; unless it does, this lease is not "
        "renewed and ends in 30 s"
    )
    assert take("told already") == []
    scene.slots.scanned_at = scene.clock.now
    assert take("it looks again") == []
    scene.clock.now += UNWATCHED + 1
    assert len(take("late once more")) == 1


# Reentrancy


def test_an_inner_entry_states_the_count_absolutely_and_the_outermost_leaving_frees(scene: LockerScene) -> None:
    lease = scene.take()
    assert scene.take() is lease
    assert scene.take() is lease
    kept = scene.store.kept(NAME)
    assert kept
    assert (kept.notes, kept.token, lease.hold_count) == ({"count": "3"}, 1, 3)
    scene.locker.release(lease, scene.scope)
    scene.locker.release(lease, scene.scope)
    assert kept.notes == {"count": "1"}
    assert scene.store.kept(NAME)
    scene.locker.release(lease, scene.scope)
    assert not scene.store.kept(NAME)
    assert scene.kinds() == ["acquired", "released"]


@pytest.mark.invariant("owner-is-one-delivery")
def test_an_entry_nested_in_a_lost_lease_raises_and_never_acquires_anew(scene: LockerScene) -> None:
    lease = scene.take()
    scene.store.lose(NAME)
    with pytest.raises(LockLost, match="cannot be entered again"):
        scene.take()
    assert not scene.store.kept(NAME)
    assert lease.hold_count == 1
    scene.locker.release(lease, scene.scope)
    assert scene.take().token == 2  # outside of it, it is a new entry


@pytest.mark.parametrize(("tick", "used"), [("t1", True), ("t2", False), ("", False)])
def test_nested_run_of_another_tick_is_not_told_its_name_was_used(scene: LockerScene, tick: str, used: bool) -> None:
    lease = scene.take()
    by = Requester.of("app.post", "inner", "node", 1)
    lease.inner_use = ReleaseRequest(tick="t1", used_ms=1, requester=by.text)
    answer = scene.locker.acquire(NAME, scene.scope, TTL, AcquireRequest(scene.scope.requester, once=True, tick=tick))
    if used:
        assert isinstance(answer, Used)
        assert (answer.by.task_id, answer.same_message) == ("inner", False)
    else:
        assert answer is lease
        assert lease.hold_count == 2


# Waiting


def test_a_waiter_that_nobody_wakes_asks_when_the_holders_lease_ends_and_else_seldom(scene: LockerScene) -> None:
    holder = scene.new_scope("other")
    assert isinstance(scene.locker.acquire(NAME, holder, 5.0, AcquireRequest(holder.requester)), Lease)
    start, calls = scene.clock.now, scene.store.calls
    lease = scene.locker.acquire_within(NAME, scene.scope, TTL, AcquireRequest(scene.scope.requester), None)
    assert isinstance(lease, Lease)
    assert 5.0 <= scene.clock.now - start < 5.1
    # Ask, listen, ask again, and then each POLL: 2, 4 and 5 s.
    assert (POLL, scene.store.calls - calls) == (2.0, 6)


def test_a_waiter_gives_up_in_time(scene: LockerScene) -> None:
    holder = scene.new_scope("other")
    scene.locker.acquire(NAME, holder, 500.0, AcquireRequest(holder.requester))
    start = scene.clock.now
    assert isinstance(
        scene.locker.acquire_within(NAME, scene.scope, TTL, AcquireRequest(scene.scope.requester), 7.0), Held
    )
    assert scene.clock.now - start == pytest.approx(7.0)


@pytest.mark.invariant("duplicates-do-not-run")
def test_waiter_keeps_the_rank_of_its_arrival_however_often_it_asks(scene: LockerScene) -> None:
    """Else a copy that waited behind a rival outranks the done mark that its twin left meanwhile, and runs again."""
    holder = scene.new_scope("other")
    scene.locker.acquire(NAME, holder, 5.0, AcquireRequest(holder.requester))
    scene.store.claims.clear()
    lease = scene.locker.acquire_within(NAME, scene.scope, TTL, AcquireRequest(scene.scope.requester), None)
    assert isinstance(lease, Lease)
    first, *others = [claim.rank_us for claim in scene.store.claims]
    assert first is None
    assert len(others) >= 3
    assert set(others) == {scene.store.ranks}
    assert [claim.notify for claim in scene.store.claims] == [False] + [True] * len(others)


@pytest.mark.parametrize("after", ["another holder", "nobody"])
def test_who_waits_for_a_holder_that_is_about_to_release_waits_for_nobody_else(
    scene: LockerScene, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is skipped where the lock is held is not to keep its slot waiting for the next one to end."""
    holder, rival = scene.new_scope("other"), scene.new_scope("rival")
    held = scene.locker.acquire(NAME, holder, 500.0, AcquireRequest(holder.requester))
    assert isinstance(held, Lease)
    scene.locker.announce_release(held)
    start = scene.clock.now

    def release_meanwhile(*_waits: object) -> bool:
        scene.clock.now += 0.5
        if scene.clock.now - start == 1.0:
            scene.locker.release(held, holder)
            if after == "another holder":
                scene.locker.acquire(NAME, rival, 500.0, AcquireRequest(rival.requester))
        return True

    monkeypatch.setattr(FakeWaker, "wait", release_meanwhile)
    answer = scene.locker.acquire_within(
        NAME, scene.scope, TTL, AcquireRequest(scene.scope.requester), 7.0, leaving=True
    )
    assert isinstance(answer, Held if after == "another holder" else Lease)
    assert scene.clock.now - start == 1.0


def test_two_names_are_two_keys() -> None:
    assert LockKeys.of("dlock", a_name("x")) != LockKeys.of("dlock", a_name("y")) != LockKeys.of("other", a_name("y"))
