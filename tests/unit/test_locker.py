"""The story of a lock, on a clock and a store of its own: slots, entries, waiting."""

from __future__ import annotations

import os

import pytest

from celery_dlock.errors import LockLost, ReplyLost, StoreUnavailable
from celery_dlock.keys import LockKeys
from celery_dlock.lease import Lease
from celery_dlock.locker import POLL
from celery_dlock.records import Claim, Held, Identity
from celery_dlock.slots import SlotState
from celery_dlock.store import Ending
from tests.unit.fakes import FakeWaker, LockerScene, a_name

NAME = a_name()
TTL = 30.0


@pytest.fixture
def scene() -> LockerScene:
    return LockerScene()


# The slot: what the keeper sees


def test_a_slot_is_written_before_the_store_is_asked(scene: LockerScene) -> None:
    seen = []
    acquire = scene.store.acquire

    def looking(*args: object) -> object:
        seen.append([(slot.acquisition, slot.state) for slot in scene.slots.taken()])
        return acquire(*args)  # type: ignore[arg-type]

    scene.store.acquire = looking  # type: ignore[method-assign, assignment]
    lease = scene.take()
    assert seen == [[("me.1", SlotState.ACQUIRING)]]
    assert lease.slot.state is SlotState.HELD
    assert scene.woken == 1


def test_a_refusal_leaves_no_slot(scene: LockerScene) -> None:
    scene.take()
    other = scene.new_scope("other")
    assert isinstance(scene.locker.acquire(NAME, other, TTL, Claim(other.by)), Held)
    assert [slot.acquisition for slot in scene.slots.taken()] == ["me.1"]


def test_a_release_that_fails_is_left_to_the_keeper_with_its_ending_and_is_no_loss(scene: LockerScene) -> None:
    lease = scene.take()
    scene.store.away = StoreUnavailable("away")
    ending = Ending(final=True, identity=Identity("id1").digest, used_ms=5, by="me")
    assert scene.locker.release(lease, scene.scope, ending)
    (slot,) = scene.slots.taken()
    assert (slot.state, Ending.from_text(slot.ending)) == (SlotState.LEFT, ending)
    assert scene.woken == 2
    assert scene.kinds() == ["acquired", "released"]


def test_an_acquire_of_unknown_outcome_whose_release_fails_too_is_left_to_the_keeper(scene: LockerScene) -> None:
    scene.store.away = ReplyLost("cut")
    with pytest.raises(StoreUnavailable):
        scene.take()
    (slot,) = scene.slots.taken()
    assert (slot.state, Ending.from_text(slot.ending)) == (SlotState.LEFT, Ending(unsure=True, undone=True))
    assert scene.woken == 1
    assert not scene.told


def test_a_lease_found_lost_at_its_release_is_told_lost_and_not_released(scene: LockerScene) -> None:
    lease = scene.take()
    scene.store.lose(NAME)
    assert not scene.locker.release(lease, scene.scope)
    assert scene.kinds() == ["acquired", "lost"]
    assert not scene.slots.taken()


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


def test_an_entry_nested_in_a_lost_lease_raises_and_never_acquires_anew(scene: LockerScene) -> None:
    lease = scene.take()
    scene.store.lose(NAME)
    with pytest.raises(LockLost, match="cannot be entered again"):
        scene.take()
    assert not scene.store.kept(NAME)
    assert lease.hold_count == 1
    scene.locker.release(lease, scene.scope)
    assert scene.take().token == 2  # outside of it, it is a new entry


# Waiting


def test_a_waiter_that_nobody_wakes_asks_when_the_holders_lease_ends_and_else_seldom(scene: LockerScene) -> None:
    holder = scene.new_scope("other")
    assert isinstance(scene.locker.acquire(NAME, holder, 5.0, Claim(holder.by)), Lease)
    start, calls = scene.clock.now, scene.store.calls
    lease = scene.locker.acquire_within(NAME, scene.scope, TTL, Claim(scene.scope.by), None)
    assert isinstance(lease, Lease)
    assert 5.0 <= scene.clock.now - start < 5.1
    # Ask, listen, ask again, and then each POLL: 2, 4 and 5 s.
    assert (POLL, scene.store.calls - calls) == (2.0, 6)


def test_a_waiter_gives_up_in_time(scene: LockerScene) -> None:
    holder = scene.new_scope("other")
    scene.locker.acquire(NAME, holder, 500.0, Claim(holder.by))
    start = scene.clock.now
    assert isinstance(scene.locker.acquire_within(NAME, scene.scope, TTL, Claim(scene.scope.by), 7.0), Held)
    assert scene.clock.now - start == pytest.approx(7.0)


@pytest.mark.parametrize("after", ["another holder", "nobody"])
def test_who_waits_for_a_holder_that_is_about_to_release_waits_for_nobody_else(
    scene: LockerScene, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is skipped where the lock is held is not to keep its slot waiting for the next one to end."""
    holder, rival = scene.new_scope("other"), scene.new_scope("rival")
    held = scene.locker.acquire(NAME, holder, 500.0, Claim(holder.by))
    assert isinstance(held, Lease)
    scene.locker.leave(held)
    start = scene.clock.now

    def release_meanwhile(*_waits: object) -> bool:
        scene.clock.now += 0.5
        if scene.clock.now - start == 1.0:
            scene.locker.release(held, holder)
            if after == "another holder":
                scene.locker.acquire(NAME, rival, 500.0, Claim(rival.by))
        return True

    monkeypatch.setattr(FakeWaker, "wait", release_meanwhile)
    answer = scene.locker.acquire_within(NAME, scene.scope, TTL, Claim(scene.scope.by), 7.0, leaving=True)
    assert isinstance(answer, Held if after == "another holder" else Lease)
    assert scene.clock.now - start == 1.0


def test_two_names_are_two_keys() -> None:
    assert LockKeys.of("dlock", a_name("x")) != LockKeys.of("dlock", a_name("y")) != LockKeys.of("other", a_name("y"))
