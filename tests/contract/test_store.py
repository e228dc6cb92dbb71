"""The scripts against a real server: what each answers, what it leaves, and what it costs."""

import pytest
import redis

from celery_dlock.keys.key_spec import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Held, Released, Renewal
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import NAME, TTL, ending_of, keys_of, of_one_acquisition, request_of, take
from tests.support.polling import eventually
from tests.support.stores import name_in

KEYS = keys_of()
LOCK, LAST = KEYS.lock, KEYS.last
#: An hour, by which a clock went back.
HOUR_MS = 3_600_000
#: Seconds by which times may differ that one server tells, and several.
CLOCKS = 0.0, 1.0


def renewal(acquisition: str, ttl_ms: int = TTL, *notes: tuple[str, str]) -> Renewal:
    return Renewal(NAME, acquisition, ttl_ms, notes)


# What each script answers


@pytest.mark.core
def test_a_free_lock_is_taken_for_its_ttl(store: RedisStore, client: redis.Redis, topology: str) -> None:
    answer = take(store, "o.1", request_of("id1"))
    assert 29_000 < client.pttl(LOCK) <= TTL
    seconds, microseconds = client.time()
    assert 0 <= seconds + microseconds / 1e6 - answer.since < 5
    # If the token is another server's, the time is not from this one.
    fields = client.hgetall(LOCK).keys() - ({"since"} if topology.startswith("redlock") else set())
    assert fields == {"acq", "identity", "token", "task", "id", "process", "ttl"}


@pytest.mark.core
def test_a_held_lock_says_who_holds_it_where_and_since_when(store: RedisStore, topology: str) -> None:
    mine = take(store, "o.1", request_of("id1"))
    answer = store.acquire(NAME, "p.1", TTL, request_of("id2"))
    assert isinstance(answer, Held)
    holder = answer.holder
    assert (holder.task, holder.task_id, holder.node, holder.pid) == ("app.post", "id1", "node1", 77)
    assert (holder.owner, holder.token) == ("o", mine.token)
    assert holder.since == pytest.approx(mine.since, rel=0, abs=CLOCKS[topology.startswith("redlock")])
    assert (holder.hold_count, holder.releasing, answer.same_message) == (1, False, False)
    assert 29 < holder.expires_in <= 30
    assert answer.rank_us > mine.rank_us
    assert str(holder) == "app.post[id1] on node1"


def test_inspect_says_the_same_and_nothing_of_a_free_lock(store: RedisStore) -> None:
    assert store.inspect(NAME) is None
    take(store, "o.1", request_of("id1"))
    store.renew([renewal("o.1", TTL, ("count", "3"), ("releasing", "1"))])
    holder = store.inspect(NAME)
    assert holder is not None
    assert (holder.task_id, holder.hold_count, holder.releasing) == ("id1", 3, True)


@pytest.mark.core
def test_a_release_frees_the_lock_and_leaves_nothing_but_the_buckets_counter(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "o.1", request_of("id1"))
    assert store.release(NAME, "o.1", ending_of("id1")) == Released(ours=True, duplicate_seen=False)
    assert client.keys() == [LAST]
    take(store, "p.1")


