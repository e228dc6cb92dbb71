"""Publishing a message to one queue, until the broker has it.

Over AMQP, `publish` waits for the broker's confirmation. Without it, RabbitMQ may drop a message without an error. The
causes are a missing right to the exchange, a deleted queue, and the broker's death. Celery's channels do not confirm,
so `publish` uses a channel of its own.

Errors are divided by cause. No later attempt can publish an invalid message; after a fault of the broker, one can.
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
from .message_times import seconds_until
from .rabbitmq_delay import DELIVERY_EXCHANGE, DelayRoute, delay_route

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Producers", "confirms", "publish", "refused_right"]

#: Opens a connection to the broker.
Producers = Callable[[], AbstractContextManager[Any]]

#: Seconds to wait for each answer of the broker: to open the channel, to take the message, to confirm it.
CONFIRM_TIMEOUT: Final = 10.0

#: Errors that kombu and its transports raise for a message that they cannot encode.
_MESSAGE_ERRORS: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, SerializationError, TypeError, ValueError,
    struct.error,
)  # fmt: skip
#: AMQP: precondition failed (too large), frame error and syntax error (a header of a type without a form).
_MESSAGE_ERROR_CODES: Final = frozenset({406, 501, 502})
#: AMQP: the user has no right to the exchange or queue; no queue has this name.
_ACCESS_REFUSED: Final = 403
_NO_ROUTE: Final = 312
#: AMQP: the user has no right to the delay exchange, or that does not exist.
_CANNOT_DELAY: Final = frozenset({_ACCESS_REFUSED, 404})
#: RabbitMQ refuses longer expirations. The worker that receives the message reads its header ``expires`` anyway.
_MAX_EXPIRATION: Final = (2**32 - 1) / 1000
#: The attribute in which a connection keeps its confirming channel.
_CHANNEL: Final = "_celery_dlock_channel"
#: The attribute of an app whose last message had no answer of the broker.
_UNANSWERED: Final = "_celery_dlock_unanswered"


def confirms(connection: Any) -> bool:
    """Return whether the broker of a kombu connection can confirm messages."""
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
        app: The app whose publishing policy to use.
        producers: Opens the connection to use.
        queue: The name of the queue.
        body: The encoded body.
        headers: The message's headers.
        fields: Further arguments of ``Producer.publish``.
        delay: Seconds until the message's ETA. If the broker supports delays, it keeps the message until then.

    Raises:
        Unpublishable: The message is invalid: no later attempt could publish it.
        Exception: The broker did not accept the message. kombu's transports raise errors of their own libraries.
    """
    policy = app.conf.task_publish_retry_policy or {}
    message = {**fields, "body": body, "exchange": "", "routing_key": queue}

    def send() -> None:
        expiration = _expiration(headers.get("expires"))
        with producers() as producer:
            # A copy, because kombu adds headers.
            arguments = {**message, "headers": dict(headers), "expiration": expiration}
            if not confirms(producer.connection):
                producer.publish(**arguments, retry=True, retry_policy=policy)
            elif not _sent_delayed(app, producer, policy, arguments, delay_route(app, queue, delay)):
                _ensure_sent(app, producer, policy, arguments)

    try:
        try:
            send()
        except Exception as error:
            if not _is_message_error(error):
                raise
            # A broken connection can raise the same types. If a new connection raises one too, the message is at fault.
            send()
    except Exception as error:
        if _is_message_error(error):
            raise Unpublishable(f"the message cannot be republished: {type(error).__name__}") from error
        raise


def refused_right(connection: Any) -> str:
    """Return RabbitMQ's error text if the user may not write to the default exchange; "" if the user may.

    It sends a message for a queue that does not exist. RabbitMQ checks the right first, and then returns the message.

    Args:
        connection: A connection to a broker that confirms.

    Raises:
        Exception: The broker did not answer, or answered something else.
    """
    try:
        if not _send_confirmed(connection, _probe()):
            raise TimeoutError("the broker does not answer")
    except connection.channel_errors as error:
        code = getattr(error, "reply_code", None)
        if code == _ACCESS_REFUSED:
            return str(error)
        if code != _NO_ROUTE:
            raise
    return ""


