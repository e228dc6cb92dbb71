"""A message as it was received, handed to the pool child, and published again unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

from ..errors import DLockError
from ..store.model import Identity
from .publishing import Producers, confirms, publish
from .validation import MAX_COUNT, is_count

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "HEADER",
    "PROPERTY",
    "Delivery",
    "RawMessage",
    "RepublishHeader",
    "checked",
    "next_count",
    "publish_again",
    "publish_parked",
]

#: In the request's ``properties``: what the main process tells the child of this delivery. Top-level keys of a
#: request would leak into the messages that it publishes.
PROPERTY: Final = "dlock"
#: In a copy's headers: what it carries of the message it copies.
HEADER: Final = "dlock"

#: The largest rank: Lua's numbers are exact up to it.
_LATEST_US: Final = 2**53
_LONGEST_TURN: Final = 100


class RawMessage(NamedTuple):
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
        raw: The message, as the fields of :class:`RawMessage`.
        rank_us: Carried by a copy of ours, else None.
        conflict_retries: How often the message was published again because of a conflict.
        turn: Under the queue policy, for which this copy was published.
        comebacks: How often since then, for another reason: the store did not answer, its twin was running.
        doubted: One of the messages that it copies was delivered more than once, so another copy may live.
        redelivered: The message that it copies was flagged by the broker: what had an end by then was that one.
        number: Under the queue policy, by which :class:`~celery_dlock.messaging.receive_order.ReceiveOrder` knows it.
        elder: The number of the message of the same lock name that this worker handed over before; 0: none.
    """

    owner: str
    delivered: float
    since: float
    monitored: bool
    raw: tuple[Any, ...]
    rank_us: int | None = None
    conflict_retries: int = 0
    turn: str = ""
    store_retries: int = 0
    maybe_duplicated: bool = False
    redelivered: bool = False
    number: int = 0
    predecessor: int = 0

    @property
    def is_copy(self) -> bool:
        """We published it, and it is not the message that its publisher sent."""
        return self.conflict_retries > 0 or self.store_retries > 0


class RepublishHeader(NamedTuple):
    """What a copy of ours says of the message it copies; in this order, its fields are fields of a `Delivery`."""

    rank_us: int | None = None
    tries: int = 0
    turn: str = ""
    comebacks: int = 0
    doubted: bool = False
    redelivered: bool = False

    @classmethod
    def of(cls, header: Any, identity: Identity) -> RepublishHeader:
        """Reads the header. It speaks of one identity only: Celery copies headers into a task's own retries."""
        if not isinstance(header, Mapping) or header.get("of") != identity.digest:
            return cls()
        rank, tries, turn = header.get("rank"), header.get("tries"), header.get("turn", "")
        comebacks, doubted = header.get("comebacks", 0), header.get("doubted", False)
        redelivered = header.get("redelivered", False)
        if not _is_rank(rank) or not is_count(tries) or not is_count(comebacks):
            return cls()
        if not _is_turn(turn) or not isinstance(doubted, bool) or not isinstance(redelivered, bool):
            return cls()
        return cls(rank, tries, turn, comebacks, doubted, redelivered)


def next_count(count: int) -> int:
    """Return the count of the next copy. It stays at the largest one that a header may carry.

    A copy with a larger one would lose its whole header, and could not take the turn for which it was published.
    """
    return min(count + 1, MAX_COUNT)


def _is_rank(rank: object) -> TypeGuard[int | None]:
    return rank is None or (type(rank) is int and 0 <= rank <= _LATEST_US)


def _is_turn(turn: object) -> TypeGuard[str]:
    return isinstance(turn, str) and len(turn) <= _LONGEST_TURN and turn.isascii()


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
            cannot be told from which queue it came, or no later attempt could publish it.
    """
    raw = checked(delivery.raw)
    headers = dict(raw.headers)
    eta = datetime.now(timezone.utc) + timedelta(seconds=delay)
    headers["eta"] = eta.isoformat()
    headers[HEADER] = {
        "of": identity.digest,
        "rank": rank_us,
        "tries": next_count(delivery.conflict_retries) if conflict else delivery.conflict_retries,
        "comebacks": 0 if conflict else next_count(delivery.store_retries),
        # If a confirmation is lost, the message is published twice.
        "doubted": doubted or confirms(app.producer_pool.connections.connection),
        "redelivered": redelivered,
    }
    if delivery.turn:
        # The store did not let it take its turn, and that may stand still: another copy would have to wait for its end.
        headers[HEADER]["turn"] = delivery.turn
    if not expires:
        headers["expires"] = None
    _publish(app, app.producer_or_acquire, raw, headers, delay)


def publish_parked(app: Celery, producers: Producers, raw: RawMessage, identity: str, carried: RepublishHeader) -> None:
    """Publish a message that was parked, as it was received; it keeps its place among messages.

    Args:
        app: Whose publishing policy to use.
        producers: Opens the connection to use.
        raw: The message.
        identity: Which message it is: the digest of its identity.
        carried: What the copy says of it.

    Raises:
        Unpublishable: No later attempt could publish it.
    """
    header = {
        "of": identity,
        "rank": carried.rank_us,
        "tries": carried.tries,
        "turn": carried.turn,
        "redelivered": carried.redelivered,
    }
    _publish(app, producers, raw, {**raw.headers, HEADER: header})


def checked(given: tuple[Any, ...]) -> RawMessage:
    """The raw message of a delivery.

    Raises:
        DLockError: It could not be published again.
    """
    raw = RawMessage(*given)
    if "task" not in raw.headers:
        raise DLockError("a message of protocol 1 cannot be published again; set task_protocol = 2 in its publisher")
    if raw.queue is None:
        raise DLockError("it cannot be told from which queue this message came, so it cannot be published again")
    return raw


def _publish(app: Celery, producers: Producers, raw: RawMessage, headers: dict[str, Any], delay: float = 0.0) -> None:
    properties = raw.properties
    fields = {
        "content_type": raw.content_type,
        "content_encoding": raw.content_encoding,
        # The body was decompressed on receipt, while its header still names the compression.
        "compression": headers.pop("compression", None),
        "correlation_id": properties.get("correlation_id"),
        "reply_to": properties.get("reply_to"),
        "priority": properties.get("priority"),
        "delivery_mode": properties.get("delivery_mode"),
    }
    publish(app, producers, raw.queue or "", raw.body, headers, fields, delay)
