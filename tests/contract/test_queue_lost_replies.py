"""A network that loses replies, between the queue's steps and a real server: no turn waits for it."""

from collections.abc import Iterator

import pytest
import redis

from celery_dlock.keys.key_spec import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Grant, Identity, Parked, QueueRequest
from celery_dlock.store.redis.scripts import SCRIPTS
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import Party, cut_reply
from tests.contract.helpers import request_of as plain_request
from tests.contract.queue_helpers import (
    KEYS,
    NAME,
    TRIES,
    TTL,
    TURN,
    digest,
    ending,
    entry_of,
    expire,
    grant_to,
    park,
    take,
)
from tests.support.proxy import Proxy
from tests.support.stores import store_at

pytestmark = pytest.mark.core


@pytest.fixture
def lossy(proxy: Proxy) -> Iterator[RedisStore]:
    """Connected through the proxy."""
    made = store_at(proxy.url(), timeout=2)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["queue", "another policy", "a Lock"])
def test_a_release_whose_reply_is_lost_grants_and_tells_of_it(
    store: RedisStore, lossy: RedisStore, proxy: Proxy, how: str
) -> None:
    if how == "queue":
        take(store, "h.1", "h")
    else:
        store.acquire(NAME, "h.1", TTL, plain_request("h" if how == "another policy" else None))
    park(store, "a.1", "a")
    cut_reply(proxy, SCRIPTS["release_queued"] if how == "queue" else SCRIPTS["release"])
    released = lossy.release(NAME, "h.1", ReleaseRequest() if how == "a Lock" else ending("h", queue=how == "queue"))
    assert released.ours
    assert released.granted
    assert (released.granted.identity, released.granted.entry) == (digest("a"), entry_of("a"))


def test_a_sweep_whose_reply_is_lost_tells_of_its_grant(
    store: RedisStore, lossy: RedisStore, proxy: Proxy, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    expire(client)
    cut_reply(proxy, SCRIPTS["sweep"])
    granted = lossy.sweep(NAME, "s.1", TURN, TRIES).granted
    assert granted
    assert granted.identity == digest("a")


def test_removal_whose_reply_was_lost_returns_the_entry_again(
    store: RedisStore, lossy: RedisStore, proxy: Proxy
) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    cut_reply(proxy, SCRIPTS["remove_waiter"])
    taken = lossy.remove_waiter(NAME, digest("a"), "t.1")
    assert taken.entry == entry_of("a")
    assert taken.granted
    assert taken.granted.identity == digest("b")


def test_a_publication_whose_note_lost_its_reply_is_noted(
    store: RedisStore, lossy: RedisStore, proxy: Proxy, client: redis.Redis
) -> None:
    grant_to(store, "a")
    cut_reply(proxy, SCRIPTS["confirm_publish"])
    assert lossy.confirm_publish(NAME, digest("a"), TURN)
    assert client.hget(KEYS.lock, "published") == "1"


def test_lost_reply_of_a_parking_that_granted_still_hands_off(
    store: RedisStore, proxy: Proxy, client: redis.Redis
) -> None:
    """And parks under the next number, once, at its rank."""
    party = Party(proxy.url(), timeout=2)
    handed: list[tuple[LockName, Grant]] = []
    party.lock_client._publisher = lambda name, grant: handed.append((name, grant))
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    expire(client)
    cut_reply(proxy, SCRIPTS["acquire_queued"])
    place = QueueRequest(entry=entry_of("b"))
    request = AcquireRequest(party.context.requester, Identity("b"), rank_us=20, queue=place)
    answer = party.lock_client.acquire(NAME, party.context, 30.0, request)
    assert isinstance(answer, Parked)
    assert (answer.rank_us, answer.position) == (20, 1)
    assert [(name, grant.identity) for name, grant in handed] == [(NAME, digest("a"))]
    assert client.zrange(KEYS.queue()[0], 0, -1, withscores=True) == [(digest("b"), 20)]
    assert not party.lease_table.records()
    party.store.close()
