"""No script walks the queue, and none touches a key that it does not name."""

from collections.abc import Callable, Iterator

import pytest
import redis

from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Grant
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import commands_seen, load_scripts
from tests.contract.helpers import request_of as plain_claim
from tests.contract.queue_helpers import (
    KEYS,
    NAME,
    TRIES,
    TTL,
    TURN,
    ask,
    digest,
    ending,
    entry_of,
    expire,
    make_due,
    make_ready,
    park,
    take,
)

FEW, MANY = 10, 20_000
#: Ranks of the messages that wait before the test begins; all later than its own.
FAR = 4_000_000_000_000_000

Steps = Iterator[tuple[str, Callable[[], object]]]


def crowd(client: redis.Redis, count: int, keys: LockKeys = KEYS) -> None:
    """So many wait, as if each had parked."""
    waiting, parked, _, index = keys.queue()
    people = [digest(f"crowd{number}") for number in range(count)]
    with client.pipeline(transaction=False) as pipe:
        for start in range(0, count, 1000):
            part = people[start : start + 1000]
            pipe.zadd(waiting, {who: FAR + start + place for place, who in enumerate(part)})
            pipe.hset(parked, mapping={who: entry_of(who) for who in part})
        pipe.zadd(index, {keys.name: FAR})
        pipe.execute()


def free(client: redis.Redis) -> None:
    """The lock is free again. Its granted message goes too: without a place, a sweep would give it one."""
    client.hdel(KEYS.queue()[1], str(client.hget(KEYS.lock, "identity")))
    expire(client)


def life(store: RedisStore, client: redis.Redis) -> Steps:
    """Every step of a queue's life once; the first to wait are the test's own."""
    yield "take", lambda: take(store, "h.1", "h", rank_us=1)
    yield "ask", lambda: ask(store, "a.1", "a", rank_us=2)
    yield "park", lambda: park(store, "a.1", "a", rank_us=2)
    yield "park at the end", lambda: park(store, "z.1", "z", rank_us=FAR * 2)
    yield "park behind", lambda: park(store, "b.1", "b", rank_us=3)
    yield "limited", lambda: ask(store, "c.1", "c", rank_us=4, parks=True, limit=2)
    yield "waiting", lambda: store.list_waiters(NAME, 5)
    yield from turns(store, client)
    yield "copy without its turn", lambda: ask(store, "y.1", "crowd1", rank_us=5)
    yield "take out of the middle", lambda: store.remove_waiter(NAME, digest("crowd7"), "t.3", ended=True)
    free(client)
    yield "sweep a free lock", lambda: store.sweep(NAME, "s.2", TURN, TRIES)
    free(client)
    yield "oust", lambda: park(store, "d.1", "d", rank_us=FAR * 2, limit=2, evict_oldest=True)
    free(client)
    yield "take before all", lambda: take(store, "e.1", "e", rank_us=6)
    yield "release of another policy", lambda: store.release(NAME, "e.1", ReleaseRequest())


def turns(store: RedisStore, client: redis.Redis) -> Steps:
    """``h`` holds, ``a`` and ``b`` wait before all others."""
    turn: list[str] = []

    def given(grant: Grant | None) -> None:
        assert grant
        turn.append(grant.grant_id)

    yield "release", lambda: given(store.release(NAME, "h.1", ending("h")).granted)
    yield "published", lambda: store.confirm_publish(NAME, digest("a"), TURN)
    make_due(client)
    yield "lose a turn", lambda: given(store.sweep(NAME, "s.1", TURN, TRIES).granted)
    make_ready(client, "a")
    yield "due", lambda: store.list_due_queues([NAME.bucket], 100)
    yield "take a turn", lambda: take(store, "b.2", "b", grant_id=turn[-1])
    yield "bring back", lambda: given(store.release(NAME, "b.2", ending("b")).granted)
    yield "take out", lambda: store.remove_waiter(NAME, digest("a"), "t.1")
    yield (
        "dead_letter",
        lambda: store.remove_waiter(NAME, str(client.hget(KEYS.lock, "identity")), "t.2", dead_letter=True),
    )


