"""Publishes a message to one queue. Returns once the broker has it, and tells a fault of the message from the broker's.

RabbitMQ drops a message in silence if the user may not write to the exchange, if the queue is gone, or if the broker
dies before it has written the message. So a publication over AMQP waits for the broker's confirmation, on a channel of
its own: Celery's channels do not confirm.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from kombu import Producer
from kombu.exceptions import SerializationError

from ..errors import Unpublishable
from ..utils.log import logger
from .delayed_delivery import DELIVERY, Detour, detour
from .message_times import seconds_until

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Producers", "confirms", "publish", "refused_right"]

#: Opens a connection to the broker.
Producers = Callable[[], AbstractContextManager[Any]]

#: Seconds to wait for each answer of the broker: to open the channel, to take the message, to confirm it.
CONFIRM_TIMEOUT: Final = 10.0

#: What kombu and its transports raise for a message that they cannot encode.
_OF_MESSAGES: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, SerializationError, TypeError, ValueError,
    struct.error,
)  # fmt: skip
#: AMQP: precondition failed (too large), frame error and syntax error (a header of a type without a form).
_CODES_OF_MESSAGES: Final = frozenset({406, 501, 502})
#: AMQP: the user has no right to it; no queue has this name.
_ACCESS_REFUSED: Final = 403
_NO_ROUTE: Final = 312
#: AMQP: no right to the exchange of the delay, or it does not exist.
_CANNOT_DELAY: Final = frozenset({_ACCESS_REFUSED, 404})
#: RabbitMQ refuses longer ones. The worker that receives the message still reads its header ``expires``.
_LONGEST_EXPIRATION: Final = (2**32 - 1) / 1000
#: Where a connection keeps its confirming channel.
_CHANNEL: Final = "_celery_dlock_channel"


def confirms(connection: Any) -> bool:
    """Return whether the broker behind a kombu connection can confirm what it was given."""
    return bool(connection.transport.driver_name == "py-amqp")


def publish(
    app: Celery,
    producers: Producers,
    queue: str,
    body: Any,
    headers: Mapping[str, Any],
    fields: Mapping[str, Any],
    delay: float = 0.0,
) -> None:
    """Publish a message to a queue, through the default exchange.

    Args:
        app: Whose publishing policy to use.
        producers: Opens the connection to use.
        queue: The name of the queue.
        body: The encoded body.
        headers: Of the message.
        fields: Further arguments of ``Producer.publish``.
        delay: Seconds until the message's ETA. If the broker can keep it for so long, it does.

    Raises:
        Unpublishable: The message is at fault: no later attempt could publish it.
        Exception: The broker did not take it. kombu's transports raise errors of their own libraries.
    """
    policy = app.conf.task_publish_retry_policy
    message = {**fields, "body": body, "exchange": "", "routing_key": queue}

    def send() -> None:
        expiration = _expiration(headers.get("expires"))
        with producers() as producer:
            # kombu adds to the headers.
            told = {**message, "headers": dict(headers), "expiration": expiration}
            if not confirms(producer.connection):
                producer.publish(**told, retry=True, retry_policy=policy)
            elif not _sent_delayed(producer, policy, told, detour(app, queue, delay)):
                _ensure_sent(producer, policy, told)

    try:
        try:
            send()
        except Exception as error:
            if not _is_of_message(error):
                raise
            # A connection that broke can raise the same types. If it comes again over another one, it is the message's.
            send()
    except Exception as error:
        if _is_of_message(error):
            raise Unpublishable(f"it cannot be published again: {type(error).__name__}") from error
        raise


def refused_right(connection: Any) -> str:
    """Return what RabbitMQ says if the user may not write to the default exchange; "" if the user may.

    A message for a queue that does not exist tells: RabbitMQ looks at the right first, and sends the message back.

    Args:
        connection: To a broker that confirms.

    Raises:
        Exception: It cannot be told now.
    """
    probe = {"body": "", "exchange": "", "routing_key": f"celery-dlock-probe-{uuid.uuid4().hex}"}
    try:
        if not _send_confirmed(connection, probe):
            raise TimeoutError("the broker does not answer")
    except connection.channel_errors as error:
        code = getattr(error, "reply_code", None)
        if code == _ACCESS_REFUSED:
            return str(error)
        if code != _NO_ROUTE:
            raise
    return ""


def _is_of_message(error: Exception) -> bool:
    # A refused certificate is both an OSError and a ValueError.
    if isinstance(error, OSError):
        return False
    return isinstance(error, _OF_MESSAGES) or getattr(error, "reply_code", None) in _CODES_OF_MESSAGES


def _sent_delayed(producer: Any, policy: Mapping[str, Any], message: Mapping[str, Any], way: Detour | None) -> bool:
    """Publish a message that the broker delays; False if it cannot, and nothing was published."""
    if way is None:
        return False
    delayed = {**message, "exchange": way.exchange, "routing_key": way.routing_key}
    try:
        # Bound each time: a queue that was deleted and declared anew has lost its bindings, and its messages with them.
        _ensure_sent(producer, policy, delayed, (message["routing_key"], DELIVERY, way.binding))
    except producer.connection.channel_errors as error:
        if getattr(error, "reply_code", None) not in _CANNOT_DELAY:
            raise
        logger.warning("RabbitMQ cannot delay a message, so it waits for its ETA in a worker: %s", error)
        return False
    return True


def _ensure_sent(
    producer: Any, policy: Mapping[str, Any], message: Mapping[str, Any], binding: tuple[str, str, str] | None = None
) -> None:
    connection = producer.connection
    if not connection.ensure(producer, _send_confirmed, **policy)(connection, message, binding):
        raise TimeoutError(f"the broker did not confirm the message within {CONFIRM_TIMEOUT:g} s, and may have it")


def _send_confirmed(connection: Any, message: Mapping[str, Any], binding: tuple[str, str, str] | None = None) -> bool:
    """Publish and wait for the broker's word; False if there was none. A binding is made before.

    A message that the broker did not answer is not published again at once, unlike one over a connection that broke:
    each attempt would wait as long.
    """
    amqp = connection.ensure_connection(max_retries=1, interval_start=0, reraise_as_library_errors=False).connection
    sending = False
    try:
        with amqp.transport.having_timeout(CONFIRM_TIMEOUT):
            # Taken out: a channel on which something went wrong is not used again.
            channel = vars(connection).pop(_CHANNEL, None)
            if channel is None or channel.connection is not amqp or not channel.is_open:
                channel = amqp.channel()
                channel.basic_publish = channel.basic_publish_confirm
            if binding is not None:
                channel.queue_bind(*binding)
            sending = True
            Producer(channel, auto_declare=False).publish(**message, mandatory=True, confirm_timeout=CONFIRM_TIMEOUT)
    except TimeoutError:
        # Closing it in due form would wait for the broker, too.
        connection.collect()
        if not sending:
            raise
        return False
    vars(connection)[_CHANNEL] = channel
    return True


def _expiration(expires: Any) -> float | None:
    """Return how long the broker may keep the message, at least a millisecond; None for as long as it likes."""
    left = seconds_until(expires)
    return None if left is None or left > _LONGEST_EXPIRATION else max(0.001, left)
