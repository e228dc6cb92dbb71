"""A message as it was received, handed to the pool child, and published again unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .errors import DLockError
from .records import Identity

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "HEADER",
    "PROPERTY",
    "Carried",
    "Delivery",
    "Raw",
    "checked",
    "publish_again",
    "publish_parked",
    "seconds_left",
]

#: In the request's ``properties``: what the main process tells the child of this delivery. Top-level keys of a
#: request would leak into the messages that it publishes.
PROPERTY: Final = "dlock"
#: In a copy's headers: what it carries of the message it copies.
HEADER: Final = "dlock"


class Raw(NamedTuple):
    """The message's own objects, so that pickling them beside the message costs next to nothing."""

    body: Any
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    queue: str | None


class Delivery(NamedTuple):
    """One delivery of one message.

    Args:
        owner: Made for this delivery.
        delivered: When it was received, on the monotonic clock.
        since: The later of receipt and ETA, on the monotonic clock.
        monitored: The worker sends events.
        rank_us: Carried by a copy of ours, else None.
        tries: How often the message was published again because of a conflict.
        raw: The message, as the fields of :class:`Raw`.
        turn: Under the queue policy, for which this copy was published.
        comebacks: How often since then, for another reason: the store did not answer, its twin was running.
        doubted: One of the messages that it copies was delivered more than once, so another copy may live.
        redelivered: The message that it copies was flagged by the broker: what had an end by then was that one.
        number: Under the queue policy, by which :class:`~celery_dlock.arrivals.Arrivals` knows it.
        elder: The number of the message of the same lock name that this worker handed over before; 0: none.
    """

    owner: str
    delivered: float
    since: float
    monitored: bool
    rank_us: int | None
    tries: int
    raw: tuple[Any, ...]
    turn: str = ""
    comebacks: int = 0
    doubted: bool = False
    redelivered: bool = False
    number: int = 0
    elder: int = 0

    @property
    def is_copy(self) -> bool:
        """We published it, and it is not the message that its publisher sent."""
        return self.tries > 0 or self.comebacks > 0


class Carried(NamedTuple):
    """What a copy of ours says of the message it copies."""

    rank_us: int | None = None
    tries: int = 0
    turn: str = ""
    comebacks: int = 0
    doubted: bool = False
    redelivered: bool = False

    @classmethod
    def of(cls, header: Any, identity: Identity) -> Carried:
        """Reads the header. It speaks of one identity only: Celery copies headers into a task's own retries."""
        if not isinstance(header, Mapping) or header.get("of") != identity.digest:
            return cls()
        rank, tries, turn = header.get("rank"), header.get("tries"), header.get("turn", "")
        comebacks, doubted = header.get("comebacks", 0), header.get("doubted", False)
        redelivered = header.get("redelivered", False)
        if not isinstance(rank, int | None) or not isinstance(tries, int) or not isinstance(turn, str):
            return cls()
        if not isinstance(comebacks, int) or not isinstance(doubted, bool) or not isinstance(redelivered, bool):
            return cls()
        return cls(rank, max(0, tries), turn, max(0, comebacks), doubted, redelivered)


def publish_again(
    app: Celery,
    delivery: Delivery,
    identity: Identity,
    *,
    rank_us: int | None,
    delay: float,
    conflict: bool,
    doubted: bool,
    redelivered: bool,
    expires: bool,
) -> None:
    """Publish the raw message, to be run in ``delay`` s at the earliest.

    Celery's own retry would decode and encode it anew, and change its serialiser, its compression, its masked
    argument reprs and its count of retries.

    Args:
        app: Whose broker to use.
        delivery: The delivery to copy.
        identity: Which message it is.
        delay: Seconds from now to the copy's ETA.
        rank_us: The place that the copy takes among messages; None: that of its own arrival.
        conflict: It comes back because its lock was held, and counts as a try.
        doubted: Another copy of it may live.
        redelivered: It is itself a copy: if the message has an end by then, it is not to run.
        expires: Keep the message's expiry. A copy of a running message has none: it may not end that one REVOKED.

    Raises:
        DLockError: The message is of Celery's old protocol 1, which cannot carry an ETA beside its body, or it
            cannot be told from which queue it came.
    """
    raw = checked(delivery.raw)
    headers = dict(raw.headers)
    eta = datetime.now(timezone.utc) + timedelta(seconds=delay)
    headers["eta"] = eta.isoformat()
    headers[HEADER] = {
        "of": identity.digest,
        "rank": rank_us,
        "tries": delivery.tries + conflict,
        "comebacks": 0 if conflict else delivery.comebacks + 1,
        "doubted": doubted,
        "redelivered": redelivered,
    }
    if delivery.turn:
        # The store did not let it take its turn, and that may stand still: another copy would have to wait for its end.
        headers[HEADER]["turn"] = delivery.turn
    if not expires:
        headers["expires"] = None
    with app.producer_or_acquire() as producer:
        _publish(app, producer, raw, headers)


def publish_parked(app: Celery, producer: Any, raw: Raw, identity: str, carried: Carried) -> None:
    """Publish a message that was parked, as it was received; it keeps its place among messages.

    Args:
        app: Whose publishing policy to use.
        producer: Whose connection to use.
        raw: The message.
        identity: Which message it is: the digest of its identity.
        carried: What the copy says of it.
    """
    header = {
        "of": identity,
        "rank": carried.rank_us,
        "tries": carried.tries,
        "turn": carried.turn,
        "redelivered": carried.redelivered,
    }
    _publish(app, producer, raw, {**raw.headers, HEADER: header})


def checked(given: tuple[Any, ...]) -> Raw:
    """The raw message of a delivery.

    Raises:
        DLockError: It could not be published again.
    """
    raw = Raw(*given)
    if "task" not in raw.headers:
        raise DLockError("a message of protocol 1 cannot be published again; set task_protocol = 2 in its publisher")
    if raw.queue is None:
        raise DLockError("it cannot be told from which queue this message came, so it cannot be published again")
    return raw


def _publish(app: Celery, producer: Any, raw: Raw, headers: dict[str, Any]) -> None:
    properties = raw.properties
    producer.publish(
        raw.body,
        content_type=raw.content_type,
        content_encoding=raw.content_encoding,
        # The body was decompressed on receipt, while its header still names the compression.
        compression=headers.pop("compression", None),
        headers=headers,
        exchange="",
        routing_key=raw.queue,
        correlation_id=properties.get("correlation_id"),
        reply_to=properties.get("reply_to"),
        priority=properties.get("priority"),
        delivery_mode=properties.get("delivery_mode"),
        expiration=seconds_left(headers.get("expires")),
        retry=True,
        retry_policy=app.conf.task_publish_retry_policy,
    )


def seconds_left(expires: Any) -> float | None:
    """Until the moment that a message's header names; None where it names none. Never less than a millisecond."""
    if not isinstance(expires, str):
        return None
    at = datetime.fromisoformat(expires.replace("Z", "+00:00"))
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return max(0.001, (at - datetime.now(timezone.utc)).total_seconds())
