"""decide() under the queue policy: the whole table."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from celery_dlock.options.lock_options import LockOptions
from celery_dlock.options.values import OVERFLOW, POLICIES
from celery_dlock.store.holder_model import Holder
from celery_dlock.store.model import Duplicate, Grant, Held, Parked, Queued, Used
from celery_dlock.task.policy import (
    AckParked,
    ConflictContext,
    DropDuplicate,
    Fail,
    Park,
    ParkDuplicate,
    RequeueDuplicate,
    RetryLater,
    Skip,
    decide,
)

HOLDER = Holder("app.pay", "id9", "node7", 42, since=1_700_000_000.0, expires_in=500.0)
WHO = "held by app.pay[id9] on node7 since 2023-11-14T22:13:20.000+00:00"
GRANT = Grant("d", "e", "5")
RUNNING = "another delivery of this message is running"


def options(overflow: str = "raise", limit: int | None = 3, **more: Any) -> LockOptions:
    return LockOptions(on_conflict="queue", queue_limit=limit, queue_overflow=overflow, **more)


def queued(waiting: int = 2, holder: Holder | None = HOLDER) -> Queued:
    return Queued(waiting, 5, holder)


# A first look


@pytest.mark.parametrize("overflow", OVERFLOW)
@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("tries", [0, 3])
def test_waiting_call_parks_whatever_queue_overflow_says(overflow: str, retries: int, tries: int) -> None:
    """Whether the queue is full shows when it parks."""
    found = decide(queued(waiting=3), options(overflow), ConflictContext(retries=retries, conflict_retries=tries))
    assert found == Park(4, WHO)


def test_park_position_is_behind_all_waiters() -> None:
    assert [decide(queued(waiting), options(), ConflictContext()) for waiting in (0, 41)] == [
        Park(1, WHO),
        Park(42, WHO),
    ]


def test_reason_without_a_holder_names_earlier_waiters() -> None:
    assert decide(queued(1, None), options(), ConflictContext()) == Park(2, "other calls are queued before this one")


def test_reason_names_the_waiter_that_was_granted_the_lock() -> None:
    granted = Holder("app.pay", "id9", "", 0, since=1_700_000_000.0, kind="grant")
    reason = "held by app.pay[id9] (granted, not started) since 2023-11-14T22:13:20.000+00:00"
    assert decide(queued(0, granted), options(), ConflictContext()) == Park(1, reason)


@pytest.mark.parametrize("overflow", OVERFLOW)
@pytest.mark.parametrize("parking", [False, True])
@pytest.mark.parametrize("retries", [0, 2])
def test_eager_call_cannot_park_and_fails(overflow: str, parking: bool, retries: int) -> None:
    found = decide(queued(), options(overflow), ConflictContext(eager=True, parking=parking, retries=retries))
    assert found == Fail(f"{WHO}; an eager call has no message to park")


# Parked


@pytest.mark.parametrize("parked", [Parked(5, 1, None, None), Parked(5, 0, None, None), Parked(5, 2, GRANT, GRANT)])
@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("overflow", OVERFLOW)
def test_parked_message_is_acknowledged(parked: Parked, retries: int, overflow: str) -> None:
    assert decide(parked, options(overflow), ConflictContext(retries=retries, parking=True)) == AckParked(
        "parked already"
    )


# A full queue: it brought its entry, and was refused all the same


@pytest.mark.parametrize("overflow", ["raise", "skip"])
@pytest.mark.parametrize("retries", [0, 2])
def test_full_queue_of_a_holder_whose_body_has_ended_is_tried_again(overflow: str, retries: int) -> None:
    """Its chain's next step would be refused for a place that the release makes free."""
    ended = replace(HOLDER, releasing=True)
    situation = ConflictContext(parking=True, retries=retries, conflict_retries=9, store_retries=2)
    expected = RetryLater(4.0, f"{WHO}, whose body has ended", counts=False)
    assert decide(queued(3, ended), options(overflow), situation) == expected
    assert decide(queued(3, ended), options(overflow), ConflictContext(retries=retries)) == Park(4, WHO)


@pytest.mark.parametrize(
    ("overflow", "retries", "expected"),
    [
        ("raise", 0, Fail),
        ("raise", 2, Fail),
        ("skip", 0, Skip),
        ("skip", 2, RetryLater),  # it ran before: its work is half done
    ],
)
def test_a_full_queue_meets_the_overflow(overflow: str, retries: int, expected: type) -> None:
    found = decide(queued(3), options(overflow), ConflictContext(retries=retries, parking=True))
    assert type(found) is expected
    assert getattr(found, "reason", "") == f"{WHO}; 3 already waiting (queue_limit)"


