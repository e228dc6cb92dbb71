"""Each script of the queue sent twice: the reply of the first was lost, so the second has to tell the same."""

import pytest
import redis

from celery_dlock.store.base import QueueStepResult
from celery_dlock.store.model import Acquired, Duplicate, Parked, Used
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import (
    KEYS,
    NAME,
    TRIES,
    TURN,
    ask,
    digest,
    ending,
    entry_of,
    expire,
    grant_to,
    make_due,
    park,
    take,
    whose,
)

pytestmark = pytest.mark.core


def contents(client: redis.Redis) -> dict[str, object]:
    """All that the server holds, but for lives."""
    readers = {
        "hash": client.hgetall,
        "string": client.get,
        "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
    }
    return {key: readers[client.type(key)](key) for key in client.scan_iter("*", count=10_000)}


# Acquire


def test_taking_a_turn(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    first = take(store, "a.2", "a", grant_id=granted.grant_id, republished=True)
    before = contents(client)
    again = ask(store, "a.2", "a", grant_id=granted.grant_id, republished=True)
    assert isinstance(again, Acquired)
    assert again.token == first.token
    assert contents(client) == before


def test_parking_behind_a_holder(store: RedisStore, client: redis.Redis) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a")
    first = park(store, "b.1", "b", rank_us=500)
    before = contents(client)
    assert park(store, "b.1", "b", rank_us=500) == first == Parked(500, 1, None, None)
    after = contents(client)
    index = KEYS.queue()[3]
    assert {**after, index: 0} == {**before, index: 0}


@pytest.mark.invariant("queue-calls-are-idempotent")
def test_parking_that_grants_an_earlier_waiter(store: RedisStore, client: redis.Redis) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100)
    expire(client)
    first = park(store, "b.1", "b", rank_us=200)
    assert first.granted
    assert (first.granted.identity, first.granted.entry) == (digest("a"), entry_of("a"))
    assert park(store, "b.1", "b", rank_us=200) == first


def test_parking_that_grants_the_very_one_that_parks(store: RedisStore, client: redis.Redis) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100)
    expire(client)
    first = park(store, "a.2", "a", rank_us=100)
    assert first.granted
    assert first.granted.identity == digest("a")
    assert park(store, "a.2", "a", rank_us=100) == first


@pytest.mark.invariant("queue-calls-are-idempotent")
def test_parking_that_granted_names_no_grant_once_its_message_is_published(
    store: RedisStore, client: redis.Redis
) -> None:
    """The script that is sent again would publish the message twice."""
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100)
    expire(client)
    assert whose(park(store, "b.1", "b", rank_us=200).granted) == digest("a")
    assert store.confirm_publish(NAME, digest("a"), TURN)
    assert park(store, "b.1", "b", rank_us=200).granted is None


def test_taking_out_that_granted_names_no_grant_once_its_message_is_published(store: RedisStore) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100)
    park(store, "b.1", "b", rank_us=200)
    assert whose(store.release(NAME, "holder.1", ending("holder")).granted) == digest("a")
    assert whose(store.remove_waiter(NAME, digest("a"), "revoker.1").granted) == digest("b")
    assert store.confirm_publish(NAME, digest("b"), TURN)
    assert store.remove_waiter(NAME, digest("a"), "revoker.1").granted is None


@pytest.mark.invariant("queue-calls-are-idempotent")
def test_parking_that_drops_a_waiter(store: RedisStore) -> None:
    """The caller stores the end of an evicted waiter. If no answer names that waiter, its result hangs for ever."""
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100, limit=1, evict_oldest=True)
    first = park(store, "b.1", "b", rank_us=200, limit=1, evict_oldest=True)
    assert first.evicted
    assert (first.evicted.identity, first.evicted.entry) == (digest("a"), entry_of("a"))
    assert park(store, "b.1", "b", rank_us=200, limit=1, evict_oldest=True) == first


def test_parking_that_drops_a_waiter_and_grants_the_parking_one(store: RedisStore, client: redis.Redis) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100, limit=1, evict_oldest=True)
    expire(client)
    first = park(store, "b.1", "b", rank_us=200, limit=1, evict_oldest=True)
    assert first.granted
    assert first.evicted
    assert (first.granted.identity, first.evicted.identity) == (digest("b"), digest("a"))
    assert park(store, "b.1", "b", rank_us=200, limit=1, evict_oldest=True) == first


def test_parking_that_drops_a_waiter_under_the_next_number(store: RedisStore) -> None:
    """After a lost reply, the lock client releases with an unknown outcome, then sends a new acquisition."""
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", rank_us=100, limit=1, evict_oldest=True)
    first = park(store, "b.1", "b", rank_us=200, limit=1, evict_oldest=True)
    store.release(NAME, "b.1", ending("", final=False, queue=False, outcome_unknown=True))
    assert park(store, "b.2", "b", rank_us=200, limit=1, evict_oldest=True).evicted == first.evicted


