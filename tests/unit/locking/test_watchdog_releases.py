"""Releases by the watchdog: delegated ones, and those of dead processes. Tick by tick, without a thread."""

from __future__ import annotations

import pytest

from celery_dlock import runtime
from celery_dlock.errors import StoreUnavailable
from celery_dlock.locking.lease import drift_margin
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.watchdog import LINGER, TICK
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Identity, Released
from tests.unit.fakes import FakeSource, WatchdogScene, a_name


@pytest.fixture
def scene() -> WatchdogScene:
    return WatchdogScene()


# Ends that were left to the watchdog


def test_a_release_that_was_left_to_the_watchdog_is_carried_out_with_its_ending(scene: WatchdogScene) -> None:
    slot = scene.hold()
    ending = ReleaseRequest(final=True, identity=Identity("id", 2).digest, used_ms=7, requester="me")
    slot.delegate_release(ending.text)
    scene.watchdog.tick()
    assert scene.store.ended == [("owner.x", ending)]
    assert slot.state is LeaseState.FREE
    assert not scene.source.records()
    assert scene.source.told_freed == [("owner.x", Released(ours=True, duplicate_seen=False))]
    assert not scene.watchdog.tick()


def test_an_end_is_tried_again_until_the_store_is_back(scene: WatchdogScene) -> None:
    slot = scene.hold()
    slot.delegate_release(ReleaseRequest(outcome_unknown=True).text)
    scene.store.away = StoreUnavailable("away")
    scene.run(5)
    assert slot.state is LeaseState.RELEASE_DELEGATED
    scene.store.away = None
    scene.run(TICK)
    assert scene.store.ended == [("owner.x", ReleaseRequest(outcome_unknown=True))]
    assert not scene.lost


def test_while_the_store_is_away_the_ends_do_not_wait_for_it_one_by_one(scene: WatchdogScene) -> None:
    for text in "abcdef":
        scene.hold(text).delegate_release(ReleaseRequest().text)
    scene.store.away = StoreUnavailable("away")
    calls = scene.store.calls
    scene.watchdog.tick()
    assert scene.store.calls == calls + 1


def test_renewals_come_before_ends(scene: WatchdogScene) -> None:
    """A release that takes long must not cost a lease."""
    gone, kept = scene.hold("gone"), scene.hold("kept")
    scene.clock.now += 15
    gone.delegate_release(ReleaseRequest().text)
    scene.store.call_time = 1.0
    sent = scene.clock.now
    scene.watchdog.tick()
    assert kept.deadline == pytest.approx(sent + 30 - drift_margin(30))
    assert scene.store.ended


def test_a_release_that_neither_succeeds_nor_says_so_is_carried_out_after_a_while(scene: WatchdogScene) -> None:
    slot = scene.hold()
    slot.begin_release()
    scene.run(LINGER - 2 * TICK)
    assert not scene.store.ended
    scene.run(4 * TICK)
    assert scene.store.ended == [("owner.x", ReleaseRequest(outcome_unknown=True))]
    assert slot.state is LeaseState.FREE


def test_a_release_under_way_is_given_all_the_time_that_it_can_take() -> None:
    """A connection, the command, another connection, the command again: else its ending would be lost."""
    assert LINGER >= runtime.RELEASE_STEPS * 3.0  # the default of dlock_timeout


# The dead


def test_what_a_dead_process_held_is_freed_in_one_tick(scene: WatchdogScene) -> None:
    dead = FakeSource(child=True)
    scene.watchdog.watch(dead)
    held, mine = scene.hold("held", source=dead), scene.hold("mine")
    dead.slots.open(a_name("asking"), "owner.asking", 30.0)
    dead.slots.open(a_name("leaving"), "owner.leaving", 30.0).begin_release()
    left = ReleaseRequest(final=True, identity=Identity("id").digest)
    dead.slots.open(a_name("left"), "owner.left", 30.0).delegate_release(left.text)
    dead.dead = True
    scene.watchdog.tick()
    unsure = ReleaseRequest(outcome_unknown=True)
    assert scene.store.ended == [
        ("owner.asking", unsure),
        ("owner.held", unsure),
        ("owner.leaving", unsure),
        ("owner.left", left),
    ]
    assert ("owner.held", Released(ours=True, duplicate_seen=False)) in dead.told_freed
    assert held.state is LeaseState.FREE
    assert mine.state is LeaseState.HELD
    scene.watchdog.tick()
    assert scene.watchdog._sources == [scene.source]


def test_the_dead_are_not_forgotten_while_the_store_is_away(scene: WatchdogScene) -> None:
    scene.hold()
    scene.source.dead = True
    scene.store.away = StoreUnavailable("away")
    scene.run(5)
    assert scene.watchdog._sources == [scene.source]
    scene.store.away = None
    scene.run(TICK)
    assert not scene.store.locks
    scene.run(TICK)
    assert not scene.watchdog._sources
