"""The queue's scripts against a real server: turns that are lost, dead letters, and sweeps."""

import pytest
import redis

from celery_dlock.keys import LockKeys
from celery_dlock.names import LockName
from celery_dlock.store import Ending, Taken
from celery_dlock.stores.redis import RedisStore
from tests.contract.queue_kit import (
    KEYS,
    NAME,
    SECOND,
    TRIES,
    TTL,
    TURN,
    digest,
    ending,
    entry_of,
    expire,
    grant_to,
    lose_turn,
    make_due,
    make_ready,
    now_us,
    park,
    rank_in,
    take,
    waiting,
    whose,
)

PARKED = KEYS.queue()[1]
LATER = KEYS.queue()[2]
INDEX = KEYS.queue()[3]


# Turns


@pytest.mark.core
def test_a_lost_turn_goes_to_later_and_the_next_one_is_granted(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    park(store, "b.1", "b")
    store.published(KEYS, digest("a"), TURN)
    make_due(client)
    before = now_us(client)
    taken = store.sweep(KEYS, "s.1", TURN, TRIES)
    assert whose(taken.granted) == digest("b")
    assert taken.buried == ""
    until = client.zscore(LATER, digest("a")) or 0
    assert client.zcard(LATER) == 1
    assert before + TURN * 1000 <= until <= now_us(client) + TURN * 1000
    assert client.hgetall(PARKED) == {
        digest("a"): entry_of("a"),
        f"{digest('a')}:tries": "1",
        f"{digest('a')}:rank": str(rank),
        digest("b"): entry_of("b"),
    }


@pytest.mark.core
def test_who_lost_a_turn_comes_back_at_its_old_rank(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    for who in "bc":
        park(store, f"{who}.1", who)
    lose_turn(store, client, "a")
    make_ready(client, "a")
    take(store, "b.2", "b", turn=client.hget(KEYS.lock, "since"))
    assert whose(store.release(KEYS, "b.2", ending("b")).granted) == digest("a")


@pytest.mark.core
def test_a_turn_and_the_time_to_the_next_double_with_each_that_was_lost(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    for lost in range(4):
        before = now_us(client)
        assert store.published(KEYS, digest("a"), TURN)
        due = int(client.hget(KEYS.lock, "due") or 0)
        assert due - before == pytest.approx(TURN * 1000 * 2**lost, abs=10 * SECOND)
        make_due(client)
        before = now_us(client)
        assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
        until = client.zscore(LATER, digest("a"))
        assert until
        assert until - before == pytest.approx(TURN * 1000 * 2**lost, abs=10 * SECOND)
        assert client.zscore(INDEX, NAME.text) == until
        make_ready(client, "a")
        assert whose(store.sweep(KEYS, "s.1", TURN, TRIES).granted) == digest("a")


@pytest.mark.core
def test_after_so_many_lost_turns_it_goes_to_the_dead_letters_with_its_entry_intact(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    for lost in range(1, 4):
        buried = lose_turn(store, client, "a", tries=3)
        assert buried == (digest("a") if lost == 3 else "")
        if lost < 3:
            make_ready(client, "a")
            store.sweep(KEYS, "s.1", TURN, 3)
    assert client.hgetall(KEYS.dead()) == {digest("a"): entry_of("a")}
    assert not client.exists(KEYS.lock, *KEYS.queue())


@pytest.mark.core
def test_a_late_copy_of_a_dead_letter_takes_its_entry_out_and_runs(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    assert lose_turn(store, client, "a", tries=1) == digest("a")
    take(store, "a.2", "a", copied=True, rank_us=10, turn="123")
    assert not client.exists(KEYS.dead())


@pytest.mark.core
def test_a_late_copy_of_a_dead_letter_that_has_to_wait_takes_its_entry_out_and_parks(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    assert lose_turn(store, client, "a", tries=1) == digest("a")
    take(store, "h.1", "h")
    park(store, "a.2", "a", copied=True, rank_us=10)
    assert not client.exists(KEYS.dead())
    assert waiting(client) == [digest("a")]


@pytest.mark.core
def test_parking_again_forgets_lost_turns(store: RedisStore, client: redis.Redis) -> None:
    """Its copy was late, not lost: slow rounds must not add up to a dead letter."""
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    park(store, "b.1", "b")
    lose_turn(store, client, "a")
    park(store, "a.2", "a", copied=True, rank_us=rank)
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a"), digest("b"): entry_of("b")}
    assert not client.exists(LATER)
    assert rank_in(client, "a") == rank


@pytest.mark.core
def test_a_grant_nobody_published_is_handed_out_again_and_counts_as_no_lost_turn(
    store: RedisStore, client: redis.Redis
) -> None:
    granted = grant_to(store, "a")
    for number in range(3 * TRIES):
        assert store.sweep(KEYS, f"early.{number}", TURN, TRIES) == Taken()
        make_due(client)
        assert store.sweep(KEYS, f"s.{number}", TURN, TRIES) == Taken(granted=granted)
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a")}


# Sweeps


@pytest.mark.core
def test_a_sweep_grants_a_lock_whose_lease_ended(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    assert store.due("dlock", [NAME.bucket], 10) == []
    expire(client)
    assert store.due("dlock", [NAME.bucket], 10) == [NAME]
    assert whose(store.sweep(KEYS, "s.1", TURN, TRIES).granted) == digest("a")
    assert store.due("dlock", [NAME.bucket], 10) == []


@pytest.mark.core
def test_a_sweep_comes_back_when_a_renewed_lease_would_end(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    client.zadd(INDEX, {NAME.text: 1})
    before = now_us(client)
    assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
    look = client.zscore(INDEX, NAME.text)
    assert look
    assert before < look <= now_us(client) + TTL * 1000
    assert store.release(KEYS, "h.1", Ending()).granted


def test_a_sweep_of_a_lock_nobody_waits_for_forgets_it(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    store.take_out(KEYS, digest("a"), "t.1")
    client.zadd(INDEX, {NAME.text: 1})
    assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
    assert not client.exists(INDEX)


def test_each_bucket_tells_of_its_own_locks_at_most_so_many(store: RedisStore, client: redis.Redis) -> None:
    names = [LockName(f"n:{number}", bucket) for bucket in (3, 4) for number in range(3)]
    for name in names:
        client.zadd(LockKeys.of("dlock", name).queue()[3], {name.text: 1})
    assert store.due("dlock", [3, 4, 5], 10) == names
    assert store.due("dlock", [4], 10) == names[3:]
    assert len(store.due("dlock", [3, 4], 2)) == 4
