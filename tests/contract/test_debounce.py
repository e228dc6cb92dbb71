"""The scripts under ``debounce`` against a real server: the newest call waits, becomes due, and takes the lock."""

import pytest
import redis

from celery_dlock.store.model import Acquired, Debounce, Duplicate, Parked, Queued
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import (
    INDEX,
    KEYS,
    LATER,
    NAME,
    PARKED,
    SECOND,
    TRIES,
    TURN,
    ask,
    digest,
    ending,
    entry_of,
    expire,
    lose_turn,
    make_ready,
    now_us,
    park,
    take,
)

pytestmark = [pytest.mark.core, pytest.mark.invariant("debounce-runs-the-newest-call")]

WAIT, LAST = 5000, 20_000
DEBOUNCE = Debounce(WAIT, LAST)


def call(
    store: RedisStore, task_id: str, number: int = 1, debounce: tuple[int, int] = DEBOUNCE, **facts: object
) -> Parked:
    return park(store, f"{task_id}.{number}", task_id, debounce=debounce, **facts)


def due(client: redis.Redis, task_id: str) -> float:
    """Seconds until a waiter is due."""
    score = client.zscore(LATER, digest(task_id))
    assert score is not None, f"{task_id} does not wait"
    return (score - now_us(client)) / SECOND


def run_due(store: RedisStore, client: redis.Redis, task_id: str) -> Acquired:
    """The waiter becomes due, is granted the lock, and its copy takes it."""
    make_ready(client, task_id)
    granted = store.sweep(NAME, "s.1", TURN, TRIES).granted
    assert granted is not None
    assert granted.identity == digest(task_id)
    store.confirm_publish(NAME, granted.identity, TURN)
    return take(store, f"{task_id}.9", task_id, debounce=DEBOUNCE, grant_id=granted.grant_id, republished=True)


def test_call_of_a_free_name_waits_until_it_is_due(store: RedisStore, client: redis.Redis) -> None:
    answer = ask(store, "a.1", "a", debounce=DEBOUNCE)
    assert isinstance(answer, Queued)
    assert call(store, "a", rank_us=answer.rank_us).granted is None
    assert 4 < due(client, "a") <= 5
    assert client.zscore(INDEX, NAME.text) == client.zscore(LATER, digest("a"))
    assert store.sweep(NAME, "s.1", TURN, TRIES).granted is None
    assert run_due(store, client, "a").token


def test_newer_call_replaces_the_waiter_and_names_itself(store: RedisStore, client: redis.Redis) -> None:
    call(store, "a", rank_us=10)
    parked = call(store, "b", rank_us=20)
    assert (parked.evicted and parked.evicted.identity, parked.newer) == (digest("a"), "b")
    assert parked.evicted is not None
    assert parked.evicted.entry == entry_of("a")
    store.remove_waiter(NAME, digest("a"), "g.1", ended=True)
    assert client.zrange(LATER, 0, -1) == [digest("b")]
    assert isinstance(ask(store, "a.2", "a", redelivered=True, debounce=DEBOUNCE), Duplicate)
    run_due(store, client, "b")


def test_debounce_max_counts_from_the_first_waiting_call(store: RedisStore, client: redis.Redis) -> None:
    call(store, "a", debounce=Debounce(WAIT, 6000), rank_us=10)
    last = int(client.hget(KEYS.named("debounced"), "due_at_last") or 0)
    client.hset(KEYS.named("debounced"), "due_at_last", str(last - 4 * SECOND))
    call(store, "b", debounce=Debounce(WAIT, 6000), rank_us=20)
    assert due(client, "b") <= 2
    assert int(client.hget(KEYS.named("debounced"), "due_at_last") or 0) == last - 4 * SECOND


def test_call_that_waited_for_its_eta_is_not_due_before_the_waiter_it_replaces(
    store: RedisStore, client: redis.Redis
) -> None:
    call(store, "a", rank_us=10)
    call(store, "b", debounce=Debounce(0, LAST), rank_us=20)
    assert 4 < due(client, "b") <= 5


def test_call_that_waited_for_its_eta_alone_is_granted_at_once(store: RedisStore) -> None:
    granted = call(store, "a", debounce=Debounce(0, LAST)).granted
    assert granted is not None
    assert granted.identity == digest("a")


def test_second_delivery_of_a_waiting_call_changes_nothing(store: RedisStore, client: redis.Redis) -> None:
    call(store, "a", rank_us=10)
    before = client.zscore(LATER, digest("a"))
    again = ask(store, "a.2", "a", redelivered=True, debounce=DEBOUNCE)
    assert isinstance(again, Parked)
    assert (again.evicted, again.granted) == (None, None)
    assert client.zscore(LATER, digest("a")) == before


def test_command_sent_twice_names_the_replaced_waiter_twice(store: RedisStore) -> None:
    call(store, "a", rank_us=10)
    assert call(store, "b", rank_us=20) == call(store, "b", rank_us=20)


