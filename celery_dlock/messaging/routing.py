"""The queue that a message came from: a copy goes there, not through the message's exchange again.

The exchange may lead to other queues too, and the transport of a pool child may not know it: kombu's virtual ones drop
what they cannot route without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kombu.transport.virtual.exchange import TopicExchange

__all__ = ["source_queue"]


def source_queue(queues: Any, delivery_info: Mapping[str, Any], tags: Callable[[], Mapping[str, str]]) -> str | None:
    """Return the queue's name; None if it cannot be told, or if there is none (a fanout exchange over Redis).

    Over Redis and the like the publisher writes ``delivery_info``, so only a queue that the worker consumes is
    believed. Any other name may be that of another key, or of a queue that the publisher may not write to.

    Args:
        queues: The app's queues, ``app.amqp.queues``.
        delivery_info: Of the message.
        tags: Gives the worker's consumer tags by queue; a real broker names the tag in each delivery.
    """
    exchange, routing_key = delivery_info.get("exchange"), delivery_info.get("routing_key") or ""
    consumed = queues.consume_from
    if not exchange and routing_key in consumed:
        return str(routing_key)
    active = tags()
    # Before 5.7, Celery leaves out a queue that the worker stopped consuming and then consumes again.
    consumed = {**{name: queues[name] for name in active if name in queues}, **consumed}
    if not exchange and routing_key in consumed:
        return str(routing_key)
    tag = delivery_info.get("consumer_tag")
    for name, queue_tag in active.items():
        if tag and tag == queue_tag:
            return name
    if not exchange:
        return str(next(iter(consumed))) if len(consumed) == 1 else None
    return _bound_queue(consumed.values(), exchange, routing_key)


def _bound_queue(queues: Iterable[Any], exchange: str, routing_key: str) -> str | None:
    for queue in queues:
        for bound, binding in _bindings(queue):
            if bound.name == exchange and _routes(bound.type, binding, routing_key):
                return str(queue.name)
    return None


def _bindings(queue: Any) -> Iterator[tuple[Any, str]]:
    yield queue.exchange, queue.routing_key or ""
    for binding in queue.bindings or ():
        yield binding.exchange, binding.routing_key or ""


def _routes(kind: str, binding: str, routing_key: str) -> bool:
    if kind == "topic":
        return re.match(TopicExchange(None).key_to_pattern(binding), routing_key) is not None
    # Whoever is behind a fanout exchange gets every message, over Redis from no queue that could be published to.
    return kind == "direct" and binding == routing_key