def commands_of(store: RedisStore, client: redis.Redis) -> dict[str, list[str]]:
    """By step: the commands that its scripts gave."""
    found = {}
    for step, act in life(store, client):
        with commands_seen(client) as seen:
            act()
        found[step] = [words[0].upper() for kind, words in seen if kind == "lua"]
    return found


@pytest.mark.invariant("queue-steps-are-constant")
def test_each_step_is_as_many_commands_for_twenty_thousand_waiters_as_for_ten(
    store: RedisStore, client: redis.Redis
) -> None:
    crowd(client, FEW)
    few = commands_of(store, client)
    client.flushall()
    crowd(client, MANY)
    assert commands_of(store, client) == few
    assert max(map(len, few.values())) <= 30, few


def test_step_takes_as_long_for_twenty_thousand_waiters_as_for_ten(store: RedisStore, client: redis.Redis) -> None:
    """By the server's own account; a walk would take it a thousand times as long."""

    def microseconds(count: int) -> float:
        client.flushall()
        crowd(client, count)
        client.config_resetstat()
        for number in range(40):
            take(store, f"h{number}.1", f"h{number}", rank_us=1)
            park(store, f"a{number}.1", f"a{number}", rank_us=2)
            granted = store.release(NAME, f"h{number}.1", ending(f"h{number}")).granted
            assert granted
            store.confirm_publish(NAME, granted.identity, TURN)
            take(store, f"a{number}.2", f"a{number}", grant_id=granted.grant_id)
            store.list_waiters(NAME, 5)
            store.release(NAME, f"a{number}.2", ending(f"a{number}"))
            store.remove_waiter(NAME, str(client.hget(KEYS.lock, "identity")), "t.1")
            client.delete(KEYS.lock)
        return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])

    few = min(microseconds(FEW + 80) for _ in range(3))
    many = min(microseconds(MANY) for _ in range(3))
    assert many < 3 * few + 50, (few, many)


def test_waiters_with_failed_grants_return_in_groups(store: RedisStore, client: redis.Redis) -> None:
    """Ten thousand of them at once would hold the server up."""
    waiting, parked, later, _ = KEYS.queue()
    lost = [digest(f"lost{number}") for number in range(40)]
    for rank, who in enumerate(lost):
        client.zadd(later, {who: 1})
        client.hset(parked, mapping={who: entry_of(who), f"{who}:rank": str(rank), f"{who}:tries": "1"})
    assert store.sweep(NAME, "s.1", TURN, TRIES).granted
    assert client.zcard(waiting) + 1 + client.zcard(later) == 40
    assert client.zcard(later) == 40 - 16


@pytest.mark.invariant("queue-steps-are-constant")
@pytest.mark.core
def test_scripts_touch_only_keys_that_they_name_and_all_of_one_slot(store: RedisStore, client: redis.Redis) -> None:
    """Else they do not run on a Cluster."""
    crowd(client, FEW)
    load_scripts(client)  # so that no command carries a script's text, which is hard to read
    touched: dict[str, int] = {}
    with commands_seen(client) as seen:
        for _, act in life(store, client):
            act()
        store.acquire(NAME, "l.1", TTL, plain_claim(notify=True))
        store.acquire(NAME, "l.2", TTL, plain_claim(notify=True))
    named: list[str] = []
    for kind, words in seen:
        if words[0] == "EVALSHA":
            named = words[3 : 3 + int(words[2])]
            assert {key.split("{")[1].split("}")[0] for key in named} == {f"{NAME.bucket:03x}"}
        elif kind == "lua" and words[0].upper() != "TIME":
            several = words[0].upper() in ("MGET", "DEL", "EXISTS")
            for key in words[1:] if several else words[1:2]:
                assert key in named, words
                touched[key] = touched.get(key, 0) + 1
    assert {*KEYS.queue(), KEYS.named("dead"), KEYS.lock, KEYS.last} <= touched.keys()
