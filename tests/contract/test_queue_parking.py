"""The queue's scripts against a real server: who parks, where, and what becomes of a full queue."""

import pytest
import redis

from celery_dlock.store.model import Grant, Parked, Queued
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import (
    KEYS,
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

# Parking


@pytest.mark.core
def test_call_at_a_held_lock_is_answered_queue_and_parks_only_with_its_entry(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    answer = ask(store, "a.1", "a")
    assert isinstance(answer, Queued)
    assert (answer.waiting, answer.holder and answer.holder.task_id) == (0, "h")
    assert not waiting(client)
    assert park(store, "a.1", "a", rank_us=answer.rank_us) == Parked(answer.rank_us, 1, None, None)
    assert waiting(client) == [digest("a")]
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a")}


@pytest.mark.invariant("queue-order-is-by-rank")
@pytest.mark.core
def test_waiters_stand_by_rank_not_by_arrival_at_the_store(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    assert [park(store, f"{who}.1", who, rank_us=rank).position for who, rank in [("b", 20), ("a", 10), ("c", 15)]] == [
        1, 1, 2,
    ]  # fmt: skip
    assert waiting(client) == [digest("a"), digest("c"), digest("b")]


@pytest.mark.invariant("queue-order-is-by-rank")
@pytest.mark.core
def test_parking_twice_is_parking_once(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    park(store, "b.1", "b", rank_us=20)
    assert park(store, "a.2", "a", rank_us=10) == Parked(10, 1, None, None)
    assert waiting(client) == [digest("a"), digest("b")]
    assert client.hlen(PARKED) == 2


@pytest.mark.core
def test_a_copy_that_carries_no_rank_parks_at_the_rank_of_its_entry(store: RedisStore, client: redis.Redis) -> None:
    """The broker gives a message again whose worker died between parking and acknowledging: it keeps its place."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    park(store, "b.1", "b", rank_us=20)
    answer = ask(store, "a.2", "a", redelivered=True)
    assert isinstance(answer, Queued)
    park(store, "a.2", "a", rank_us=answer.rank_us, redelivered=True)
    assert waiting(client) == [digest("a"), digest("b")]
    assert rank_in(client, "a") == 10


@pytest.mark.invariant("rank-follows-receipt")
@pytest.mark.core
def test_rank_below_an_earlier_call_is_raised_and_another_is_kept(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    earlier = park(store, "a.1", "a", age_us=SECOND)
    bumped = park(store, "b.1", "b", age_us=10 * SECOND, after_us=earlier.rank_us)
    assert bumped.rank_us == earlier.rank_us + 1
    assert park(store, "c.1", "c", rank_us=earlier.rank_us + 5, after_us=earlier.rank_us).rank_us == earlier.rank_us + 5
    assert waiting(client) == [digest("a"), digest("b"), digest("c")]


def test_holder_that_took_a_free_lock_behind_an_earlier_call_has_the_raised_rank(
    store: RedisStore, client: redis.Redis
) -> None:
    later = now_us(client) + 60 * SECOND
    assert take(store, "a.1", "a", after_us=later).rank_us == later + 1


@pytest.mark.core
@pytest.mark.parametrize("rank", [2**53 - 2, 9_007_199_254_740_989, 1_795_244_415_123_457])
def test_no_digit_of_a_rank_is_lost_on_its_way_round(store: RedisStore, client: redis.Redis, rank: int) -> None:
    """Doubles are exact up to 2^53; Lua would print 9.007199254741e+15."""
    take(store, "h.1", "h")
    assert park(store, "a.1", "a", rank_us=rank).rank_us == rank
    assert park(store, "b.1", "b", rank_us=1, after_us=rank).rank_us == rank + 1
    assert rank_in(client, "a") == rank
    store.release(NAME, "h.1", ending("h"))
    assert client.hget(KEYS.lock, "rank") == str(rank)
    lose_turn(store, client, "a")
    assert client.hget(PARKED, f"{digest('a')}:rank") == str(rank)
    make_ready(client, "a")
    make_due(client)
    store.confirm_publish(NAME, digest("b"), TURN)
    make_due(client)
    assert whose(store.sweep(NAME, "s.1", TURN, TRIES).granted) == digest("a")
    assert client.hget(KEYS.lock, "rank") == str(rank)


# A free lock


@pytest.mark.invariant("waiters-are-not-overtaken")
@pytest.mark.core
def test_a_free_lock_with_a_waiter_before_is_not_taken_but_granted_to_that_waiter(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    expire(client)
    answer = ask(store, "b.1", "b", rank_us=20)
    assert answer == Queued(1, 20, None)
    parked = park(store, "b.1", "b", rank_us=20)
    assert whose(parked.granted) == digest("a")
    assert parked.position == 1
    assert client.hget(KEYS.lock, "acq") == f"grant:{digest('a')}"


@pytest.mark.core
def test_a_free_lock_with_later_waiters_only_is_taken_and_its_release_grants(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    park(store, "b.1", "b", rank_us=20)
    expire(client)
    take(store, "a.1", "a", rank_us=10)
    assert whose(store.release(NAME, "a.1", ending("a")).granted) == digest("b")


@pytest.mark.invariant("granted-copy-takes-the-grant")
@pytest.mark.core
def test_waiter_takes_no_free_lock_but_is_granted_it(store: RedisStore, client: redis.Redis) -> None:
    """This delivery may be lost to its broker, and with the entry the last trace of the message."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    expire(client)
    parked = park(store, "a.2", "a", rank_us=10, redelivered=True)
    assert whose(parked.granted) == digest("a")
    assert client.hexists(PARKED, digest("a"))


# Limits


@pytest.mark.core
def test_call_at_the_queue_limit_is_not_parked_and_the_waiters_stay(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    for who in "ab":
        park(store, f"{who}.1", who, limit=2)
    answer = ask(store, "c.1", "c", limit=2, parks=True)
    assert isinstance(answer, Queued)
    assert answer.waiting == 2
    assert waiting(client) == [digest("a"), digest("b")]
    assert park(store, "a.2", "a", limit=2, rank_us=rank_in(client, "a")).position == 1  # it waits already


@pytest.mark.core
def test_waiters_with_failed_grants_count_as_waiting_and_the_granted_one_does_not(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b", limit=1)
    lose_turn(store, client, "a")
    assert isinstance(ask(store, "c.1", "c", limit=1, parks=True), Queued)
    assert park(store, "c.1", "c", limit=2)


@pytest.mark.core
def test_the_oldest_makes_room_for_the_newest(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    for who in "ab":
        park(store, f"{who}.1", who, limit=2, evict_oldest=True)
    parked = park(store, "c.1", "c", limit=2, evict_oldest=True)
    assert parked.evicted == Grant(digest("a"), entry_of("a"))
    assert parked.position == 2
    assert waiting(client) == [digest("b"), digest("c")]
    assert sorted(client.hkeys(PARKED)) == sorted([digest("b"), digest("c"), f"{digest('c')}:evicted"])


@pytest.mark.invariant("queue-limit-is-per-name")
@pytest.mark.core
def test_a_newcomer_older_than_all_who_wait_is_itself_the_one_that_goes(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "b.1", "b", rank_us=20, limit=1, evict_oldest=True)
    parked = park(store, "a.1", "a", rank_us=10, limit=1, evict_oldest=True)
    assert parked.evicted == Grant(digest("a"), entry_of("a"))
    assert waiting(client) == [digest("b")]


# The time of publication


@pytest.mark.invariant("queue-order-is-by-rank")
@pytest.mark.core
def test_calls_received_in_the_wrong_order_wait_in_that_of_publication(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    now = now_us(client)
    second = park(store, "b.1", "b", sent_us=now - 1000)
    first = park(store, "a.1", "a", sent_us=now - 2000, after_us=second.rank_us)
    assert (second.position, first.position) == (1, 1)
    assert waiting(client) == [digest("a"), digest("b")]
    assert first.rank_us > second.rank_us  # the rank stays the time of receipt


@pytest.mark.core
@pytest.mark.parametrize("hours", [-1, 1])
def test_wrong_clock_of_a_publisher_moves_a_call_by_ten_seconds(
    store: RedisStore, client: redis.Redis, hours: int
) -> None:
    take(store, "h.1", "h")
    for who in "ab":  # a constant error of the clock changes no order
        rank = park(store, f"{who}.1", who, sent_us=now_us(client) + hours * 3600 * SECOND).rank_us
        assert rank_in(client, who) == rank + hours * 10 * SECOND
    assert waiting(client) == [digest("a"), digest("b")]
    assert park(store, "c.1", "c", rank_us=5, sent_us=1).rank_us == 5
    assert rank_in(client, "c") == 1


@pytest.mark.core
def test_duplicate_of_a_waiter_keeps_its_place_and_its_time_of_receipt(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    sent = now_us(client) - 3600 * SECOND
    first = park(store, "a.1", "a", sent_us=sent)
    assert park(store, "a.2", "a", sent_us=sent, redelivered=True).rank_us == first.rank_us
    assert rank_in(client, "a") == first.rank_us - 10 * SECOND


@pytest.mark.invariant("waiters-are-not-overtaken")
@pytest.mark.core
def test_call_that_was_published_before_all_waiters_takes_the_free_lock(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    now = now_us(client)
    park(store, "b.1", "b", sent_us=now - 1000)
    expire(client)
    assert isinstance(ask(store, "c.1", "c", sent_us=now), Queued)
    take(store, "a.1", "a", sent_us=now - 2000)


@pytest.mark.invariant("duplicates-do-not-run")
@pytest.mark.core
def test_new_message_published_before_the_end_of_its_id_is_no_copy(store: RedisStore, client: redis.Redis) -> None:
    """Its id was used before. It was published before that call ended, and received afterwards."""
    take(store, "a.1", "a", redelivered=True)
    sent = now_us(client) - SECOND
    store.release(NAME, "a.1", ending("a"))
    take(store, "h.1", "h")
    parked = park(store, "a.2", "a", sent_us=sent)
    granted = store.release(NAME, "h.1", ending("h")).granted
    assert granted
    assert whose(granted) == digest("a")
    take(store, "a.3", "a", rank_us=parked.rank_us, sent_us=sent, republished=True, grant_id=granted.grant_id)
