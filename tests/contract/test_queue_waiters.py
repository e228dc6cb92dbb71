"""The queue's scripts on a real server: waiters that leave, that are listed, and that cannot be read."""

import json
from typing import Any

import pytest
import redis

from celery_dlock.store.base import QueueStepResult
from celery_dlock.store.model import Duplicate, Held
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import request_of as plain_claim
from tests.contract.queue_helpers import (
    KEYS,
    NAME,
    PARKED,
    SECOND,
    TTL,
    ask,
    digest,
    ending,
    entry_of,
    grant_to,
    lose_turn,
    park,
    take,
    waiting,
    whose,
)

# Taking out


@pytest.mark.invariant("finished-message-is-not-queued")
@pytest.mark.core
def test_a_waiter_that_is_taken_out_never_runs_and_never_blocks(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    park(store, "b.1", "b")
    assert store.remove_waiter(NAME, digest("a"), "t.1").entry == entry_of("a")
    assert waiting(client) == [digest("b")]
    assert isinstance(ask(store, "a.2", "a", redelivered=True), Duplicate)
    assert whose(store.release(NAME, "h.1", ending("h")).granted) == digest("b")


@pytest.mark.core
def test_granted_waiter_that_is_removed_passes_the_grant_on(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    taken = store.remove_waiter(NAME, digest("a"), "t.1")
    assert (taken.entry, whose(taken.granted)) == (entry_of("a"), digest("b"))
    assert client.hkeys(PARKED) == [digest("b")]


@pytest.mark.core
@pytest.mark.parametrize("dead_letter", [False, True])
def test_one_that_runs_is_not_taken_out(store: RedisStore, client: redis.Redis, dead_letter: bool) -> None:
    take(store, "a.1", "a")
    before = client.hgetall(KEYS.lock)
    assert store.remove_waiter(NAME, digest("a"), "t.1", dead_letter=dead_letter, ended=True) == QueueStepResult()
    assert client.hgetall(KEYS.lock) == before
    assert not client.exists(KEYS.done(digest("a")), KEYS.named("dead"))


@pytest.mark.core
@pytest.mark.parametrize("ended", [False, True])
def test_taking_out_what_does_not_wait_marks_it_only_if_its_end_is_stored(
    store: RedisStore, client: redis.Redis, ended: bool
) -> None:
    assert store.remove_waiter(NAME, digest("a"), "t.1", ended=ended) == QueueStepResult()
    assert bool(client.exists(KEYS.done(digest("a")))) == ended


@pytest.mark.core
def test_dead_letter_keeps_its_entry_and_may_still_run(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    assert store.remove_waiter(NAME, digest("a"), "t.1", dead_letter=True).entry == entry_of("a")
    assert client.hgetall(KEYS.named("dead")) == {digest("a"): entry_of("a")}
    assert not client.exists(KEYS.done(digest("a")), *KEYS.queue()[:3])


# Who waits


@pytest.mark.core
def test_waiting_tells_how_many_wait_who_and_since_when(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    for who, at in [("b", 2), ("c", 3), ("d", 4)]:
        park(store, f"{who}.1", who, rank_us=at * SECOND)
    found = store.list_waiters(NAME, 3)
    assert found.count == 4
    assert [(one.task, one.task_id, one.since, one.state) for one in found.waiters] == [
        ("app.post", "a", rank / 1e6, "granted"), ("app.post", "b", 2.0, "waiting"), ("app.post", "c", 3.0, "waiting"),
    ]  # fmt: skip
    lose_turn(store, client, "a")
    found = store.list_waiters(NAME, 10)
    assert [waiter.task_id for waiter in found.waiters] == ["b", "c", "d", "a"]
    assert found.count == 4


# Entries that cannot be read


@pytest.mark.core
@pytest.mark.parametrize(
    "first",
    ["", "no json", "[]", "{}", "5", "null", '["only a task"]', "[null, null]", "[5, 7]", '[[], {"a": 1}]', "[true]"],
)
def test_unreadable_entry_is_granted_as_any_other(store: RedisStore, client: redis.Redis, first: str) -> None:
    """Its publisher makes it a dead letter. A script that failed at it would stop all that wait behind it."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", entry=f"{first}\nrest")
    park(store, "b.1", "b")
    granted = store.release(NAME, "h.1", ending("h")).granted
    assert granted
    assert (granted.identity, granted.entry) == (digest("a"), f"{first}\nrest")
    assert store.inspect(NAME)
    assert store.list_waiters(NAME, 5).count == 2
    assert isinstance(store.acquire(NAME, "l.1", TTL, plain_claim()), Held)
    assert whose(store.remove_waiter(NAME, digest("a"), "t.1", dead_letter=True).granted) == digest("b")
    assert client.hgetall(KEYS.named("dead")) == {digest("a"): f"{first}\nrest"}


def test_a_waiter_whose_entry_was_lost_is_passed_over(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    park(store, "b.1", "b")
    client.hdel(PARKED, digest("a"))
    assert whose(store.release(NAME, "h.1", ending("h")).granted) == digest("b")


def test_a_name_that_redis_has_to_send_as_it_is(store: RedisStore, client: redis.Redis) -> None:
    odd: dict[str, Any] = {"entry": json.dumps(["tâche\n", "id\x00'\""]) + '\n{"b": "\u2028"}'}
    take(store, "h.1", "h")
    park(store, "a.1", "a", **odd)
    granted = store.release(NAME, "h.1", ending("h")).granted
    assert granted
    assert granted.entry == odd["entry"]
    assert client.hget(KEYS.lock, "task") == "tâche\n"
