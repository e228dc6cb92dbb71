"""Slots of both kinds, local and shared: one contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dlock.records import Identity
from celery_dlock.shared_slots import SharedSlots
from celery_dlock.slots import LocalSlots, SlotState
from celery_dlock.store import Ending
from tests.unit.fakes import a_name


@pytest.fixture
def shared() -> Iterator[SharedSlots]:
    """Adopted by this process: child and main process at once."""
    slots = SharedSlots()
    slots.adopt()
    yield slots
    slots.close()


@pytest.fixture(params=["local", "shared"])
def slots(request: pytest.FixtureRequest) -> Iterator[LocalSlots | SharedSlots]:
    if request.param == "local":
        yield LocalSlots()
    else:
        yield request.getfixturevalue("shared")


def test_a_slot_says_where_an_acquisition_is_in_its_life(slots: LocalSlots | SharedSlots) -> None:
    slot = slots.open(a_name(), "o.1", 30.0)
    seen = [slots.taken()[0].state]
    slot.held(130.0)
    seen.append(slots.taken()[0].state)
    slot.leaving()
    seen.append(slots.taken()[0].state)
    slot.leave_to_keeper(Ending(unsure=True).text)
    seen.append(slots.taken()[0].state)
    assert seen == [SlotState.ACQUIRING, SlotState.HELD, SlotState.LEAVING, SlotState.LEFT]
    (left,) = slots.taken()
    assert (left.name, left.acquisition, left.ttl) == (a_name(), "o.1", 30.0)
    assert Ending.from_text(left.ending) == Ending(unsure=True)
    left.clear()
    assert slot.state is SlotState.FREE
    assert not slots.taken()


def test_the_keepers_renewal_is_the_holders_deadline_and_never_moves_it_back(slots: LocalSlots | SharedSlots) -> None:
    slot = slots.open(a_name(), "o.1", 30.0)
    slot.held(130.0)
    (seen,) = slots.taken()
    for moved, expected in [(140.0, 140.0), (135.0, 140.0), (150.0, 150.0)]:
        seen.moved(moved)
        assert slot.deadline == seen.deadline == expected
    slot.moved(500.0)  # the holder's own extend
    seen.moved(160.0)
    assert slot.deadline == seen.deadline == 500.0


@pytest.mark.parametrize("who", ["holder", "keeper"])
def test_a_loss_that_one_side_found_is_known_to_both(slots: LocalSlots | SharedSlots, who: str) -> None:
    slot = slots.open(a_name(), "o.1", 30.0)
    slot.held(130.0)
    (seen,) = slots.taken()
    assert not slot.lost
    (slot if who == "holder" else seen).lose()
    assert (slot.lost, seen.lost) == (True, True)


def test_the_next_acquisition_starts_afresh(slots: LocalSlots | SharedSlots) -> None:
    """Whatever was said of the last one, late words too, is no word about this one."""
    first = slots.open(a_name("a"), "o.1", 30.0)
    first.held(130.0)
    (seen,) = slots.taken()
    seen.moved(900.0)
    seen.lose()
    first.clear()
    second = slots.open(a_name("b"), "o.2", 5.0)
    second.held(200.0)
    assert (second.deadline, second.lost, second.state) == (200.0, False, SlotState.HELD)
    seen.moved(990.0)
    seen.lose()
    assert (second.deadline, second.lost) == (200.0, False)
    seen.clear()
    first.clear()
    first.leaving()
    first.leave_to_keeper(Ending(final=True).text)
    assert [(slot.acquisition, slot.state) for slot in slots.taken()] == [("o.2", SlotState.HELD)]
    assert second.state is SlotState.HELD


def test_many_acquisitions_are_held_at_once(slots: LocalSlots | SharedSlots) -> None:
    held = [slots.open(a_name(str(number)), f"o.{number}", 30.0) for number in range(64)]
    assert [slot.acquisition for slot in slots.taken()] == [f"o.{number}" for number in range(64)]
    for slot in held[::2]:
        slot.clear()
    assert [slot.acquisition for slot in slots.taken()] == [f"o.{number}" for number in range(1, 64, 2)]


# What a release still has to say


@pytest.mark.parametrize(
    "ending",
    [
        Ending(),
        Ending(unsure=True),
        Ending(final=True, identity=Identity("id", 2, 3).digest, used_ms=86_400_000, by='["t", "id", "n", 5]'),
    ],
)
def test_an_ending_survives_as_text(ending: Ending) -> None:
    assert Ending.from_text(ending.text) == ending


@pytest.mark.parametrize(
    "torn", ["", "[", "[true, [", '[true, ["id", 2, 3], 0, "', "null", "5", "[1, 2]", "{}", "\ufffd"]
)
def test_torn_text_means_no_more_than_that_the_lock_is_to_be_freed(torn: str) -> None:
    """Its writer was killed in the middle of it."""
    assert Ending.from_text(torn) == Ending(unsure=True)
