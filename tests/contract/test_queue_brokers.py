"""A sweep over a real broker and a real store: messages of another URL of the broker, and servers that refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.messaging.broker_identity import broker_of
from celery_dlock.messaging.message import RawMessage
from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.runtime import Runtime
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.queue_sweeper import QueueSweeper
from tests.contract.queue_helpers import KEYS, NAME, digest, expire, make_due, park, take
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.stores import name_in

pytestmark = pytest.mark.core

BODY = "[[], {}, {}]"


@pytest.fixture
def broker(clean_server: Server) -> Iterator[redis.Redis]:
    with closing(clean_server.client(db=0)) as connected:
        yield connected


def app_at(server: Server, url: str, **conf: Any) -> Celery:
    app = Celery("brokers", broker=url.format(port=server.port), set_as_current=False)
    app.conf.update(dlock_url=server.url(0), **conf)
    return app


def look(app: Celery) -> None:
    """One look of a worker that publishes to the app's broker."""
    sweeper = QueueSweeper(DeliveryRegistry(Runtime.of(app)), lambda call: call(), lambda: False)
    sweeper._sweep_due()
    sweeper._drop_connection()


@pytest.fixture
def granted(clean_server: Server, store: RedisStore, client: redis.Redis) -> Celery:
    """A call was parked under this app's broker, and is granted the lock. The process that granted it died."""
    app = app_at(clean_server, "redis://127.0.0.1:{port}/0")
    raw = RawMessage(BODY, "application/json", "utf-8", {"task": "app.post", "id": "a"}, {}, "celery")
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", entry=ParkedMessage.of(tuple(raw), broker_of(app), 10**15, 0).text())
    assert store.release(NAME, "holder.1", ReleaseRequest(queue=True)).granted
    make_due(client)
    return app


@pytest.mark.usefixtures("granted")
def test_parked_message_is_published_if_only_user_and_password_have_changed(
    clean_server: Server, broker: redis.Redis
) -> None:
    """The URL of its broker is otherwise the same."""
    look(app_at(clean_server, "redis://default:@127.0.0.1:{port}"))
    assert broker.llen("celery") == 1


@pytest.mark.invariant("foreign-messages-block-no-name")
def test_parked_message_of_another_host_name_is_published_after_dlock_broker_is_set(
    granted: Celery,
    clean_server: Server,
    broker: redis.Redis,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until then it is logged."""
    moved = "redis://localhost:{port}/0"
    look(app_at(clean_server, moved))
    assert broker.llen("celery") == 0
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    name = warning.rpartition("set dlock_broker=")[2].strip("'")
    assert name == broker_of(granted)
    make_due(client)
    look(app_at(clean_server, moved, dlock_broker=name))
    assert broker.llen("celery") == 1


@pytest.mark.invariant("foreign-messages-block-no-name")
def test_released_turn_of_another_broker_is_published_by_a_worker_of_that_broker(
    granted: Celery, clean_server: Server, broker: redis.Redis, client: redis.Redis
) -> None:
    """A worker of another broker sweeps first and more often; it leaves the message to the next look."""
    other = QueueSweeper(
        DeliveryRegistry(Runtime.of(app_at(clean_server, "redis://localhost:{port}/0"))),
        lambda call: call(),
        lambda: False,
    )
    other._sweep_due()
    passed = client.hgetall(KEYS.lock)
    for _ in range(3):
        other._next_sweep = 0.0
        other._sweep_due()
    assert client.hgetall(KEYS.lock) == passed
    look(granted)
    assert broker.llen("celery") == 1
    assert client.hget(KEYS.lock, "published") == "1"


@pytest.mark.invariant("foreign-messages-block-no-name")
@pytest.mark.usefixtures("granted")
def test_turn_is_no_foreign_one_while_workers_of_its_broker_run(clean_server: Server, client: redis.Redis) -> None:
    other = app_at(clean_server, "redis://localhost:{port}/0")
    look(other)
    assert client.hget(KEYS.lock, "foreign")
    client.hdel(KEYS.lock, "foreign")
    hanging = QueueSweeper(DeliveryRegistry(Runtime.of(app_at(clean_server, "redis://127.0.0.1:{port}/0"))), list, bool)
    hanging._note_presence()
    look(other)
    assert client.hget(KEYS.lock, "foreign") is None


def test_broker_that_does_not_answer_holds_the_sweeper_up_for_a_bounded_time(
    granted: Celery, clean_server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_dlock.worker.queue_sweeper.BROKER_TIMEOUT", 0.2)
    with Proxy(clean_server.port) as proxy:
        app = app_at(clean_server, proxy.url(), dlock_broker=broker_of(granted))
        sweeper = QueueSweeper(DeliveryRegistry(Runtime.of(app)), list, bool)
        proxy.set_mode("blackhole")
        sweeping = threading.Thread(target=sweeper._sweep_due, daemon=True)
        sweeping.start()
        sweeping.join(30)
        assert not sweeping.is_alive()
    assert client.hget(KEYS.lock, "published") is None


@pytest.mark.invariant("sweep-failures-stay-local")
@pytest.mark.usefixtures("granted")
def test_overwritten_lock_key_stops_the_sweep_of_no_other_lock(
    clean_server: Server, store: RedisStore, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_at(clean_server, "memory://")
    behind = LockKeys.of("dlock", LockName("n:y", NAME.bucket + 1))
    take(store, "holder.2", "holder", name_in(behind))
    park(store, "b.1", "b", name_in(behind))
    expire(client, behind)
    client.set(KEYS.lock, "overwritten")
    sweeper = QueueSweeper(DeliveryRegistry(Runtime.of(app)), lambda call: call(), lambda: False)
    for _ in range(2):
        sweeper._next_sweep = 0.0
        sweeper._sweep_due()
    assert client.hget(behind.lock, "acq") == f"grant:{digest('b')}" or client.hlen(behind.named("dead"))
    (error,) = [record.getMessage() for record in caplog.records if "not granted" in record.getMessage()]
    assert error.startswith(f"{NAME}: ")


@pytest.mark.invariant("sweep-failures-stay-local")
def test_server_without_memory_still_grants_the_lock_of_a_dead_holder(
    clean_server: Server, store: RedisStore, client: redis.Redis
) -> None:
    take(store, "holder.1", "holder")
    park(store, "a.1", "a", entry="unreadable")
    expire(client)
    client.config_set("maxmemory", 1)
    try:
        with suppress(StoreUnavailable):
            look(app_at(clean_server, "memory://"))
        assert not client.zcard(KEYS.queue()[0])
    finally:
        client.config_set("maxmemory", 0)
