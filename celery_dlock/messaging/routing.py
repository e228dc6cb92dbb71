"""The queue that a message came from, to which it is republished, and whether that queue counts deliveries.

It is not republished through its exchange, which may lead to other queues too. The transport of a pool child may not
even know that exchange. kombu's virtual transports drop a message that they cannot route, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kombu.transport.virtual.exchange import TopicExchange

if TYPE_CHECKING:
    from .message import RawMessage

__all__ = ["DELIVERY_COUNT", "counts_deliveries", "declared_limit", "is_quorum", "source_queue"]

#: The header in which RabbitMQ counts how often a message of a quorum queue was requeued.
DELIVERY_COUNT: Final = "x-delivery-count"


def source_queue(queues: Any, delivery_info: Mapping[str, Any], tags: Callable[[], Mapping[str, str]]) -> str | None:
    """Return the queue's name; None if it is unknown, or if there is no queue (a fanout exchange over Redis).

    Over Redis and similar brokers the publisher writes ``delivery_info``. So only a queue that the worker consumes
    counts. Another name may be that of another key, or of a queue that the publisher may not write to.

    Args:
        queues: The app's queues, ``app.amqp.queues``.
        delivery_info: The message's delivery info.
        tags: Returns the worker's consumer tags by queue. An AMQP broker names the tag in each delivery.
    """
    exchange, routing_key = delivery_info.get("exchange"), delivery_info.get("routing_key") or ""
    consumed = queues.consume_from
    if not exchange and routing_key in consumed:
        return str(routing_key)
    active = tags()
    # Before 5.7, `consume_from` lacks a queue that the worker stopped consuming and then consumes again.
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
    # A fanout exchange copies each message to all its consumers. Over Redis there is no queue to publish to.
    return kind == "direct" and binding == routing_key


def is_quorum(queue: Any) -> bool:
    """Return whether the app declares this queue as a quorum queue."""
    return (queue.queue_arguments or {}).get("x-queue-type") == "quorum"


def declared_limit(queue: Any) -> int | None:
    """Return the delivery limit with which the app declares this queue; None: without one, or not as a quorum queue."""
    return (queue.queue_arguments or {}).get("x-delivery-limit") if is_quorum(queue) else None


def counts_deliveries(queues: Any, raw: RawMessage, delivery_info: Mapping[str, Any]) -> bool:
    """Return whether the broker counts how often this message is requeued, and drops it after too many times.

    Quorum queues do. The app's settings may not tell: a virtual host has a default type of queue. The header tells,
    but only after the first requeue, and a message that another one of a quorum queue inherited it from has it too.
    """
    queue = queues.get(raw.queue)
    if queue is not None and is_quorum(queue):
        return True
    return DELIVERY_COUNT in raw.headers and bool(delivery_info.get("redelivered"))
