"""Values of the store contract: requests, answers and facts about locks. They contain no decisions."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..keys.lock_name import LockName
from .holder_model import Holder

__all__ = [
    "CUT",
    "IN_PLACE",
    "NO_RETRY",
    "RETRY",
    "AcquireRequest",
    "Acquired",
    "Contended",
    "Debounce",
    "Duplicate",
    "Grant",
    "Held",
    "Identity",
    "Parked",
    "QueueRequest",
    "Queued",
    "Refusal",
    "Released",
    "Renewal",
    "RenewalResult",
    "Replace",
    "Requester",
    "StopRequest",
    "Tombstoned",
    "Transferred",
    "Unknown",
    "Used",
]

#: Characters of a task's name and id that the store keeps. An id of that length may be the beginning of a longer one.
CUT = 150
_CUT, _NODE_CUT = slice(CUT), slice(80)


class Identity(NamedTuple):
    """The identity of a message. A republished copy keeps it. A retry or a replacement has a new one.

    Args:
        task_id: The task id.
        retries: How often the task has retried itself (``self.retry()``).
        nesting: How often the task has replaced itself (``self.replace()``).
    """

    task_id: str
    retries: int = 0
    nesting: int = 0

    @classmethod
    def of(cls, task_id: str, facts: Mapping[str, Any]) -> Identity:
        """Return the identity of a message.

        Args:
            task_id: Its task id.
            facts: Its headers, or the options of its publication. A missing or empty number is 0.
        """
        return cls(task_id, facts.get("retries") or 0, facts.get("replaced_task_nesting") or 0)

    @property
    def digest(self) -> str:
        return _digest(self)

    @property
    def generation(self) -> int:
        """The position among the messages of one task id: a retry or a replacement has a higher one."""
        return self.nesting * 1_000_000 + self.retries  # self.replace() sets the number of retries to 0


@functools.lru_cache(maxsize=128)  # a run needs it twice: to acquire and to release
def _digest(identity: Identity) -> str:
    # Any text may be a task id, so a key contains only its hash.
    text = f"{identity.task_id}:{identity.retries}:{identity.nesting}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Requester(NamedTuple):
    """The requester, as stored in the lock, never with arguments: they may be secrets. Missing parts are empty."""

    task: str
    task_id: str
    node: str  # the node name of its worker
    pid: str

    @classmethod
    def of(cls, task: str | None, task_id: str | None, node: str, pid: int) -> Requester:
        """Return a requester with texts cut to fit a lease record. Publishers choose their lengths."""
        return cls((task or "")[_CUT], (task_id or "")[_CUT], node[_NODE_CUT], str(pid))

    @property
    def text(self) -> str:
        """The requester as JSON, for a run mark."""
        return json.dumps(self)


#: Milliseconds for which newer calls may stop one body after another (``on_conflict="replace"``). The body that runs
#: after this time is left alone, so that one body finishes even if newer calls never cease.
REPLACE_MAX_MS: Final = 3_600_000


class Debounce(NamedTuple):
    """The delays of a debounced call.

    Args:
        wait_ms: Milliseconds without a newer call after which the call is due.
        last_ms: Milliseconds from the first waiting call after which the newest one is due anyway.
    """

    wait_ms: int
    last_ms: int


#: What a call repeats, under ``on_conflict="replace"``: nothing; the same call (``self.retry``); another call, whose
#: place it took (``self.replace``).
NO_RETRY, RETRY, IN_PLACE = 0, 1, 2


class Replace(NamedTuple):
    """The part of a request that ``on_conflict="replace"`` adds.

    Args:
        max_ms: If no body has ended by itself for so many milliseconds, the running one is not stopped.
        repeats: :data:`NO_RETRY`, :data:`RETRY` or :data:`IN_PLACE`.
    """

    max_ms: int = REPLACE_MAX_MS
    repeats: int = NO_RETRY


class QueueRequest(NamedTuple):
    """The part of an acquire request that the queue policy adds.

    Args:
        entry: The message to park, as text. "": do not park, and return :class:`Queued` if the message has to wait.
        limit: The highest number of waiters of the lock; 0: no limit.
        evict_oldest: If the queue is full, evict the oldest waiter. If false, this message is not parked.
        after_us: The rank of the message that the worker received before this one. This message is ranked after it.
        grant_id: The id of the grant for which this copy was published; "" for any other copy.
        debounce: The delays of a debounced call; None for any other call.
        replace: What ``on_conflict="replace"`` adds; None under every other policy.
        sent_us: The time of publication in microseconds, by the publisher's clock; 0: the message does not carry it.
        park_duplicate: If the holder runs this message, park it before all waiters: if the holder dies, it runs.
    """

    entry: str = ""
    limit: int = 0
    evict_oldest: bool = False
    after_us: int = 0
    grant_id: str = ""
    debounce: Debounce | None = None
    replace: Replace | None = None
    sent_us: int = 0
    park_duplicate: bool = False


class Grant(NamedTuple):
    """A parked message that was granted the lock, or that was removed from the queue.

    Args:
        identity: The digest of the message's :class:`Identity`.
        entry: The message as it was parked (:class:`QueueRequest`).
        grant_id: The id of the grant; "" for a removed message. Only the copy published for the grant takes the lock.
    """

    identity: str
    entry: str
    grant_id: str = ""


class AcquireRequest(NamedTuple):
    """The request to take a lock.

    Args:
        requester: The caller, as shown to other callers.
        identity: The identity of the caller's message; None for a ``Lock`` outside any message.
        redelivered: The broker flagged this delivery, or the one that it copies. With a done mark, it must not run.
        republished: The library published this copy, so the original may still be delivered.
        age_us: Microseconds since the worker received the message, or since its ETA if that is later.
        rank_us: The rank that a republished copy keeps; None: the store computes it from its clock and ``age_us``.
        once: The task has ``once_per``: if the run mark says that an earlier run succeeded, refuse.
        tick: The tick whose run mark counts; "" for the run mark of the name.
        run_mark_ms: If the process dies, milliseconds that the run mark of this run is kept from the run's start.
        hold_if_unknown: Refuse if the outcome of an earlier run is unknown.
        notify: If the lock is held, the caller waits: the holder's release must wake a caller.
        waited: The caller has waited. Others may still wait, so its own release must wake one. Needs ``notify``.
        min_hold_ms: Milliseconds from the acquisition that the lock stays held at least, even if it is released.
        queue: The part that the queue policy adds; None under every other policy.
        doubt_us: Microseconds by which the true age of a ``republished`` copy may exceed ``age_us``, because the clocks
            of two machines measured it.
    """

    requester: Requester
    identity: Identity | None = None
    redelivered: bool = False
    republished: bool = False
    age_us: int = 0
    rank_us: int | None = None
    once: bool = False
    tick: str = ""
    run_mark_ms: int = 24 * 3600 * 1000
    hold_if_unknown: bool = False
    notify: bool = False
    waited: bool = False
    min_hold_ms: int = 0
    queue: QueueRequest | None = None
    doubt_us: int = 0


class Acquired(NamedTuple):
    """The acquisition holds the lock.

    Args:
        token: The fencing token, higher than every earlier one of the name.
        since: The time of the acquisition, in seconds since the epoch by the store's clock.
        rank_us: The rank of the caller's message.
        seed: Under ``once_per``: the text from which the idempotency key is made; otherwise "".
        after_crash: Under ``once_per``: the process of an earlier run died, and its outcome is unknown.
        seat: The seat that the acquisition holds, from 0 (``limit``); 0 for a name that is one lock.
    """

    token: int
    since: float
    rank_us: int
    seed: str = ""
    after_crash: bool = False
    seat: int = 0


class Transferred(NamedTuple):
    """The acquisition waited in line, and holds the lock.

    Args:
        acquired: The acquisition.
        left: Seconds from the moment at which the request was sent to the end of the lease. That is the time of the
            wait, and then at most the life of a lock that a release has transferred.
    """

    acquired: Acquired
    left: float


class Held(NamedTuple):
    """Another owner holds the lock, or the lock is reserved.

    Args:
        holder: The holder.
        same_message: The holder runs another delivery of the caller's message.
        rank_us: The rank of the caller's message; None if only a lock file was asked, which knows no ranks.
    """

    holder: Holder
    same_message: bool
    rank_us: int | None

    @property
    def awaited(self) -> Holder:
        """The holder whose release may give the lock to this call."""
        return self.holder


class Queued(NamedTuple):
    """The message has to wait (queue policy), but was not parked. The request has no entry, or the queue is full.

    Args:
        waiting: The number of waiters.
        rank_us: The rank of the caller's message.
        holder: The holder; None if only other waiters precede the message.
    """

    waiting: int
    rank_us: int
    holder: Holder | None

    @property
    def awaited(self) -> Holder | None:
        """The holder whose release may give the lock to this call; None if the release gives it to a waiter."""
        return None if self.waiting else self.holder


class Parked(NamedTuple):
    """The message is parked in the store.

    Args:
        rank_us: The rank of the message.
        position: The position among the waiters, from 1; 0 if the message was evicted itself, has a grant already, or
            runs already (``park_duplicate``).
        granted: The grant that this call made, because the lock was free. The caller must publish its message.
        evicted: The evicted waiter, which may be this message. The caller must store its result.
        newer: Under ``debounce`` and ``on_conflict="replace"``, the id of the call that evicted it.
    """

    rank_us: int
    position: int
    granted: Grant | None
    evicted: Grant | None
    newer: str = ""


class Used(NamedTuple):
    """An earlier run succeeded, so this one must not run (``once_per``).

    Args:
        by: The earlier run.
        same_message: The earlier run was a run of the same message.
        granted: The grant of the next waiter, if this message had a grant. The caller must publish its message.
        result_stored: The result of the earlier run is stored. False: its process may have died before that, after a
            transaction of the user had settled it.
    """

    by: Holder
    same_message: bool
    granted: Grant | None = None
    result_stored: bool = True


class Unknown(NamedTuple):
    """The outcome of an earlier run is unknown (``after_crash="hold"``). ``by``, ``granted``: as in :class:`Used`."""

    by: Holder
    granted: Grant | None = None


class Duplicate(NamedTuple):
    """The message has a done mark: an earlier delivery of it has finished. ``granted``: see :class:`Used`.

    A message whose rank, less its doubt, is later than its done mark is a new message with the same id, unless it is
    ``redelivered``.
    """

    granted: Grant | None = None


class Tombstoned(NamedTuple):
    """The acquisition has a tombstone: it was abandoned before its acquire arrived."""


class Contended(NamedTuple):
    """Several owners asked at the same moment, and none got the lock. The store has released what this call took.

    Args:
        pauses: Seconds to wait before each time that the request is sent again, with a new acquisition.
    """

    pauses: tuple[float, ...]


Refusal = Held | Used | Unknown | Duplicate | Tombstoned | Contended | Queued | Parked


class Renewal(NamedTuple):
    """One lease to renew.

    Args:
        name: The lock name.
        acquisition: The acquisition: owner and number.
        ttl_ms: Milliseconds from now that the lock is held at least. A later deadline is not moved.
        fields: Names and values of fields to set in the lock, if the acquisition still holds it.
        stoppable: Newer calls may ask the holder to stop (``on_conflict="replace"``).
    """

    name: LockName
    acquisition: str
    ttl_ms: int
    fields: tuple[tuple[str, str], ...] = ()
    stoppable: bool = False


class StopRequest(NamedTuple):
    """The lease is renewed, and a newer call asks its holder to stop (``on_conflict="replace"``).

    Args:
        by: The task id of the newer call.
    """

    by: str


#: The result of a renewal, as :meth:`~celery_dlock.store.base.LockStore.renew` describes it.
RenewalResult = bool | StopRequest | None


class Released(NamedTuple):
    """The result of a release.

    Args:
        ours: The acquisition held the lock until this release, or a reply was lost, so this is unknown.
        duplicate_seen: Another delivery of the message was seen, or the watchdog recorded that one may exist.
        granted: The waiter for which the lock is now reserved. The caller must publish its message.
        woke: The release woke a caller that waited in its thread or pool slot.
    """

    ours: bool
    duplicate_seen: bool
    granted: Grant | None = None
    woke: bool = False