def _probe() -> dict[str, str]:
    """Return a message for a queue that does not exist. It has a body, because an alarm lets empty messages pass."""
    return {"body": "probe", "exchange": "", "routing_key": f"celery-dlock-probe-{uuid.uuid4().hex}"}


def _answers(connection: Any) -> bool:
    """Return whether the broker answers a message: confirms, returns or refuses it."""
    try:
        return _send_confirmed(connection, _probe())
    except connection.channel_errors:
        return True


def _is_message_error(error: Exception) -> bool:
    # A refused certificate is both an OSError and a ValueError, and no fault of the message.
    if isinstance(error, OSError):
        return False
    return isinstance(error, _MESSAGE_ERRORS) or getattr(error, "reply_code", None) in _MESSAGE_ERROR_CODES


def _sent_delayed(
    app: Celery, producer: Any, policy: Mapping[str, Any], message: Mapping[str, Any], route: DelayRoute | None
) -> bool:
    """Publish a message that the broker delays. Return False, without publishing, if the broker cannot delay it."""
    if route is None:
        return False
    delayed = {**message, "exchange": route.exchange, "routing_key": route.routing_key}
    try:
        # Bind each time: a queue that was deleted and declared again has lost its bindings, and messages would be lost.
        _ensure_sent(app, producer, policy, delayed, (message["routing_key"], DELIVERY_EXCHANGE, route.binding))
    except producer.connection.channel_errors as error:
        if getattr(error, "reply_code", None) not in _CANNOT_DELAY:
            raise
        logger.warning("RabbitMQ cannot delay a message, so it waits for its ETA in a worker: %s", error)
        return False
    return True


def _ensure_sent(
    app: Celery,
    producer: Any,
    policy: Mapping[str, Any],
    message: Mapping[str, Any],
    binding: tuple[str, str, str] | None = None,
) -> None:
    """Publish a message, or raise an error.

    While an alarm of RabbitMQ lasts, it does not read what a connection publishes. It publishes that when the alarm is
    over, although the connection is closed by then. So the next message waits until the broker has answered a message
    for a queue that does not exist. Otherwise each attempt would add a copy.
    """
    connection = producer.connection
    send = connection.ensure(producer, _send_confirmed, **policy)
    answers = not vars(app).pop(_UNANSWERED, False) or _answers(connection)
    if not answers or not send(connection, message, binding):
        vars(app)[_UNANSWERED] = True
        raise TimeoutError(f"the broker did not confirm the message within {CONFIRM_TIMEOUT:g} s, and may have it")


def _send_confirmed(connection: Any, message: Mapping[str, Any], binding: tuple[str, str, str] | None = None) -> bool:
    """Publish, and wait for the broker's confirmation. Return False if it did not come in time.

    Such a message is not published again at once, because each attempt would wait as long. After a broken connection,
    it is.

    Args:
        connection: The connection to use.
        message: The arguments of ``Producer.publish``.
        binding: The queue, exchange and routing key to bind before.
    """
    amqp = connection.ensure_connection(max_retries=1, interval_start=0, reraise_as_library_errors=False).connection
    sending = False
    try:
        with amqp.transport.having_timeout(CONFIRM_TIMEOUT):
            # Take the channel out of the connection: after an error it must not be used again.
            channel = vars(connection).pop(_CHANNEL, None)
            if channel is None or channel.connection is not amqp or not channel.is_open:
                channel = amqp.channel()
                channel.basic_publish = channel.basic_publish_confirm
            if binding is not None:
                channel.queue_bind(*binding)
            sending = True
            Producer(channel, auto_declare=False).publish(**message, mandatory=True, confirm_timeout=CONFIRM_TIMEOUT)
    except TimeoutError:
        # Do not close the connection regularly: that would wait for the broker too.
        connection.collect()
        if not sending:
            raise
        return False
    vars(connection)[_CHANNEL] = channel
    return True


def _expiration(expires: Any) -> float | None:
    """Return the seconds after which the broker may drop the message, at least 0.001; None for no limit."""
    left = seconds_until(expires)
    return None if left is None or left > _MAX_EXPIRATION else max(0.001, left)