@pytest.mark.core
def test_release_by_acquisition_frees_no_other_lock(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.2")
    for other in ("o.1", "o.3", "p.2", "o.22", "o", ""):
        assert store.release(NAME, other, ReleaseRequest()) == Released(ours=False, duplicate_seen=False)
    assert client.hget(LOCK, "acq") == "o.2"


@pytest.mark.core
def test_renewing_never_creates_a_lock_nor_touches_anothers(store: RedisStore, client: redis.Redis) -> None:
    assert store.renew([renewal("o.1", TTL, ("count", "2"))]) == [False]
    assert not client.keys()
    take(store, "p.1")
    client.pexpire(LOCK, 5_000)
    assert store.renew([renewal("o.1", TTL, ("count", "2"))]) == [False]
    assert client.hget(LOCK, "count") is None
    assert client.pttl(LOCK) <= 5_000


@pytest.mark.core
def test_renewing_moves_the_deadline_and_never_shortens_it(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1")
    assert store.renew([renewal("o.1", 60_000)]) == [True]
    assert 59_000 < client.pttl(LOCK) <= 60_000
    assert store.renew([renewal("o.1", 1_000)]) == [True]
    assert client.pttl(LOCK) > 59_000


# A server's clock that went back: keys live longer than requested


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.core
def test_life_beyond_the_ttl_is_cut_by_the_next_call_that_meets_the_lock(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "dead.1")
    client.pexpire(LOCK, HOUR_MS)
    assert isinstance(store.acquire(NAME, "o.1", 2 * TTL, request_of()), Held)
    assert TTL - 10_000 < client.pttl(LOCK) <= TTL
    assert store.renew([renewal("dead.1", 2 * TTL)]) == [True]
    assert isinstance(store.acquire(NAME, "o.2", TTL, request_of()), Held)
    assert client.pttl(LOCK) > TTL, "an extended lease is no mistake of the clock"


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.core
def test_life_beyond_the_ttl_is_cut_by_the_holders_renewal(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1")
    client.pexpire(LOCK, HOUR_MS)
    assert store.renew([renewal("o.1", TTL)]) == [True]
    assert TTL - 10_000 < client.pttl(LOCK) <= TTL


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.core
def test_min_hold_of_a_lock_taken_in_the_servers_future_is_no_longer_than_asked(
    store: RedisStore, client: redis.Redis
) -> None:
    taken = take(store, "o.1", request_of(min_hold_ms=TTL // 2))
    client.hset(LOCK, "since", str(taken.token + HOUR_MS * 1000))
    store.release(NAME, "o.1", ReleaseRequest())
    assert 0 < client.pttl(LOCK) <= TTL // 2
    client.pexpire(LOCK, HOUR_MS)
    assert isinstance(store.acquire(NAME, "p.1", 2 * TTL, request_of()), Held)
    assert 0 < client.pttl(LOCK) <= TTL // 2


@pytest.mark.invariant("watchdog-renews", "overwritten-key-loses-one-lock")
@pytest.mark.core
def test_one_lock_that_cannot_be_renewed_does_not_stop_the_others(store: RedisStore, client: redis.Redis) -> None:
    """Another program has overwritten one key: its script is an error, those before and behind it are renewed."""
    locks = [keys_of(text) for text in "abc"]
    for keys in locks:
        take(store, "o.1", name=name_in(keys))
    client.set(locks[1].lock, "not a lock")
    assert store.renew([Renewal(name_in(keys), "o.1", TTL) for keys in locks]) == [True, False, True]
    assert store.renew([Renewal(name_in(locks[1]), "o.1", TTL)]) == [False]


@pytest.mark.core
def test_release_wakes_waiters_only_if_it_freed_the_lock(store: RedisStore) -> None:
    take(store, "o.1")
    listener = store.release_listener(NAME)
    other = store.release_listener(name_in(keys_of("another")))
    assert isinstance(store.acquire(NAME, "w.1", TTL, request_of(notify=True)), Held)
    store.release(NAME, "p.1", ReleaseRequest())
    assert not listener.wait(0.1)
    store.release(NAME, "o.1", ReleaseRequest())
    assert listener.wait(5)
    assert not other.wait(0.05)


@pytest.mark.core
def test_release_without_a_waiter_publishes_nothing(store: RedisStore) -> None:
    """A publication costs the server more than the rest of a release; one who only asked is no waiter."""
    take(store, "o.1")
    listener = store.release_listener(NAME)
    assert isinstance(store.acquire(NAME, "w.1", TTL, request_of()), Held)
    store.release(NAME, "o.1", ReleaseRequest())
    assert not listener.wait(0.1)


# Fencing tokens


@pytest.mark.invariant("tokens-never-decrease")
@pytest.mark.core
def test_tokens_of_a_bucket_strictly_grow_whatever_ended_the_lock_before(
    store: RedisStore, client: redis.Redis
) -> None:
    tokens = []
    sibling = LockKeys.of("dlock", LockName("another", int(LOCK.split("{")[1][:3], 16)))
    assert sibling.last == LAST
    for number in range(20):
        keys = sibling if number % 3 else KEYS
        tokens.append(take(store, f"o.{number}", name=name_in(keys)).token)
        if number % 4 == 0:
            client.delete(keys.lock)
        elif number % 4 == 1:
            client.pexpire(keys.lock, 1)
            eventually(lambda keys=keys: not client.exists(keys.lock), every=0.001)  # type: ignore[misc]
        elif number % 4 == 2:
            client.flushall()
        else:
            store.release(name_in(keys), f"o.{number}", ReleaseRequest())
    assert tokens == sorted(set(tokens))


@pytest.mark.invariant("tokens-never-decrease")
@pytest.mark.core
@pytest.mark.parametrize("last", [2_000_000_000_000_001, 4_503_599_627_370_497, 9_007_199_254_740_990])
def test_a_token_is_an_exact_integer_also_while_the_servers_clock_is_behind(
    store: RedisStore, client: redis.Redis, last: int
) -> None:
    client.set(LAST, last)
    assert take(store, "o.1").token == last + 1
    assert client.get(LAST) == client.hget(LOCK, "token") == str(last + 1)


def test_a_token_is_the_servers_time_in_microseconds(store: RedisStore, client: redis.Redis) -> None:
    before, microseconds = client.time()
    answer = take(store, "o.1")
    assert 0 < answer.token - (before * 1_000_000 + microseconds) < 5_000_000
    assert answer.rank_us == answer.token == round(answer.since * 1_000_000)


@pytest.mark.invariant("tokens-never-decrease")
def test_only_a_new_acquisition_mints_a_token(store: RedisStore, client: redis.Redis, topology: str) -> None:
    token = take(store, "o.1").token
    last = client.get(LAST)
    assert last == str(token) or topology.startswith("redlock")  # one that came late may have minted a higher one
    store.acquire(NAME, "p.1", TTL, request_of())
    store.renew([renewal("o.1")])
    store.release(NAME, "o.1", ReleaseRequest())
    assert client.get(LAST) == last


# Safe to send twice


@pytest.mark.invariant("store-calls-are-idempotent")
@pytest.mark.core
def test_a_repeated_acquire_answers_as_the_first_and_holds_once(
    store: RedisStore, client: redis.Redis, topology: str
) -> None:
    first = take(store, "o.1", request_of("id1"))
    again = take(store, "o.1", request_of("id1"))
    assert of_one_acquisition(first, again, topology)
    assert again.since == pytest.approx(first.since, rel=0, abs=CLOCKS[topology.startswith("redlock")])
    assert client.hget(LOCK, "count") is None
    assert store.release(NAME, "o.1", ReleaseRequest()).ours
    assert not client.exists(LOCK)


def test_a_late_copy_of_an_acquire_does_not_shorten_an_extended_lease(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1")
    assert store.renew([renewal("o.1", 600_000)]) == [True]
    take(store, "o.1")
    assert client.pttl(LOCK) > 590_000


@pytest.mark.core
def test_late_copies_of_a_renewal_and_of_a_release_do_not_touch_the_next_holder(
    store: RedisStore, client: redis.Redis, topology: str
) -> None:
    take(store, "o.1")
    store.release(NAME, "o.1", ReleaseRequest())
    token = take(store, "o.2").token
    assert store.renew([renewal("o.1", TTL, ("count", "9"))]) == [False]
    assert not store.release(NAME, "o.1", ReleaseRequest()).ours
    assert client.hmget(LOCK, "acq", "count") == ["o.2", None]
    minted = int(client.hget(LOCK, "token"))
    assert minted == token or (topology.startswith("redlock") and minted > token)  # by one that came late
