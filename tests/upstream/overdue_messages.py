"""kombu: without an event loop (gevent, eventlet), a Redis consumer never returns overdue messages to their queue."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import kombu

from tests.upstream.environment import running_server

VISIBILITY_TIMEOUT = 1.0
PATIENCE = 5.0


def fault() -> str:
    with running_server() as server:
        options = {
            "visibility_timeout": VISIBILITY_TIMEOUT,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
        with kombu.Connection(server.url(), transport_options=options) as dead, dead.SimpleQueue("q") as queue:
            queue.put("work")
            queue.get(timeout=5)
            forget_unacknowledged(queue.channel)
        return _consume(server.url(), options)


def _consume(url: str, options: dict[str, float]) -> str:
    received: list[object] = []
    with kombu.Connection(url, transport_options=options) as connection:
        consumer = connection.Consumer([kombu.Queue("q")], callbacks=[lambda body, message: received.append(body)])
        deadline = time.monotonic() + VISIBILITY_TIMEOUT + PATIENCE
        with consumer:
            while not received and time.monotonic() < deadline:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=2)  # as Celery's worker
            forget_unacknowledged(consumer.channel)
    return "" if received else f"not delivered within {PATIENCE:g} s after its visibility timeout"


def forget_unacknowledged(channel: Any) -> None:
    """Do as if this process died: it returns nothing that it has not acknowledged."""
    channel.qos._delivered.clear()
