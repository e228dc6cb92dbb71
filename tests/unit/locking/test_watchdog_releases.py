"""Releases by the watchdog: delegated ones, and those of dead processes. Round by round, without a thread."""

from __future__ import annotations

import pytest

from celery_dlock import runtime
from celery_dlock.errors import StoreUnavailable
from celery_dlock.locking.lease import drift_margin
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.watchdog import LINGER, ROUND
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Identity, Released
from tests.unit.fakes import FakeSource, WatchdogHarness, a_name


@pytest.fixture
def harness() -> WatchdogHarness:
    return WatchdogHarness()


# Ends that were left to the watchdog


def test_a_release_that_was_left_to_the_watchdog_is_carried_out_with_its_ending(harness: WatchdogHarness) -> None:
    record = harness.hold()
    ending = ReleaseRequest(final=True, identity=Identity("id", 2).digest, used_ms=7, requester="me")
    record.delegate_release(ending.text)
    harness.watchdog.run_round()
    assert harness.store.ended == [("owner.x", ending)]
    assert record.state is LeaseState.FREE
    assert not harness.source.records()
    assert harness.source.told_freed == [("owner.x", Released(ours=True, duplicate_seen=False))]
    assert not harness.watchdog.run_round()


def test_an_end_is_tried_again_until_the_store_is_back(harness: WatchdogHarness) -> None:
    record = harness.hold()
    record.delegate_release(ReleaseRequest(outcome_unknown=True).text)
    harness.store.away = StoreUnavailable("away")
    harness.run(5)
    assert record.state is LeaseState.RELEASE_DELEGATED
    harness.store.away = None
    harness.run(ROUND)
    assert harness.store.ended == [("owner.x", ReleaseRequest(outcome_unknown=True))]
    assert not harness.lost


def test_while_the_store_is_away_the_ends_do_not_wait_for_it_one_by_one(harness: WatchdogHarness) -> None:
    for text in "abcdef":
        harness.hold(text).delegate_release(ReleaseRequest().text)
    harness.store.away = StoreUnavailable("away")
    calls = harness.store.calls
    harness.watchdog.run_round()
    assert harness.store.calls == calls + 1


def test_renewals_come_before_ends(harness: WatchdogHarness) -> None:
    """A release that takes long must not cost a lease."""
    gone, kept = harness.hold("gone"), harness.hold("kept")
    harness.clock.now += 15
    gone.delegate_release(ReleaseRequest().text)
    harness.store.call_time = 1.0
    sent = harness.clock.now
    harness.watchdog.run_round()
    assert kept.deadline == pytest.approx(sent + 30 - drift_margin(30))
    assert harness.store.ended


def test_a_release_that_neither_succeeds_nor_says_so_is_carried_out_after_a_while(harness: WatchdogHarness) -> None:
    record = harness.hold()
    record.begin_release()
    harness.run(LINGER - 2 * ROUND)
    assert not harness.store.ended
    harness.run(4 * ROUND)
    assert harness.store.ended == [("owner.x", ReleaseRequest(outcome_unknown=True))]
    assert record.state is LeaseState.FREE


def test_a_release_under_way_is_given_all_the_time_that_it_can_take() -> None:
    """A connection, the command, another connection, the command again: else its ending would be lost."""
    assert LINGER >= runtime.RELEASE_STEPS * 3.0  # the default of dlock_timeout


# The dead


def test_what_a_dead_process_held_is_freed_in_one_round(harness: WatchdogHarness) -> None:
    dead = FakeSource(child=True)
    harness.watchdog.watch(dead)
    held, mine = harness.hold("held", source=dead), harness.hold("mine")
    dead.lease_table.open(a_name("asking"), "owner.asking", 30.0)
    dead.lease_table.open(a_name("leaving"), "owner.leaving", 30.0).begin_release()
    left = ReleaseRequest(final=True, identity=Identity("id").digest)
    dead.lease_table.open(a_name("left"), "owner.left", 30.0).delegate_release(left.text)
    dead.dead = True
    harness.watchdog.run_round()
    unsure = ReleaseRequest(outcome_unknown=True)
    assert harness.store.ended == [
        ("owner.asking", unsure),
        ("owner.held", unsure),
        ("owner.leaving", unsure),
        ("owner.left", left),
    ]
    assert ("owner.held", Released(ours=True, duplicate_seen=False)) in dead.told_freed
    assert held.state is LeaseState.FREE
    assert mine.state is LeaseState.HELD
    harness.watchdog.run_round()
    assert harness.watchdog._sources == [harness.source]


def test_the_dead_are_not_forgotten_while_the_store_is_away(harness: WatchdogHarness) -> None:
    harness.hold()
    harness.source.dead = True
    harness.store.away = StoreUnavailable("away")
    harness.run(5)
    assert harness.watchdog._sources == [harness.source]
    harness.store.away = None
    harness.run(ROUND)
    assert not harness.store.locks
    harness.run(ROUND)
    assert not harness.watchdog._sources
