"""Slots of both kinds, local and shared: one contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dlock.locking.lease_table import LeaseState, LocalLeaseTable
from celery_dlock.locking.shared_lease_table import SharedLeaseTable
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Identity
from tests.unit.fakes import a_name


@pytest.fixture(params=["local", "shared"])
def slots(request: pytest.FixtureRequest) -> Iterator[LocalLeaseTable | SharedLeaseTable]:
    if request.param == "local":
        yield LocalLeaseTable()
    else:
        yield request.getfixturevalue("shared")


def test_a_slot_says_where_an_acquisition_is_in_its_life(slots: LocalLeaseTable | SharedLeaseTable) -> None:
    slot = slots.open(a_name(), "o.1", 30.0)
    seen = [slots.records()[0].state]
    slot.held(130.0)
    seen.append(slots.records()[0].state)
    slot.begin_release()
    seen.append(slots.records()[0].state)
    slot.delegate_release(ReleaseRequest(outcome_unknown=True).text)
    seen.append(slots.records()[0].state)
    assert seen == [LeaseState.ACQUIRING, LeaseState.HELD, LeaseState.RELEASING, LeaseState.RELEASE_DELEGATED]
    (left,) = slots.records()
    assert (left.name, left.acquisition, left.ttl) == (a_name(), "o.1", 30.0)
    assert ReleaseRequest.from_text(left.ending) == ReleaseRequest(outcome_unknown=True)
    left.clear()
    assert slot.state is LeaseState.FREE
    assert not slots.records()


def test_the_watchdogs_renewal_is_the_holders_deadline_and_never_moves_it_back(
    slots: LocalLeaseTable | SharedLeaseTable,
) -> None:
    slot = slots.open(a_name(), "o.1", 30.0)
    slot.held(130.0)
    (seen,) = slots.records()
    for moved, expected in [(140.0, 140.0), (135.0, 140.0), (150.0, 150.0)]:
        seen.renewed(moved)
        assert slot.deadline == seen.deadline == expected
    slot.renewed(500.0)  # the holder's own extend
    seen.renewed(160.0)
    assert slot.deadline == seen.deadline == 500.0


@pytest.mark.parametrize("who", ["holder", "watchdog"])
def test_a_loss_that_one_side_found_is_known_to_both(slots: LocalLeaseTable | SharedLeaseTable, who: str) -> None:
    slot = slots.open(a_name(), "o.1", 30.0)
    slot.held(130.0)
    (seen,) = slots.records()
    assert not slot.lost
    (slot if who == "holder" else seen).lose()
    assert (slot.lost, seen.lost) == (True, True)


def test_the_next_acquisition_starts_afresh(slots: LocalLeaseTable | SharedLeaseTable) -> None:
    """Whatever was said of the last one, late words too, is no word about this one."""
    first = slots.open(a_name("a"), "o.1", 30.0)
    first.held(130.0)
    (seen,) = slots.records()
    seen.renewed(900.0)
    seen.lose()
    first.clear()
    second = slots.open(a_name("b"), "o.2", 5.0)
    second.held(200.0)
    assert (second.deadline, second.lost, second.state) == (200.0, False, LeaseState.HELD)
    seen.renewed(990.0)
    seen.lose()
    assert (second.deadline, second.lost) == (200.0, False)
    seen.clear()
    first.clear()
    first.begin_release()
    first.delegate_release(ReleaseRequest(final=True).text)
    assert [(slot.acquisition, slot.state) for slot in slots.records()] == [("o.2", LeaseState.HELD)]
    assert second.state is LeaseState.HELD


@pytest.mark.invariant("lease-is-recorded-before-acquire")
def test_slot_that_was_left_to_the_watchdog_never_goes_back(slots: LocalLeaseTable | SharedLeaseTable) -> None:
    """Else its release is sent by the child and by the watchdog, which waits for the child's."""
    slot = slots.open(a_name(), "o.1", 30.0)
    slot.held(130.0)
    slot.delegate_release(ReleaseRequest(final=True).text)
    assert not slot.begin_release()
    (left,) = slots.records()
    assert (slot.state, left.state) == (LeaseState.RELEASE_DELEGATED, LeaseState.RELEASE_DELEGATED)
    assert ReleaseRequest.from_text(left.ending) == ReleaseRequest(final=True)
    left.clear()
    assert not slot.begin_release()
    assert slot.state is LeaseState.FREE


def test_when_the_watchdog_looked_is_known_to_both_sides(slots: LocalLeaseTable | SharedLeaseTable) -> None:
    assert slots.scanned_at == 0.0
    slots.scanned_at = 1234.5
    assert slots.scanned_at == 1234.5
    slots.open(a_name(), "o.1", 30.0)
    assert slots.scanned_at == 1234.5


def test_many_acquisitions_are_held_at_once(slots: LocalLeaseTable | SharedLeaseTable) -> None:
    held = [slots.open(a_name(str(number)), f"o.{number}", 30.0) for number in range(64)]
    assert [slot.acquisition for slot in slots.records()] == [f"o.{number}" for number in range(64)]
    for slot in held[::2]:
        slot.clear()
    assert [slot.acquisition for slot in slots.records()] == [f"o.{number}" for number in range(1, 64, 2)]


# What a release still has to say


@pytest.mark.parametrize(
    "ending",
    [
        ReleaseRequest(),
        ReleaseRequest(outcome_unknown=True),
        ReleaseRequest(
            final=True, identity=Identity("id", 2, 3).digest, used_ms=86_400_000, requester='["t", "id", "n", 5]'
        ),
    ],
)
def test_an_ending_survives_as_text(ending: ReleaseRequest) -> None:
    assert ReleaseRequest.from_text(ending.text) == ending


@pytest.mark.parametrize(
    "torn", ["", "[", "[true, [", '[true, ["id", 2, 3], 0, "', "null", "5", "[1, 2]", "{}", "\ufffd"]
)
def test_torn_text_means_no_more_than_that_the_lock_is_to_be_freed(torn: str) -> None:
    """Its writer was killed in the middle of it."""
    assert ReleaseRequest.from_text(torn) == ReleaseRequest(outcome_unknown=True)
