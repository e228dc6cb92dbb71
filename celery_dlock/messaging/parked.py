"""A parked message, and its text form in the store."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.task import Context
from kombu.serialization import loads, prepare_accept_content
from kombu.utils import json

from ..errors import DLockError
from .message import RawMessage, checked
from .message_times import seconds_until
from .wire import FIELD, WIRE_VERSION, NewerWireVersion, reject_newer

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["ParkedMessage"]

#: The properties that are published again.
_PROPERTIES = ("correlation_id", "reply_to", "priority", "delivery_mode")
#: The largest allowed number in the text. AMQP and Lua, the language of the store's scripts, represent it exactly.
_MAX_NUMBER = 2**53


class ParkedMessage(NamedTuple):
    """One message, and what a worker needs to publish it once it is granted.

    Args:
        task: The task's name.
        task_id: The task's id.
        broker: The identity of the broker that the message came from: ``dlock_broker``, or the URL without user and
            password.
        rank_us: The message's rank in the queue.
        conflict_retries: How often the message was republished because of a conflict.
        raw: The message as it was received.
        redelivered: See :class:`~celery_dlock.messaging.message.Delivery`.
    """

    task: str
    task_id: str
    broker: str
    rank_us: int
    conflict_retries: int
    raw: RawMessage
    redelivered: bool = False

    @classmethod
    def of(
        cls,
        given: tuple[Any, ...],
        broker: str,
        rank_us: int,
        conflict_retries: int,
        redelivered: bool = False,  # noqa: FBT001, FBT002  # positional, like the fields
    ) -> ParkedMessage:
        """Return the parked message of a delivery.

        Raises:
            DLockError: The message could not be published again.
        """
        raw = checked(given)
        return cls(raw.headers["task"], raw.headers["id"], broker, rank_us, conflict_retries, raw, redelivered)

    def text(self) -> str:
        """Return the text for the store. Its first line holds the task's name and id only.

        Raises:
            DLockError: A part of the message has a type that no worker could read again, or that JSON cannot write.
        """
        raw, body = self.raw, self.raw.body
        binary = not isinstance(body, str)
        try:
            written = base64.b64encode(body).decode() if binary else body
            self._check(written)
        except (TypeError, ValueError) as error:
            raise DLockError(f"the message cannot be parked: {error}") from error
        facts = {
            FIELD: WIRE_VERSION,
            "body": written,
            "binary": binary,
            "type": raw.content_type,
            "encoding": raw.content_encoding,
            "headers": raw.headers,
            "properties": {name: raw.properties[name] for name in _PROPERTIES if name in raw.properties},
            "queue": raw.queue,
            "broker": self.broker,
            "rank": self.rank_us,
            "conflict_retries": self.conflict_retries,
            "redelivered": self.redelivered,
        }
        try:
            # JSON escapes line breaks, so neither a name nor a header can end its line.
            return f"{json.dumps([self.task, self.task_id])}\n{json.dumps(facts)}"
        except (TypeError, ValueError) as error:
            raise DLockError(f"the message cannot be parked: its headers cannot be written as JSON: {error}") from error

    @staticmethod
    def call_in(text: str) -> str:
        """Return task and id of a :meth:`text`, as logs show them; "" if it is malformed. The message is not read."""
        try:
            task, task_id = json.loads(text.partition("\n")[0])
        except (TypeError, ValueError):
            return ""
        return f"{task}[{task_id}]"

    @classmethod
    def read(cls, text: str) -> ParkedMessage:
        """Read a parked message from its :meth:`text`.

        Raises:
            NewerWireVersion: A worker of a newer wire version parked the message. This is a ``ValueError``, too.
            ValueError: The text is malformed.
        """
        try:
            first, _, rest = text.partition("\n")
            (task, task_id), facts = json.loads(first), json.loads(rest)
            reject_newer(facts.get(FIELD))
            body = base64.b64decode(facts["body"], validate=True) if facts["binary"] else facts["body"]
            fields = (facts["type"], facts["encoding"], facts["headers"], facts["properties"], facts["queue"])
            raw, redelivered = checked((body, *fields)), facts.get("redelivered", False) is True
            message = cls(task, task_id, facts["broker"], facts["rank"], facts["conflict_retries"], raw, redelivered)
            message._check(facts["body"])
        except (SoftTimeLimitExceeded, NewerWireVersion):
            raise
        except Exception as error:  # a decoder of kombu's JSON may raise any error
            raise ValueError(f"not a parked message: {error}") from error
        return message

    def _check(self, body: Any) -> None:
        """Check the types of all parts. A part of another type would end every worker that receives the message."""
        raw, properties = self.raw, self.raw.properties
        texts = (self.task, self.task_id, self.broker, raw.content_type, raw.queue, body)
        numbers = (self.rank_us, self.conflict_retries)
        optional_texts = (raw.content_encoding, properties.get("correlation_id"), properties.get("reply_to"))
        optional_numbers = (properties.get("priority"), properties.get("delivery_mode"))
        seconds_until(raw.headers.get("expires"))
        if (
            (raw.headers["task"], raw.headers["id"]) != (self.task, self.task_id)
            or not all(isinstance(text, str) for text in texts)
            or not all(isinstance(text, str | None) for text in optional_texts)
            or not raw.queue
            or not all(type(number) is int and abs(number) <= _MAX_NUMBER for number in numbers)
            or not all(isinstance(number, int | None) for number in optional_numbers)
        ):
            raise ValueError("a part is missing or has an unexpected type")

    @property
    def expired(self) -> bool:
        """Whether the message's expiry has passed."""
        left = seconds_until(self.raw.headers.get("expires"))
        return left is not None and left <= 0

    def request(self, app: Celery) -> Context:
        """Return the request that the task would have had, without its arguments, to store its end."""
        # Over rpc://, the result backend sends the end to `reply_to`.
        origin = {name: self.raw.properties.get(name) for name in ("reply_to", "correlation_id")}
        return Context({**self.raw.headers, **self.embedded(app), **origin})

    def embedded(self, app: Celery) -> dict[str, Any]:
        """Return the callbacks, errbacks, chain and chord in the body; empty if the body cannot be read."""
        raw = self.raw
        accept = prepare_accept_content(app.conf.accept_content)
        try:
            _, _, embedded = loads(raw.body, raw.content_type, raw.content_encoding, accept=accept)
        except Exception:  # noqa: BLE001  # a serialiser may raise anything
            return {}
        return dict(embedded) if isinstance(embedded, dict) else {}