def test_a_done_answer_that_passes_a_turn_on(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    client.set(KEYS.done(digest("a")), "9" * 16)
    first = ask(store, "a.2", "a")
    assert isinstance(first, Duplicate)
    assert first.granted
    assert first.granted.identity == digest("b")
    assert ask(store, "a.2", "a") == first


def test_a_used_answer_that_passes_a_turn_on(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    client.set(KEYS.run(), 'used\n1\nx\na.1\n5\n["t", "i", "n", "1"]\n\n\n')
    first = ask(store, "a.2", "a", once=True)
    assert isinstance(first, Used)
    assert first.granted
    assert first.granted.identity == digest("b")
    assert ask(store, "a.2", "a", once=True) == first


# Release


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.parametrize("queue", [True, False])
def test_a_release_that_grants_and_no_more_once_its_message_is_published(store: RedisStore, queue: bool) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a")
    first = store.release(NAME, "holder.1", ending("holder", queue=queue))
    assert first.granted
    again = store.release(NAME, "holder.1", ending("holder", queue=queue))
    assert again.granted == first.granted
    assert store.confirm_publish(NAME, digest("a"), TURN)
    assert store.release(NAME, "holder.1", ending("holder", queue=queue)).granted is None


def test_a_release_repeats_no_grant_that_another_gave(store: RedisStore) -> None:
    grant_to(store, "a")
    assert store.release(NAME, "other.1", ending("other")).granted is None


# Sweep, take out, published


def test_a_sweep_that_grants(store: RedisStore, client: redis.Redis) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a")
    expire(client)
    first = store.sweep(NAME, "s.1", TURN, TRIES)
    assert first.granted
    assert store.sweep(NAME, "s.1", TURN, TRIES) == first
    assert store.sweep(NAME, "s.2", TURN, TRIES) == QueueStepResult()
    store.confirm_publish(NAME, digest("a"), TURN)
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult()


def test_a_sweep_that_hands_out_what_another_did_not_publish(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    make_due(client)
    first = store.sweep(NAME, "s.1", TURN, TRIES)
    assert first == QueueStepResult(granted=granted)
    assert store.sweep(NAME, "s.1", TURN, TRIES) == first
    assert store.sweep(NAME, "s.2", TURN, TRIES) == QueueStepResult()


def test_a_sweep_that_ends_a_turn_ends_one_only(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    store.confirm_publish(NAME, digest("a"), TURN)
    make_due(client)
    first = store.sweep(NAME, "s.1", TURN, TRIES)
    assert first.granted
    assert first.granted.identity == digest("b")
    before = contents(client)
    # The repeated reply has all that must be done; only the metric of lost grants may miss one.
    assert store.sweep(NAME, "s.1", TURN, TRIES) == first._replace(lost_grant=False)
    after = contents(client)
    assert after[KEYS.queue()[1]] == before[KEYS.queue()[1]]  # no second try is counted


def test_a_sweep_that_buries(store: RedisStore, client: redis.Redis) -> None:
    """The log names the dead letter: an operator who does not know of it does not look."""
    grant_to(store, "a")
    park(store, "b.1", "b")
    store.confirm_publish(NAME, digest("a"), TURN)
    make_due(client)
    first = store.sweep(NAME, "s.1", TURN, 1)
    assert first.dead_letter == digest("a")
    assert store.sweep(NAME, "s.1", TURN, 1) == first._replace(lost_grant=False)


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.parametrize("has_turn", [True, False])
def test_taking_a_waiter_out(store: RedisStore, client: redis.Redis, has_turn: bool) -> None:
    """Its end is stored from the answered entry: without it, its result hangs for ever."""
    grant_to(store, "a" if has_turn else "b")
    park(store, "b.1" if has_turn else "a.1", "b" if has_turn else "a")
    first = store.remove_waiter(NAME, digest("a"), "t.1")
    assert first.entry == entry_of("a")
    assert bool(first.granted) == has_turn
    before = contents(client)
    assert store.remove_waiter(NAME, digest("a"), "t.1") == first
    after = contents(client)
    done = KEYS.done(digest("a"))
    assert {**after, done: 0} == {**before, done: 0}


def test_dead_lettering_a_granted_waiter(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    first = store.remove_waiter(NAME, digest("a"), "t.1", dead_letter=True)
    assert first.granted
    assert store.remove_waiter(NAME, digest("a"), "t.1", dead_letter=True).granted == first.granted
    assert client.hgetall(KEYS.named("dead")) == {digest("a"): entry_of("a")}


@pytest.mark.invariant("queue-calls-are-idempotent")
def test_noting_a_publication_lengthens_no_turn_twice(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    assert store.confirm_publish(NAME, digest("a"), TURN)
    first = int(client.hget(KEYS.lock, "due") or 0)
    assert store.confirm_publish(NAME, digest("a"), TURN)
    assert 0 <= int(client.hget(KEYS.lock, "due") or 0) - first < TURN * 1000
