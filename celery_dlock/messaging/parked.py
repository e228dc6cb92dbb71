"""A parked message: as text in the store, and back."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded
from kombu.serialization import loads, prepare_accept_content
from kombu.utils import json

from ..errors import DLockError
from .message import RawMessage, checked
from .message_times import seconds_until

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["ParkedMessage"]

#: What of the properties is published again.
_PROPERTIES = ("correlation_id", "reply_to", "priority", "delivery_mode")
#: The largest of its numbers, so that AMQP and the store's scripts have a form for it.
_MOST = 2**53


class ParkedMessage(NamedTuple):
    """One message, and what it takes to publish it in its turn.

    Args:
        task: The task's name.
        task_id: Its id.
        broker: The broker that it came from, without its password.
        rank_us: Its place among messages.
        tries: How often it was published again before.
        raw: The message as it was received.
        redelivered: The broker flagged it, as a :class:`~celery_dlock.messaging.message.Delivery` has it.
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
        tries: int,
        redelivered: bool = False,  # noqa: FBT001, FBT002  # as the fields are
    ) -> ParkedMessage:
        """A delivery to be parked.

        Raises:
            DLockError: It could not be published again.
        """
        raw = checked(given)
        return cls(raw.headers["task"], raw.headers["id"], broker, rank_us, tries, raw, redelivered)

    def text(self) -> str:
        """For the store. The first line says whose message it is, and no more.

        Raises:
            DLockError: A part of it is of a type that no worker could read again, or that JSON has no form for.
        """
        raw, body = self.raw, self.raw.body
        binary = not isinstance(body, str)
        try:
            shown = base64.b64encode(body).decode() if binary else body
            self._check(shown)
        except (TypeError, ValueError) as error:
            raise DLockError(f"it cannot be parked: {error}") from error
        facts = {
            "body": shown,
            "binary": binary,
            "type": raw.content_type,
            "encoding": raw.content_encoding,
            "headers": raw.headers,
            "properties": {name: raw.properties[name] for name in _PROPERTIES if name in raw.properties},
            "queue": raw.queue,
            "broker": self.broker,
            "rank": self.rank_us,
            "tries": self.conflict_retries,
            "redelivered": self.redelivered,
        }
        try:
            # One escaped line: neither a name nor a header can end it.
            return f"{json.dumps([self.task, self.task_id])}\n{json.dumps(facts)}"
        except (TypeError, ValueError) as error:
            raise DLockError(f"its headers cannot be written as JSON, so it cannot be parked: {error}") from error

    @classmethod
    def read(cls, text: str) -> ParkedMessage:
        """Reads :meth:`text`.

        Raises:
            ValueError: It is something else.
        """
        try:
            who, _, rest = text.partition("\n")
            (task, task_id), facts = json.loads(who), json.loads(rest)
            body = base64.b64decode(facts["body"], validate=True) if facts["binary"] else facts["body"]
            message = (facts["type"], facts["encoding"], facts["headers"], facts["properties"], facts["queue"])
            raw, redelivered = checked((body, *message)), facts.get("redelivered", False) is True
            parcel = cls(task, task_id, facts["broker"], facts["rank"], facts["tries"], raw, redelivered)
            parcel._check(facts["body"])
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # a decoder of kombu's JSON may raise anything
            raise ValueError(f"not a parked message: {error}") from error
        return parcel

    def _check(self, body: Any) -> None:
        """What is of another type would be published all the same, and end every worker that receives it."""
        raw, properties = self.raw, self.raw.properties
        texts = (self.task, self.task_id, self.broker, raw.content_type, raw.queue, body)
        numbers = (self.rank_us, self.conflict_retries)
        maybe_texts = (raw.content_encoding, properties.get("correlation_id"), properties.get("reply_to"))
        maybe_numbers = (properties.get("priority"), properties.get("delivery_mode"))
        seconds_until(raw.headers.get("expires"))
        if (
            (raw.headers["task"], raw.headers["id"]) != (self.task, self.task_id)
            or not all(isinstance(text, str) for text in texts)
            or not all(isinstance(text, str | None) for text in maybe_texts)
            or not raw.queue
            or not all(type(number) is int and abs(number) <= _MOST for number in numbers)
            or not all(isinstance(number, int | None) for number in maybe_numbers)
        ):
            raise ValueError("a part of it is missing or of another type")

    @property
    def expired(self) -> bool:
        left = seconds_until(self.raw.headers.get("expires"))
        return left is not None and left <= 0

    def embedded(self, app: Celery) -> dict[str, Any]:
        """What stands beside the arguments: callbacks, errbacks, chain and chord; nothing if it cannot be read."""
        raw = self.raw
        accept = prepare_accept_content(app.conf.accept_content)
        try:
            _, _, embedded = loads(raw.body, raw.content_type, raw.content_encoding, accept=accept)
        except Exception:  # noqa: BLE001  # a serialiser may raise anything
            return {}
        return dict(embedded) if isinstance(embedded, dict) else {}
