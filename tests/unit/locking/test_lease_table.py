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
def lease_table(request: pytest.FixtureRequest) -> Iterator[LocalLeaseTable | SharedLeaseTable]:
    if request.param == "local":
        yield LocalLeaseTable()
    else:
        yield request.getfixturevalue("shared")


def test_a_record_says_where_an_acquisition_is_in_its_life(lease_table: LocalLeaseTable | SharedLeaseTable) -> None:
    record = lease_table.open(a_name(), "o.1", 30.0)
    seen = [lease_table.records()[0].state]
    record.held(130.0)
    seen.append(lease_table.records()[0].state)
    record.begin_release()
    seen.append(lease_table.records()[0].state)
    record.delegate_release(ReleaseRequest(outcome_unknown=True).text)
    seen.append(lease_table.records()[0].state)
    assert seen == [LeaseState.ACQUIRING, LeaseState.HELD, LeaseState.RELEASING, LeaseState.RELEASE_DELEGATED]
    (left,) = lease_table.records()
    assert (left.name, left.acquisition, left.ttl) == (a_name(), "o.1", 30.0)
    assert ReleaseRequest.from_text(left.ending) == ReleaseRequest(outcome_unknown=True)
    left.clear()
    assert record.state is LeaseState.FREE
    assert not lease_table.records()


def test_the_watchdogs_renewal_is_the_holders_deadline_and_never_moves_it_back(
    lease_table: LocalLeaseTable | SharedLeaseTable,
) -> None:
    record = lease_table.open(a_name(), "o.1", 30.0)
    record.held(130.0)
    (seen,) = lease_table.records()
    for moved, expected in [(140.0, 140.0), (135.0, 140.0), (150.0, 150.0)]:
        seen.renewed(moved)
        assert record.deadline == seen.deadline == expected
    record.renewed(500.0)  # the holder's own extend
    seen.renewed(160.0)
    assert record.deadline == seen.deadline == 500.0


@pytest.mark.parametrize("who", ["holder", "watchdog"])
def test_a_loss_that_one_side_found_is_known_to_both(lease_table: LocalLeaseTable | SharedLeaseTable, who: str) -> None:
    record = lease_table.open(a_name(), "o.1", 30.0)
    record.held(130.0)
    (seen,) = lease_table.records()
    assert not record.lost
    (record if who == "holder" else seen).lose()
    assert (record.lost, seen.lost) == (True, True)


def test_the_next_acquisition_starts_afresh(lease_table: LocalLeaseTable | SharedLeaseTable) -> None:
    """Whatever was said of the last one, late words too, is no word about this one."""
    first = lease_table.open(a_name("a"), "o.1", 30.0)
    first.held(130.0)
    (seen,) = lease_table.records()
    seen.renewed(900.0)
    seen.lose()
    first.clear()
    second = lease_table.open(a_name("b"), "o.2", 5.0)
    second.held(200.0)
    assert (second.deadline, second.lost, second.state) == (200.0, False, LeaseState.HELD)
    seen.renewed(990.0)
    seen.lose()
    assert (second.deadline, second.lost) == (200.0, False)
    seen.clear()
    first.clear()
    first.begin_release()
    first.delegate_release(ReleaseRequest(final=True).text)
    assert [(record.acquisition, record.state) for record in lease_table.records()] == [("o.2", LeaseState.HELD)]
    assert second.state is LeaseState.HELD


@pytest.mark.invariant("lease-is-recorded-before-acquire")
def test_record_that_was_left_to_the_watchdog_never_goes_back(lease_table: LocalLeaseTable | SharedLeaseTable) -> None:
    """Else its release is sent by the child and by the watchdog, which waits for the child's."""
    record = lease_table.open(a_name(), "o.1", 30.0)
    record.held(130.0)
    record.delegate_release(ReleaseRequest(final=True).text)
    assert not record.begin_release()
    (left,) = lease_table.records()
    assert (record.state, left.state) == (LeaseState.RELEASE_DELEGATED, LeaseState.RELEASE_DELEGATED)
    assert ReleaseRequest.from_text(left.ending) == ReleaseRequest(final=True)
    left.clear()
    assert not record.begin_release()
    assert record.state is LeaseState.FREE


def test_when_the_watchdog_looked_is_known_to_both_sides(lease_table: LocalLeaseTable | SharedLeaseTable) -> None:
    assert lease_table.scanned_at == 0.0
    lease_table.scanned_at = 1234.5
    assert lease_table.scanned_at == 1234.5
    lease_table.open(a_name(), "o.1", 30.0)
    assert lease_table.scanned_at == 1234.5


def test_many_acquisitions_are_held_at_once(lease_table: LocalLeaseTable | SharedLeaseTable) -> None:
    held = [lease_table.open(a_name(str(number)), f"o.{number}", 30.0) for number in range(64)]
    assert [record.acquisition for record in lease_table.records()] == [f"o.{number}" for number in range(64)]
    for record in held[::2]:
        record.clear()
    assert [record.acquisition for record in lease_table.records()] == [f"o.{number}" for number in range(1, 64, 2)]


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
