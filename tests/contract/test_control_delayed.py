"""Waiters that are not due yet, as operators see them: their state, their place, and when they are due."""

import pytest
import redis

from celery_dlock.control import LockControl, Waiter
from celery_dlock.keys.lock_name import shared_name
from celery_dlock.store.holder_model import shown_time
from celery_dlock.store.model import Debounce
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import SECOND, digest, ending, lose_turn, now_us, park, take

pytestmark = [pytest.mark.core, pytest.mark.invariant("debounce-runs-the-newest-call")]

DEBOUNCE = Debounce(5000, 20_000)
NAME = shared_name("x")
KEYS = LockKeys.of("dlock", NAME)
DELAYED = KEYS.queue()[2]


def waiters(control: LockControl) -> dict[str, Waiter]:
    return {waiter.task_id: waiter for waiter in control.waiting(NAME.text)}


def test_debounced_call_shows_when_it_is_due(store: RedisStore, client: redis.Redis, control: LockControl) -> None:
    park(store, "a.1", "a", NAME, debounce=DEBOUNCE)
    (waiter,) = control.waiting(NAME.text)
    assert (waiter.state, waiter.position) == ("debounced", 1)
    assert waiter.due == pytest.approx((client.zscore(DELAYED, digest("a")) or 0) / SECOND)
    assert 4 < waiter.due - now_us(client) / SECOND <= 5


def test_replaced_call_is_no_debounced_call(store: RedisStore, control: LockControl) -> None:
    park(store, "a.1", "a", NAME, debounce=DEBOUNCE, rank_us=10)
    park(store, "b.1", "b", NAME, debounce=DEBOUNCE, rank_us=20)
    found = waiters(control)
    assert (found["a"].state, found["b"].state) == ("replaced", "debounced")


def test_waiters_for_the_lock_alone_come_before_a_debounced_one(store: RedisStore, control: LockControl) -> None:
    """A retry of the task is not debounced. It ranks later, and runs first if the lock is free before the due time."""
    take(store, "holder.1", "holder", NAME)
    park(store, "a.1", "a", NAME, debounce=DEBOUNCE, rank_us=10)
    park(store, "retry.1", "retry", NAME, rank_us=20)
    found = waiters(control)
    assert [(task_id, found[task_id].position, found[task_id].state) for task_id in ("retry", "a")] == [
        ("retry", 1, "waiting"),
        ("a", 2, "debounced"),
    ]
    assert found["retry"].due == 0.0
    granted = store.release(NAME, "holder.1", ending("holder")).granted
    assert granted is not None
    assert granted.identity == digest("retry")


def test_waiter_that_lost_its_grant_shows_when_it_is_due_again(
    store: RedisStore, client: redis.Redis, control: LockControl
) -> None:
    take(store, "holder.1", "holder", NAME)
    park(store, "a.1", "a", NAME, debounce=Debounce(0, 20_000))
    park(store, "b.1", "b", NAME)
    store.release(NAME, "holder.1", ending("holder"))
    first = waiters(control)
    lost = next(task_id for task_id, waiter in first.items() if waiter.state == "granted")
    assert lose_turn(store, client, lost, KEYS) == ""
    waiter = waiters(control)[lost]
    assert waiter.state == "delayed"
    assert waiter.due > now_us(client) / SECOND
    assert waiter.position == 2


def test_explanation_says_when_and_why(store: RedisStore, control: LockControl) -> None:
    park(store, "a.1", "a", NAME, debounce=DEBOUNCE, rank_us=10)
    park(store, "b.1", "b", NAME, debounce=DEBOUNCE, rank_us=20)
    found = waiters(control)
    due = shown_time(found["b"].due)
    first, second = control.explain("b").lines
    assert first.endswith(f"(debounced: due at {due} if no newer call comes until then)")
    assert second == f"{NAME.text} is free now, but this waiter is not due yet"
    assert control.explain("a").lines[0].endswith("(replaced: by a newer call, so it will end REVOKED)")
