"""Frozen values that the rooms hand to each other; they hold facts and decide nothing."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal, NamedTuple

from ..keys.lock_name import LockName
from ..options.durability import PRIMARY, Durability

__all__ = [
    "CUT",
    "AcquireRequest",
    "Acquired",
    "Duplicate",
    "Grant",
    "Held",
    "Holder",
    "Identity",
    "LastRun",
    "NoMajority",
    "Parked",
    "Quarantine",
    "QueueRequest",
    "Queued",
    "Refusal",
    "Released",
    "Renewal",
    "Requester",
    "Tombstoned",
    "Unknown",
    "Used",
    "held_by",
    "owner_of",
    "shown_time",
]


#: Characters of a task's name and id that are kept: an id of so many may be a longer one's beginning.
CUT = 150


def shown_time(seconds: float) -> str:
    """Format a time of the store's clock for people: in UTC, with its zone, as in every log line, error and result."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


class Identity(NamedTuple):
    """Which message: kept by our own republishing, new after ``self.retry()`` and ``self.replace()``."""

    task_id: str
    retries: int = 0
    nesting: int = 0

    @property
    def digest(self) -> str:
        return _digest(self)

    @property
    def generation(self) -> int:
        """Its place among the messages of one task id: a retry or a replacement has a higher one."""
        return self.nesting * 1_000_000 + self.retries  # self.replace() counts the retries anew


@functools.lru_cache(maxsize=128)  # a run asks twice: to acquire and to release
def _digest(identity: Identity) -> str:
    # A task id may be any text that the user chose, so it never becomes part of a key as it is.
    text = f"{identity.task_id}:{identity.retries}:{identity.nesting}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Requester(NamedTuple):
    """Who asks, as the store keeps it; "" for what there is none of. It never holds arguments, which may be secrets."""

    task: str
    task_id: str
    node: str
    pid: str

    @classmethod
    def of(cls, task: str | None, task_id: str | None, node: str, pid: int) -> Requester:
        """Names and ids are cut, because whoever publishes chooses them, and a slot has to hold them."""
        return cls((task or "")[:CUT], (task_id or "")[:CUT], node[:80], str(pid))

    @property
    def text(self) -> str:
        """As JSON, for a mark."""
        return json.dumps(self)


class QueueRequest(NamedTuple):
    """What a message that has to wait brings along.

    Args:
        entry: The message as text, to be parked; "" only to ask.
        limit: Most waiters of the name; 0: any number.
        evict_oldest: Where the limit is reached, the oldest makes room.
        after_us: The rank of the message that the worker received before; its own is to be behind.
        grant_id: For which this copy was published; "" for any other.
    """

    entry: str = ""
    limit: int = 0
    evict_oldest: bool = False
    after_us: int = 0
    grant_id: str = ""


class Grant(NamedTuple):
    """A parked message: whose turn it is, or that was taken out of the queue (then without a turn)."""

    identity: str
    entry: str
    grant_id: str = ""


class AcquireRequest(NamedTuple):
    """What an owner says of itself when it asks for a lock.

    Args:
        requester: Who asks.
        identity: The message that asks; None for a ``Lock`` outside any message.
        redelivered: The broker flagged this delivery, or the one that it copies: it is not to run if there is an end.
        republished: We published this copy, so the original may live.
        age_us: Microseconds since the later of receipt and ETA, read on the worker's monotonic clock.
        rank_us: The rank carried by a copy of ours; None to make one from the server's time and ``age_us``.
        once: The name may be used up by an earlier success (``once_per``).
        tick: The success of that tick alone; "" of any.
        run_mark_ms: Milliseconds that the mark of a body that died lives on, counted from its start.
        hold_if_unknown: Where nobody knows what became of an earlier run, this one is refused.
        notify: Wants to be woken by the release.
        min_hold_ms: Milliseconds that the lock is kept at least, whenever it is released.
        queue: Under the queue policy, its place among the waiters.
        durability: Who has to confirm that the lock was taken, or the message parked.
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
    min_hold_ms: int = 0
    queue: QueueRequest | None = None
    durability: Durability = PRIMARY


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock (or used up a name)."""

    task: str | None
    task_id: str | None
    node: str
    pid: int | None
    since: float
    owner: str = ""
    identity: str = ""
    token: int | None = None
    hold_count: int = 1
    releasing: bool = False
    expires_in: float = 0.0
    kept_by_min_hold: bool = False
    #: Its run retried itself, and the lock is kept for the retry alone.
    reserved_for_retry: bool = False

    def __str__(self) -> str:
        if self.pid == 0:  # a grant
            return f"{self.task}[{self.task_id}], whose turn it is"
        who = f"{self.task}[{self.task_id}]" if self.task_id else f"a Lock in process {self.pid}"
        why = " (ended; kept by min_hold)" if self.kept_by_min_hold else " (its retry is to come: keep_on_retry)"
        return f"{who} on {self.node}" + (why if self.kept_by_min_hold or self.reserved_for_retry else "")