def test_retry_at_a_full_queue_has_a_growing_jittered_delay() -> None:
    chosen = options("skip", retry_delay=2.0, retry_delay_max=30.0)
    delays = []
    for tries, jitter in itertools.product((0, 1, 3, 50), (0.0, 1.0)):
        found = decide(
            queued(3), chosen, ConflictContext(retries=1, conflict_retries=tries, parking=True, jitter=jitter)
        )
        assert isinstance(found, RetryLater)
        delays.append(found.delay)
    assert delays == [1.0, 2.0, 2.0, 4.0, 8.0, 16.0, 15.0, 30.0]


@pytest.mark.parametrize("retries", [0, 2])
def test_task_that_ran_before_never_ends_at_a_full_queue(retries: int) -> None:
    """`retry_limit` is the retry policy's, and refused here."""
    found = decide(queued(3), options("skip"), ConflictContext(retries=retries, conflict_retries=9, parking=True))
    assert isinstance(found, RetryLater if retries else Skip)


# Copies and marks: no policy changes them


@pytest.mark.parametrize("comebacks", [0, 3])
@pytest.mark.parametrize("parking", [False, True])
def test_duplicate_of_a_running_message_is_parked_before_all_waiters(comebacks: int, parking: bool) -> None:
    duplicate = Held(HOLDER, same_message=True, rank_us=5)
    found = decide(duplicate, options(), ConflictContext(store_retries=comebacks, parking=parking))
    requeue = RequeueDuplicate({0: 1.0, 3: 8.0}[comebacks], RUNNING)
    assert found == ParkDuplicate(RUNNING, requeue)
    refused = ConflictContext(store_retries=comebacks, parking=True, parking_duplicate=True)
    assert decide(duplicate, options(), refused) == requeue


@pytest.mark.parametrize(
    "chosen",
    [
        LockOptions(on_conflict="queue", limit=2),
        LockOptions(on_conflict="queue", debounce=5),
        LockOptions(on_conflict="replace"),
    ],
    ids=["limit", "debounce", "replace"],
)
def test_duplicate_is_requeued_where_it_could_run_beside_or_instead_of_another_call(chosen: LockOptions) -> None:
    found = decide(Held(HOLDER, same_message=True, rank_us=5), chosen, ConflictContext())
    assert found == RequeueDuplicate(1.0, RUNNING)


def test_parked_duplicate_is_acknowledged_as_one_and_a_parked_waiter_is_not() -> None:
    context = ConflictContext(parking=True, parking_duplicate=True)
    assert decide(Parked(5, 0, None, None), options(), context) == AckParked(RUNNING, duplicate=True)
    assert decide(Parked(5, 1, None, None), options(), context) == AckParked("parked already")


@pytest.mark.parametrize("granted", [None, GRANT])
@pytest.mark.parametrize("parking", [False, True])
def test_duplicate_is_dropped_with_and_without_a_grant(granted: Grant | None, parking: bool) -> None:
    found = decide(Duplicate(granted), options(), ConflictContext(parking=parking))
    assert found == DropDuplicate("this message has finished already")


@pytest.mark.parametrize("granted", [None, GRANT])
def test_used_name_is_skipped_or_dropped_with_and_without_a_grant(granted: Grant | None) -> None:
    own = decide(Used(HOLDER, same_message=True, granted=granted), options(), ConflictContext())
    assert own == DropDuplicate("this message has finished already")
    others = decide(Used(HOLDER, same_message=False, granted=granted), options(), ConflictContext())
    assert isinstance(others, Skip)
    assert others.reason.startswith("already done by app.pay[id9]")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "answer", [queued(), Parked(5, 1, None, None), Duplicate(GRANT)], ids=["queue", "parked", "done"]
)
@pytest.mark.parametrize("parking", [False, True])
def test_every_answer_of_the_queue_is_decided_under_every_policy(
    policy: str, answer: Queued | Parked | Duplicate, parking: bool
) -> None:
    """A task whose policy was changed meets its messages of yesterday."""
    assert decide(answer, LockOptions(on_conflict=policy), ConflictContext(parking=parking)).reason
