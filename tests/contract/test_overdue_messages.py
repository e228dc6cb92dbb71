"""The search for overdue messages that takes the place of kombu's in gevent and eventlet workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock import singleton_task
from celery_dlock.worker.overdue_messages import OverdueMessages
from tests.support.servers import Server

pytestmark = [pytest.mark.core, pytest.mark.invariant("killed-worker-runs-again")]

#: As long ago as a message can be: its worker is dead, or its body outlives the visibility timeout.
LONG_AGO = 1.0


@pytest.fixture
def broker(clean_server: Server) -> Iterator[redis.Redis]:
    with closing(clean_server.client(db=0)) as connected:
        yield connected


def make_app(server: Server, **options: Any) -> Celery:
    app = Celery("overdue", broker=server.url(0), set_as_current=False)
    app.conf.broker_transport_options = options

    @singleton_task(app=app, name="overdue.own")
    def own() -> None: ...

    @app.task(name="overdue.plain")
    def plain() -> None: ...

    return app


@contextmanager
def worker_channel(app: Celery) -> Iterator[Any]:
    """A channel that has taken one message of each task."""
    app.tasks["overdue.own"].delay()
    app.tasks["overdue.plain"].delay()
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        assert channel.basic_get("celery")
        assert channel.basic_get("celery")
        yield channel
        channel.qos._delivered.clear()  # else kombu returns them when the connection closes


def taken(broker: redis.Redis) -> list[str]:
    return sorted(json.loads(kept)[0]["headers"]["task"] for kept in broker.hvals("unacked"))


def make_overdue(broker: redis.Redis, prefix: str = "") -> None:
    for tag in broker.zrange(f"{prefix}unacked_index", 0, -1):
        broker.zadd(f"{prefix}unacked_index", {tag: LONG_AGO})


def search(app: Celery, channel: Any) -> float | None:
    return OverdueMessages(app, lambda: channel, lambda: True)._run_round()


@pytest.mark.parametrize("prefix", ["", "mine:"])
def test_overdue_message_of_a_singleton_task_alone_returns_to_its_queue(
    clean_server: Server, broker: redis.Redis, prefix: str
) -> None:
    app = make_app(clean_server, global_keyprefix=prefix)
    with worker_channel(app) as channel:
        make_overdue(broker, prefix)
        search(app, channel)
        (message,) = map(json.loads, broker.lrange(f"{prefix}celery", 0, -1))
        assert message["headers"]["task"] == "overdue.own"
        assert message["headers"]["redelivered"] is True
        (kept,) = broker.hvals(f"{prefix}unacked")
        assert json.loads(kept)[0]["headers"]["task"] == "overdue.plain"


def test_message_within_its_visibility_timeout_stays(clean_server: Server, broker: redis.Redis) -> None:
    app = make_app(clean_server)
    with worker_channel(app) as channel:
        search(app, channel)
        assert taken(broker) == ["overdue.own", "overdue.plain"]
        assert not broker.llen("celery")


@pytest.mark.parametrize("kept", ["", "{", "[]", "[{}]", '[{"headers": 1}]', '[{"headers": {"task": ["x"]}}]'])
def test_unreadable_message_stays_and_another_returns(clean_server: Server, broker: redis.Redis, kept: str) -> None:
    app = make_app(clean_server)
    with worker_channel(app) as channel:
        broker.hset("unacked", "strange", kept)
        broker.zadd("unacked_index", {"strange": LONG_AGO})
        make_overdue(broker)
        search(app, channel)
        assert broker.hget("unacked", "strange") == kept
        assert broker.llen("celery") == 1


def test_search_is_as_frequent_as_kombus_timer(clean_server: Server) -> None:
    app = make_app(clean_server, unacked_restore_interval=3, unacked_restore_throttle=2)
    with worker_channel(app) as channel:
        configurable = hasattr(channel, "unacked_restore_throttle")  # since kombu 5.7
        assert search(app, channel) == (6 if configurable else 100)
    assert search(app, None) == 1


def test_search_without_emulated_acknowledgements_does_nothing(clean_server: Server, broker: redis.Redis) -> None:
    app = make_app(clean_server, ack_emulation=False)
    with worker_channel(app) as channel:
        search(app, channel)
    assert not broker.exists("unacked", "celery")