class Acquired(NamedTuple):
    """The lock is the asker's.

    Args:
        token: Its fencing token.
        since: When it was taken, seconds since the epoch by the store's clock.
        rank_us: The rank of the message that asked.
        seed: Under ``once_per``: what the idempotency key is made of.
        after_crash: Under ``once_per``: an earlier run died, and nobody knows how far it came.
    """

    token: int
    since: float
    rank_us: int
    seed: str = ""
    after_crash: bool = False


class Held(NamedTuple):
    """Another holds the lock. ``twin``: that other is another copy of the very message that asks."""

    holder: Holder
    same_message: bool
    rank_us: int


class Queued(NamedTuple):
    """Under the queue policy: the message has to wait. ``holder``: None where only other waiters are before it."""

    waiting: int
    rank_us: int
    holder: Holder | None


class Parked(NamedTuple):
    """The message waits in the store. ``granted``: it met a free lock, and this one comes first."""

    rank_us: int
    position: int
    granted: Grant | None
    evicted: Grant | None


class Used(NamedTuple):
    """An earlier run used the name up. ``same``: it was this very message. ``granted``: as of a duplicate."""

    by: Holder
    same_message: bool
    granted: Grant | None = None


class Unknown(NamedTuple):
    """Nobody knows what became of an earlier run, ``by``. ``granted``: as of a duplicate."""

    by: Holder
    granted: Grant | None = None


class Duplicate(NamedTuple):
    """This message's identity has reached its end already. ``granted``: to whom the turn passes that it had."""

    granted: Grant | None = None


class Tombstoned(NamedTuple):
    """This acquisition was given up before its acquire arrived."""


class NoMajority(NamedTuple):
    """Of several servers no majority gave the lock to anybody; what this acquisition took is given back."""


Refusal = Held | Used | Unknown | Duplicate | Tombstoned | NoMajority | Queued | Parked


class Renewal(NamedTuple):
    """One lease to renew.

    Args:
        name: The lock.
        acquisition: Owner and number.
        ttl_ms: The least life that the lock has afterwards, in milliseconds.
        fields: Fields to set in the lock if it is still ours.
        durability: Who has to confirm it.
    """

    name: LockName
    acquisition: str
    ttl_ms: int
    fields: tuple[tuple[str, str], ...] = ()
    durability: Durability = PRIMARY


@dataclass(frozen=True, slots=True)
class LastRun:
    """What became of the last run of a name, under ``once_per``.

    Args:
        state: ``"used"``: it succeeded. ``"unknown"``: it died, and nobody knows how far it came. ``"running"``.
        task: Its task's name.
        task_id: Its id.
        node: The node name of its worker.
        since: When it succeeded; unless it did, when it began. Seconds since the epoch by the store's clock.
        expires_in: Seconds until this is forgotten.
        idempotency_key: What its body read as ``lease.idempotency_key``.
    """

    state: Literal["used", "unknown", "running"]
    task: str | None
    task_id: str | None
    node: str
    since: float
    expires_in: float
    idempotency_key: str

    def __str__(self) -> str:
        return f"{self.state} by {self.task}[{self.task_id}] on {self.node} since {shown_time(self.since)}"


class Released(NamedTuple):
    """``ours``: the lock was held by that acquisition until now. ``word``: a twin or the keeper left word.

    ``granted``: the waiter for which the lock is kept now; its message is to be published.
    """

    ours: bool
    duplicate_seen: bool
    granted: Grant | None = None


class Quarantine(NamedTuple):
    """How a store's servers are put on probation.

    Args:
        delay: Seconds that it lasts: no lease may live longer.
        setting: The setting that says so, for errors.
    """

    delay: float
    setting: str = "dlock_failover_quarantine"

    @property
    def delay_ms(self) -> str:
        return str(round(self.delay * 1000))


def owner_of(acquisition: str) -> str:
    """Return the owner of an acquisition."""
    return acquisition.rpartition(".")[0]


def held_by(holder: Holder) -> str:
    """Who holds it, where and since when, for people."""
    return f"held by {holder} since {shown_time(holder.since)}"