def test_older_call_is_replaced_by_the_newest_one(store: RedisStore, client: redis.Redis) -> None:
    call(store, "b", rank_us=20)
    parked = call(store, "a", rank_us=10)
    assert (parked.evicted and parked.evicted.identity, parked.newer) == (digest("a"), "b")
    assert call(store, "a", rank_us=10) == parked  # sent twice
    assert 4 < due(client, "b") <= 5


def test_call_older_than_the_last_one_that_started_never_runs(store: RedisStore, client: redis.Redis) -> None:
    call(store, "b", rank_us=20)
    run_due(store, client, "b")
    parked = call(store, "a", rank_us=10)
    assert (parked.evicted and parked.evicted.identity, parked.newer) == (digest("a"), "b")


def test_call_whose_body_died_runs_again(store: RedisStore, client: redis.Redis) -> None:
    """It is the newest one itself, so it is not older than the last one that started."""
    call(store, "a", rank_us=20)
    run_due(store, client, "a")
    expire(client)
    client.delete(KEYS.lock)
    assert call(store, "a", number=5, rank_us=10).evicted is None
    run_due(store, client, "a")


def test_start_renews_the_record_that_expired_while_the_call_waited(store: RedisStore, client: redis.Redis) -> None:
    """As where all workers were away for days. Otherwise an older call would run, or its script would fail."""
    call(store, "b", rank_us=20)
    client.delete(KEYS.named("debounced"))
    run_due(store, client, "b")
    assert client.pttl(KEYS.named("debounced")) > 0
    parked = call(store, "a", rank_us=10)
    assert (parked.evicted and parked.evicted.identity, parked.newer) == (digest("a"), "b")


def test_replaced_call_whose_end_was_not_stored_is_granted_and_ends_itself(
    store: RedisStore, client: redis.Redis
) -> None:
    """The process that replaced it died before it stored the end."""
    call(store, "a", rank_us=10)
    call(store, "b", rank_us=20)
    make_ready(client, "a")
    granted = store.sweep(NAME, "s.1", TURN, TRIES).granted
    assert granted is not None
    assert granted.identity == digest("a")
    answer = ask(store, "a.2", "a", debounce=DEBOUNCE, grant_id=granted.grant_id, republished=True)
    assert isinstance(answer, Parked)
    assert (answer.evicted and answer.evicted.identity, answer.newer) == (digest("a"), "b")
    assert store.inspect(NAME) is None
    store.remove_waiter(NAME, digest("a"), "g.1", ended=True)
    run_due(store, client, "b")


def test_granted_call_is_not_replaced(store: RedisStore, client: redis.Redis) -> None:
    call(store, "a", rank_us=10)
    make_ready(client, "a")
    granted = store.sweep(NAME, "s.1", TURN, TRIES).granted
    assert granted is not None
    assert call(store, "b", rank_us=20).evicted is None
    take(store, "a.2", "a", debounce=DEBOUNCE, grant_id=granted.grant_id, republished=True)
    assert 4 < due(client, "b") <= 5


def test_due_call_of_a_held_name_is_granted_by_the_release(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    call(store, "a")
    make_ready(client, "a")
    assert store.sweep(NAME, "s.1", TURN, TRIES).granted is None
    granted = store.release(NAME, "h.1", ending("h")).granted
    assert granted is not None
    assert granted.identity == digest("a")


def test_call_that_is_not_due_is_not_granted_by_a_release(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    call(store, "a")
    assert store.release(NAME, "h.1", ending("h")).granted is None
    assert client.zscore(INDEX, NAME.text) == client.zscore(LATER, digest("a"))


def test_retry_neither_waits_nor_replaces(store: RedisStore, client: redis.Redis) -> None:
    """A retry is sent without ``debounce``: it takes the free lock beside the waiter."""
    call(store, "a")
    take(store, "r.1", "r")
    assert 4 < due(client, "a") <= 5


def test_waiter_with_a_lost_grant_is_replaced(store: RedisStore, client: redis.Redis) -> None:
    call(store, "a", rank_us=10)
    make_ready(client, "a")
    assert store.sweep(NAME, "s.1", TURN, TRIES).granted is not None
    lose_turn(store, client, "a")
    lose_turn(store, client, "a")  # after the first one it is granted again at once
    parked = call(store, "b", rank_us=20)
    assert parked.evicted is not None
    assert parked.evicted.identity == digest("a")


def test_store_keeps_nothing_of_a_call_that_ended_but_its_record(store: RedisStore, client: redis.Redis) -> None:
    call(store, "a", rank_us=10)
    call(store, "b", rank_us=20)
    store.remove_waiter(NAME, digest("a"), "g.1", ended=True)
    run_due(store, client, "b")
    store.release(NAME, "b.9", ending("b"))
    assert not client.exists(PARKED, LATER, KEYS.lock, KEYS.named("dead"), INDEX)
    assert 0 < client.pttl(KEYS.named("debounced")) <= 24 * 3600 * 1000 + LAST
