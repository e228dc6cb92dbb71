"""A message as it was received: passed to the pool child, and republished with a new ETA."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

from ..errors import DLockError
from ..options.derived import SKEW
from ..store.model import Identity
from ..utils.clock import Clock, monotonic_clock_id
from .message_checks import MAX_COUNT, is_count
from .message_times import SENT_HEADER
from .publishing import Producers, publish
from .routing import DELIVERY_COUNT
from .wire import FIELD, WIRE_VERSION, is_newer

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "HEADER",
    "PROPERTY",
    "Delivery",
    "FirstReceipt",
    "RawMessage",
    "RepublishHeader",
    "checked",
    "next_count",
    "publish_again",
    "publish_parked",
    "sent_us",
]

#: The key in the request's ``properties`` under which the main process passes a delivery to the pool child. A
#: top-level key of the request would leak into the messages that the task publishes.
PROPERTY: Final = "dlock"
#: The header of a republished message, see `RepublishHeader`.
HEADER: Final = "dlock"

#: The largest time: Lua's numbers are exact up to it.
_MAX_US: Final = 2**53
#: The longest grant id and clock id.
_MAX_ID: Final = 100
#: Longest age of a message in seconds that a header can give it. Done marks do not live so long.
_MAX_AGE: Final = 30 * 24 * 3600.0


class RawMessage(NamedTuple):
    """A message as it was received.

    It holds the message's own objects, so pickling both costs hardly more than pickling one.
    """

    body: Any
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    queue: str | None


class FirstReceipt(NamedTuple):
    """The time when a worker first received a message, or its ETA if that is later, by the clocks of that worker.

    A republished message carries this time until the store has reported its rank.

    Args:
        wall_us: The wall clock, in microseconds since the epoch.
        monotonic_us: The monotonic clock, in microseconds.
        clock_id: The id of that monotonic clock; "" if the system did not tell it.
    """

    wall_us: int
    monotonic_us: int
    clock_id: str

    @classmethod
    def of(cls, delivery: Delivery, clock: Clock) -> FirstReceipt:
        """Return the time that the delivery carries. Without one, this delivery is the first receipt."""
        if delivery.first_receipt is not None:
            return cls(*delivery.first_receipt)
        age = max(0.0, clock.monotonic() - delivery.since)
        return cls(round((clock.wall() - age) * 1e6), round(delivery.since * 1e6), monotonic_clock_id())

    def age(self, clock: Clock) -> tuple[float, float]:
        """Return the seconds since then, and by how many seconds the true age may be larger.

        On another machine, wall clocks measure the age, and these may differ by ``SKEW``.
        """
        if self.clock_id and self.clock_id == monotonic_clock_id():
            age, doubt = clock.monotonic() - self.monotonic_us / 1e6, 0.0
        else:
            age, doubt = clock.wall() - self.wall_us / 1e6, SKEW
        return min(age, _MAX_AGE), doubt


class Delivery(NamedTuple):
    """One delivery of one message.

    Args:
        owner: A random id, made for this delivery.
        delivered: When the worker received it, on the monotonic clock.
        since: The later of receipt and ETA, on the monotonic clock.
        monitored: The worker sends events.
        raw: The message, as the fields of :class:`RawMessage`.
        rank_us: The rank that a republished message carries; else None.
        conflict_retries: How often the message was republished because of a conflict.
        grant_id: If the call was parked, the grant for which this message was published.
        store_retries: How often the message was republished since then for another reason: the store did not answer,
            or a duplicate delivery was running.
        redelivered: The broker had flagged the republished message as redelivered. If the message is done by now, this
            delivery must not run.
        first_receipt: When the message was first received, if it was republished without a rank; else None.
        newer_wire: The wire version of the worker that republished the message, if that is newer than this worker's;
            else 0. The other fields of its header are then not read.
        number: If the call may be parked, its number in :class:`~celery_dlock.messaging.receive_order.ReceiveOrder`.
        predecessor: The number of the message of the same lock name that this worker passed to the pool before; 0:
            none.
    """

    owner: str
    delivered: float
    since: float
    monitored: bool
    raw: tuple[Any, ...]
    rank_us: int | None = None
    conflict_retries: int = 0
    grant_id: str = ""
    store_retries: int = 0
    redelivered: bool = False
    first_receipt: tuple[int, int, str] | None = None
    newer_wire: int = 0
    number: int = 0
    predecessor: int = 0

    @property
    def is_copy(self) -> bool:
        """Whether this library republished the message, so that it is not the one that its publisher sent."""
        return self.conflict_retries + self.store_retries > 0


class RepublishHeader(NamedTuple):
    """The header of a republished message. Its fields are those of a `Delivery`, in the same order."""

    rank_us: int | None = None
    conflict_retries: int = 0
    grant_id: str = ""
    store_retries: int = 0
    redelivered: bool = False
    first_receipt: FirstReceipt | None = None
    newer_wire: int = 0

    @classmethod
    def of(cls, header: Any, identity: Identity) -> RepublishHeader:
        """Read the header of a message; empty if it is malformed or belongs to another identity.

        Celery copies headers into a task's own retries, which have another identity.
        """
        if not isinstance(header, Mapping) or header.get("identity") != identity.digest:
            return cls()
        if is_newer(version := header.get(FIELD)):
            return cls(newer_wire=version)
        rank, grant = header.get("rank"), header.get("grant", "")
        conflict_retries, store_retries = header.get("conflict_retries"), header.get("store_retries", 0)
        redelivered, received = header.get("redelivered", False), header.get("received")
        if not _is_rank(rank) or not is_count(conflict_retries) or not is_count(store_retries):
            return cls()
        if not _is_id(grant) or not isinstance(redelivered, bool) or not _is_receipt(received):
            return cls()
        first_receipt = None if received is None else FirstReceipt(*received)
        return cls(rank, conflict_retries, grant, store_retries, redelivered, first_receipt)

    def fields(self, identity: str) -> dict[str, Any]:
        """Return the header to send with a message of this identity (its digest)."""
        header = {
            FIELD: WIRE_VERSION,
            "identity": identity,
            "rank": self.rank_us,
            "conflict_retries": self.conflict_retries,
            "store_retries": self.store_retries,
            "redelivered": self.redelivered,
        }
        if self.rank_us is None and self.first_receipt is not None:
            header["received"] = list(self.first_receipt)
        if self.grant_id:
            header["grant"] = self.grant_id
        return header


def next_count(count: int) -> int:
    """Return the count of the next republication. It stays at the largest count that a header may carry.

    With a larger count, the whole header would be ignored, and the message could not use its grant.
    """
    return min(count + 1, MAX_COUNT)


def _is_rank(rank: object) -> TypeGuard[int | None]:
    return rank is None or _is_time(rank)


def _is_time(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_US


def _is_id(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and len(text) <= _MAX_ID and text.isascii()


def _is_receipt(value: object) -> TypeGuard[tuple[int, int, str] | None]:
    if not isinstance(value, list | tuple) or len(value) != len(FirstReceipt._fields):
        return value is None
    return _is_time(value[0]) and _is_time(value[1]) and _is_id(value[2])


def sent_us(headers: Mapping[str, Any]) -> int:
    """Return when the message was published (:data:`SENT_HEADER`); 0 if it carries no valid time."""
    sent = headers.get(SENT_HEADER)
    return sent if _is_time(sent) else 0


def publish_again(
    app: Celery,
    delivery: Delivery,
    identity: Identity,
    *,
    rank_us: int | None,
    first_receipt: FirstReceipt,
    delay: float,
    conflict: bool,
    redelivered: bool,
    expires: bool,
) -> None:
    """Publish the raw message, to be run in ``delay`` s at the earliest.

    Celery's own retry would decode and encode the message again. That changes its serialiser, its compression, its
    masked argument reprs and its count of retries.

    A message of a newer wire version keeps the header that it has.

    Args:
        app: The app whose broker to use.
        delivery: The delivery to republish.
        identity: The identity of its message.
        delay: Seconds from now to the ETA.
        rank_us: The rank that the message keeps; None: the store has not reported one.
        first_receipt: When the message was first received. It is carried in place of a rank.
        conflict: The reason is a held lock, so this counts as a conflict retry.
        redelivered: This is a duplicate delivery: if the message is done by then, it must not run.
        expires: Keep the message's expiry. A duplicate of a running message has none: it must not end that run as
            REVOKED.

    Raises:
        DLockError: The message is of Celery's old protocol 1, which cannot carry an ETA beside its body. Or its queue
            is unknown. Or no later attempt could publish it.
    """
    raw = checked(delivery.raw)
    headers = dict(raw.headers)
    eta = datetime.now(timezone.utc) + timedelta(seconds=delay)
    headers["eta"] = eta.isoformat()
    if not delivery.newer_wire:
        conflicts, others = delivery.conflict_retries, delivery.store_retries
        # The grant may still be valid. Without its id, the republished message would have to wait for its timeout.
        carried = RepublishHeader(rank_us, conflicts, delivery.grant_id, next_count(others), redelivered, first_receipt)
        if conflict:
            carried = carried._replace(conflict_retries=next_count(conflicts), store_retries=0)
        headers[HEADER] = carried.fields(identity.digest)
    if not expires:
        headers["expires"] = None
    _publish(app, app.producer_or_acquire, raw, headers, delay)


def publish_parked(app: Celery, producers: Producers, raw: RawMessage, identity: str, carried: RepublishHeader) -> None:
    """Publish a parked message as it was received, with its rank and its grant.

    Args:
        app: The app whose publishing policy to use.
        producers: Opens the connection to use.
        raw: The message.
        identity: The digest of its identity.
        carried: The header to add.

    Raises:
        Unpublishable: No later attempt could publish it.
    """
    _publish(app, producers, raw, {**raw.headers, HEADER: carried.fields(identity)})


def checked(given: tuple[Any, ...]) -> RawMessage:
    """Return the raw message of a delivery, after a check that it can be republished.

    Raises:
        DLockError: It cannot be republished: it is of task protocol 1, or its queue is unknown.
    """
    raw = RawMessage(*given)
    if "task" not in raw.headers:
        raise DLockError("a message of protocol 1 cannot be published again; set task_protocol = 2 in its publisher")
    if raw.queue is None:
        raise DLockError("the queue of this message is unknown, so it cannot be published again")
    return raw


def _publish(app: Celery, producers: Producers, raw: RawMessage, headers: dict[str, Any], delay: float = 0.0) -> None:
    properties = raw.properties
    headers.pop(DELIVERY_COUNT, None)  # RabbitMQ's count of the message that this one replaces
    fields = {
        "content_type": raw.content_type,
        "content_encoding": raw.content_encoding,
        # The body was decompressed at its receipt, but its header still names the compression.
        "compression": headers.pop("compression", None),
        "correlation_id": properties.get("correlation_id"),
        "reply_to": properties.get("reply_to"),
        "priority": properties.get("priority"),
        "delivery_mode": properties.get("delivery_mode"),
    }
    publish(app, producers, raw.queue or "", raw.body, headers, fields, delay)
