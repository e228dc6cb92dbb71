"""Wake-ups in the store, on every topology: one per release, in a list that neither grows nor stays."""

import time
from typing import Any

import pytest
import redis

from celery_dlock.locking.waiting import POLL
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Held
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import NAME, TTL, keys_of, request_of, take

KEYS = keys_of()


def waits(store: RedisStore, acquisition: str, **facts: Any) -> object:
    return store.acquire(NAME, acquisition, TTL, request_of(notify=True, **facts))


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
def test_release_between_a_refusal_and_the_wait_is_not_missed(store: RedisStore) -> None:
    take(store, "o.1")
    assert isinstance(waits(store, "w.1"), Held)
    store.release(NAME, "o.1", ReleaseRequest())
    began = time.monotonic()
    assert store.release_listener(NAME).wait(5)
    assert time.monotonic() - began < 1


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
def test_caller_that_is_beaten_to_the_lock_is_woken_by_the_next_release(store: RedisStore) -> None:
    take(store, "o.1")
    assert isinstance(waits(store, "w.1"), Held)
    store.release(NAME, "o.1", ReleaseRequest())
    assert store.release_listener(NAME).wait(5)
    take(store, "p.1")  # does not wait, and does not know that another caller does
    assert isinstance(waits(store, "w.2", waited=True), Held)
    store.release(NAME, "p.1", ReleaseRequest())
    assert store.release_listener(NAME).wait(5)


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
def test_wake_up_that_is_passed_on_wakes_another_caller(store: RedisStore) -> None:
    listener = store.release_listener(NAME)
    assert not listener.wait(0.02)
    listener.pass_on()
    listener.pass_on()  # twice, as after a lost reply
    assert store.release_listener(NAME).wait(5)
    assert not store.release_listener(NAME).wait(0.02)


@pytest.mark.invariant("store-errors-name-the-remedy")
@pytest.mark.parametrize("setting", ["maxmemory", "min-replicas-to-write"])
def test_wake_up_refused_for_another_reason_logs_no_missing_right(
    store: RedisStore, client: redis.Redis, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    """Expected: no warning of a right. The server is out of memory, or has too few replicas."""
    client.config_set(setting, 1)
    try:
        store.release_listener(NAME).pass_on()
        assert not client.exists(KEYS.wake)
    finally:
        client.config_set(setting, 0)
    assert not [record.message for record in caplog.records if "right" in record.message]


@pytest.mark.invariant("one-waiter-per-release")
def test_list_has_one_entry_at_most_and_lives_two_seconds(store: RedisStore, client: redis.Redis) -> None:
    for number in range(5):
        take(store, f"o.{number}")
        assert isinstance(waits(store, f"w.{number}"), Held)
        store.release(NAME, f"o.{number}", ReleaseRequest())
        store.release(NAME, f"o.{number}", ReleaseRequest())  # sent twice
        assert client.llen(KEYS.wake) == 1
        assert 0 < client.pttl(KEYS.wake) <= POLL * 1000


@pytest.mark.invariant("one-waiter-per-release")
@pytest.mark.core
def test_release_of_a_caller_that_did_not_wait_writes_no_list(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1", request_of(notify=True))
    assert not store.release(NAME, "o.1", ReleaseRequest()).woke
    assert not client.exists(KEYS.wake)
