"""Operators see each seat of a name (``limit``) as a lock, and act on all seats or on one."""

import pytest

from celery_dlock.control import LockControl
from celery_dlock.keys.lock_name import shared_name
from celery_dlock.store.model import Acquired, Held, Queued
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import ask, digest, ending, park, take

LIMIT = 3
NAME = shared_name("gpu")._replace(seats=LIMIT)
SEATS = [NAME.text, f"{NAME.text}:1", f"{NAME.text}:2"]


@pytest.fixture(autouse=True)
def _without_a_broker(control: LockControl) -> None:
    """The messages of these tests cannot be published."""
    control._runtime.grant_publisher.publish_next = lambda name, granted: True  # type: ignore[method-assign]


@pytest.fixture
def full(store: RedisStore) -> None:
    for seat in range(LIMIT):
        assert take(store, f"o{seat}.1", f"t{seat}", NAME).seat == seat


@pytest.mark.usefixtures("full")
def test_list_shows_each_held_seat_with_its_holder(control: LockControl) -> None:
    found = {view.name: view.task_id for view in control.all_locks()}
    assert found == dict(zip(SEATS, ["t0", "t1", "t2"], strict=True))
    assert control.lock(SEATS[2]).task_id == "t2"


@pytest.mark.usefixtures("full")
def test_release_by_name_frees_that_seat_only(control: LockControl, store: RedisStore) -> None:
    control.release(SEATS[1], "o1.1", force=True)
    assert [bool(control.lock(seat).holder) for seat in SEATS] == [True, False, True]
    assert take(store, "next.1", "next", NAME).seat == 1


def test_hold_of_the_name_holds_every_seat_until_it_is_ended(control: LockControl, store: RedisStore) -> None:
    take(store, "o0.1", "t0", NAME)
    assert not control.hold(NAME.text, 60, "the licence server is down")
    assert isinstance(ask(store, "late.1", "late", NAME), Held | Queued)
    store.release(NAME, "o0.1", ending("t0"))
    assert isinstance(ask(store, "late.2", "late", NAME), Held | Queued)
    assert control.unhold(NAME.text)
    assert [isinstance(ask(store, f"n{each}.1", f"n{each}", NAME), Acquired) for each in range(LIMIT)] == [True] * LIMIT


@pytest.mark.usefixtures("full")
def test_waiting_lists_granted_messages_of_all_seats_and_drop_passes_the_seat_on(
    control: LockControl, store: RedisStore
) -> None:
    for task_id in "abc":
        park(store, f"{task_id}.1", task_id, NAME)
    for seat in (1, 2):
        store.release(NAME, f"o{seat}.1", ending(f"t{seat}"))
    states = [(waiter.task_id, waiter.state) for waiter in control.waiting(NAME.text)]
    assert states == [("a", "granted"), ("b", "granted"), ("c", "waiting")]
    assert control.waiting() == control.waiting(NAME.text)
    control.drop(NAME.text, digest("b"))
    assert [waiter.task_id for waiter in control.waiting(NAME.text) if waiter.state == "granted"] == ["a", "c"]
