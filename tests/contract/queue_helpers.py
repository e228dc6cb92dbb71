"""Common parts of the tests of the queue's scripts: messages that ask and park, grants, and the server's own view."""

import json
from typing import Any

import redis

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Grant, Identity, Parked, QueueRequest, Refusal, Requester
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.support.stores import name_in

TTL = 60_000
TURN = 60_000
TRIES = 5
SECOND = 1_000_000

NAME = LockName("n:x", 7)
KEYS = LockKeys.of("dlock", NAME)
_, PARKED, LATER, INDEX = KEYS.queue()


def digest(task_id: str) -> str:
    return Identity(task_id).digest


def entry_of(task_id: str, *, task: str = "app.post", body: str = "{}") -> str:
    """Return an entry as it is written: the owner in the first line, then what only its publisher reads."""
    return f"{json.dumps([task, task_id])}\n{body}"


def request_of(task_id: str, *, parks: bool = False, **facts: Any) -> AcquireRequest:
    place = {name: facts.pop(name) for name in QueueRequest._fields if name in facts}
    if parks:
        place.setdefault("entry", entry_of(task_id))
    return AcquireRequest(
        Requester("app.post", task_id, "node1", "77"), Identity(task_id), queue=QueueRequest(**place), **facts
    )


def ask(store: RedisStore, acquisition: str, task_id: str, name: LockName = NAME, **facts: Any) -> Acquired | Refusal:
    return store.acquire(name, acquisition, TTL, request_of(task_id, **facts))


def take(store: RedisStore, acquisition: str, task_id: str, name: LockName = NAME, **facts: Any) -> Acquired:
    answer = ask(store, acquisition, task_id, name, **facts)
    assert isinstance(answer, Acquired), answer
    return answer


def park(store: RedisStore, acquisition: str, task_id: str, name: LockName = NAME, **facts: Any) -> Parked:
    answer = ask(store, acquisition, task_id, name, parks=True, **facts)
    assert isinstance(answer, Parked), answer
    return answer


def ending(task_id: str, *, final: bool = True, queue: bool = True, **facts: Any) -> ReleaseRequest:
    return ReleaseRequest(final=final, identity=digest(task_id), queue=queue, **facts)


def grant_to(store: RedisStore, task_id: str, name: LockName = NAME) -> Grant:
    """Park this one behind a holder that releases: it is granted the lock, and not published yet."""
    take(store, "holder.1", "holder", name)
    park(store, f"{task_id}.1", task_id, name)
    granted = store.release(name, "holder.1", ending("holder")).granted
    assert granted, "nobody was granted"
    return granted


def whose(grant: Grant | None) -> str | None:
    return grant.identity if grant else None


def waiting(client: redis.Redis, keys: LockKeys = KEYS) -> list[Any]:
    """Digests by rank."""
    return list(client.zrange(keys.queue()[0], 0, -1))


def rank_in(client: redis.Redis, task_id: str, keys: LockKeys = KEYS) -> int:
    score = client.zscore(keys.queue()[0], digest(task_id))
    assert score is not None, f"{task_id} does not wait"
    return int(score)


def now_us(client: redis.Redis) -> int:
    seconds, micros = client.time()
    return int(seconds) * SECOND + int(micros)


def make_due(client: redis.Redis, keys: LockKeys = KEYS) -> None:
    """The time of the turn passes."""
    past = now_us(client) - 1
    client.hset(keys.lock, "due", str(past))
    client.zadd(keys.queue()[3], {keys.name: past})


def make_ready(client: redis.Redis, task_id: str, keys: LockKeys = KEYS) -> None:
    """Let the time pass that follows a lost grant."""
    past = now_us(client) - 1
    client.zadd(keys.queue()[2], {digest(task_id): past}, xx=True)
    client.zadd(keys.queue()[3], {keys.name: past}, xx=True)


def expire(client: redis.Redis, keys: LockKeys = KEYS) -> None:
    """The holder's lease ends."""
    client.pexpire(keys.lock, -1)
    client.zadd(keys.queue()[3], {keys.name: now_us(client) - 1}, xx=True)


def lose_turn(store: RedisStore, client: redis.Redis, task_id: str, keys: LockKeys = KEYS, tries: int = TRIES) -> str:
    """Publish its grant and let it pass. Return the identity that became a dead letter."""
    assert store.confirm_publish(name_in(keys), digest(task_id), TURN)
    make_due(client, keys)
    return store.sweep(name_in(keys), "sweeper.1", TURN, tries).dead_letter
