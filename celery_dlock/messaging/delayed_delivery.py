"""Celery's native delayed delivery over RabbitMQ: a delayed message waits in the broker, not in a worker.

With quorum queues a worker cannot raise its prefetch count. A message that waits for its ETA in the worker would keep
a place in the prefetch window. Celery's workers declare the queues of the delay; a message of ours comes back from
there to one queue alone, by a binding of its own.
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

__all__ = ["DEATHS", "DELIVERY", "Detour", "detour", "without_deaths"]

#: The exchange through which delayed messages come back.
DELIVERY: Final = CELERY_DELAYED_DELIVERY_EXCHANGE
#: Headers that RabbitMQ adds to a message whose time in a queue is over, and the queue that each names.
DEATHS: Final = "x-death"
_QUEUES_OF_DEATHS: Final = ("x-first-death-queue", "x-last-death-queue")
_PREFIX: Final = "celery_delayed_"
_LONGEST: Final = 2 ** (MAX_LEVEL + 1) - 1


class Detour(NamedTuple):
    """The way of a delayed message.

    Args:
        exchange: The exchange to publish it to.
        routing_key: The key to publish it with.
        binding: The routing key by which its queue has to be bound to `DELIVERY`.
    """

    exchange: str
    routing_key: str
    binding: str


def detour(app: Any, queue: str, delay: float) -> Detour | None:
    """Return the way on which a message waits in the broker; None if it is to wait in a worker.

    The delay is counted in whole seconds, rounded up. A shorter one than a second is left to the worker.
    """
    if delay < 1 or not detect_quorum_queues(app, "amqp")[0]:
        return None
    # One word, which no binding of another queue matches.
    word = f"dlock-{hashlib.blake2b(queue.encode(), digest_size=8).hexdigest()}"
    key = calculate_routing_key(min(math.ceil(delay), _LONGEST), word)
    return Detour(level_name(MAX_LEVEL), key, f"#.{word}")


def without_deaths(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the headers without RabbitMQ's notes of earlier delays.

    RabbitMQ drops a message that comes to a queue of the delay a second time, if these notes name that queue.
    """
    deaths = headers.get(DEATHS)
    if not isinstance(deaths, list):
        return headers
    kept = [death for death in deaths if not _is_delay(death.get("queue") if isinstance(death, Mapping) else None)]
    if len(kept) == len(deaths):
        return headers
    gone = {name for prefix in _QUEUES_OF_DEATHS if _is_delay(headers.get(prefix)) for name in _notes(prefix)}
    cleaned = {name: value for name, value in headers.items() if name != DEATHS and name not in gone}
    return {**cleaned, DEATHS: kept} if kept else cleaned


def _is_delay(queue: Any) -> bool:
    return isinstance(queue, str) and queue.startswith(_PREFIX)


def _notes(queue: str) -> tuple[str, ...]:
    start = queue.removesuffix("queue")
    return queue, f"{start}exchange", f"{start}reason"
