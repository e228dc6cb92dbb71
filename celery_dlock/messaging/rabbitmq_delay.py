"""Celery's native delayed delivery over RabbitMQ: a delayed message waits in the broker, not in a worker.

With quorum queues a worker cannot raise its prefetch count. A message that waits for its ETA in the worker would
therefore block a part of the prefetch window. Celery's workers declare the delay queues. From there, a binding of its
own leads a republished message to one queue alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from celery.utils.quorum_queues import detect_quorum_queues
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    calculate_routing_key,
    level_name,
)

__all__ = ["DEATHS", "DELIVERY_EXCHANGE", "DelayRoute", "delay_route", "without_deaths"]

#: The exchange that delivers messages after their delay.
DELIVERY_EXCHANGE: Final = CELERY_DELAYED_DELIVERY_EXCHANGE
#: The header that RabbitMQ adds to a message whose time in a queue is over, and the headers that name such queues.
DEATHS: Final = "x-death"
_QUEUES_OF_DEATHS: Final = ("x-first-death-queue", "x-last-death-queue")
_PREFIX: Final = "celery_delayed_"
_LONGEST: Final = 2 ** (MAX_LEVEL + 1) - 1


class DelayRoute(NamedTuple):
    """The route of a delayed message.

    Args:
        exchange: The exchange to publish it to.
        routing_key: The key to publish it with.
        binding: The routing key that must bind its queue to `DELIVERY_EXCHANGE`.
    """

    exchange: str
    routing_key: str
    binding: str


def delay_route(app: Any, queue: str, delay: float) -> DelayRoute | None:
    """Return the route on which a message waits in the broker; None if it must wait in a worker.

    The broker counts the delay in whole seconds, rounded up. With a delay of less than a second, the worker waits.
    """
    if delay < 1 or not detect_quorum_queues(app, "amqp")[0]:
        return None
    # A single word that no binding of another queue matches.
    word = f"dlock-{hashlib.blake2b(queue.encode(), digest_size=8).hexdigest()}"
    key = calculate_routing_key(min(math.ceil(delay), _LONGEST), word)
    return DelayRoute(level_name(MAX_LEVEL), key, f"#.{word}")


def without_deaths(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the headers without RabbitMQ's records of earlier delays.

    If these records name a delay queue, RabbitMQ drops the message when it reaches that queue a second time.
    """
    deaths = headers.get(DEATHS)
    if not isinstance(deaths, list):
        return headers
    kept = [death for death in deaths if not _is_delay(death.get("queue") if isinstance(death, Mapping) else None)]
    if len(kept) == len(deaths):
        return headers
    removed = {
        name for header in _QUEUES_OF_DEATHS if _is_delay(headers.get(header)) for name in _death_headers(header)
    }
    cleaned = {name: value for name, value in headers.items() if name != DEATHS and name not in removed}
    return {**cleaned, DEATHS: kept} if kept else cleaned


def _is_delay(queue: Any) -> bool:
    return isinstance(queue, str) and queue.startswith(_PREFIX)


def _death_headers(queue_header: str) -> tuple[str, ...]:
    start = queue_header.removesuffix("queue")
    return queue_header, f"{start}exchange", f"{start}reason"
