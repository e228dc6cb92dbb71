"""The store contract: all that the other packages know of a lock store.

Above 300 lines: nearly all are signatures and docstrings of the contract.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from ..errors import ReplyLost, ReplyTimeout
from ..keys.lock_name import LockName
from ..options.durability import PRIMARY, Durability
from .model import Acquired, AcquireRequest, Grant, Holder, LastRun, Refusal, Released, Renewal, Requester
from .queue_model import ClaimRequest, ExistingCall, Waiting

__all__ = [
    "FOREIGN_MS",
    "ClaimStore",
    "LockStore",
    "QueueStepResult",
    "QueueStore",
    "ReleaseListener",
    "ReleaseRequest",
    "StoreInfo",
    "UseStore",
    "call_again_if_reply_lost",
]

T = TypeVar("T")

#: Characters of a release request that fit a lease record beside the longest name.
MOST_TEXT: Final = 1200
_NOBODY: Final = Requester.of(None, None, "", 0).text


class ReleaseRequest(NamedTuple):
    """The request to end an acquisition.

    Args:
        final: The message is acknowledged with a stored result. Its identity must not run again.
        identity: The digest of the message's :class:`Identity`; "" outside of a message.
        used_ms: Milliseconds that this success uses the name; 0: it does not.
        requester: The run that used it: the text of a :class:`~celery_dlock.store.model.Requester`.
        outcome_unknown: The acquire may still arrive, so leave a tombstone that refuses it.
        rolled_back: The body did not begin, so ``min_hold`` does not apply. Only with ``outcome_unknown``.
        queue: The task's policy is to queue, so the lock is expected to have waiters.
        once: The acquisition has a mark (``once_per``), and its body did not die: unless it used the name, that is
            free again, or as unknown as it was before.
        tick: The tick of that mark; "" for the mark of the name.
        seed: The seed of the idempotency key that the body read.
        window_ms: Milliseconds that the mark of a free name keeps that seed.
        reserved_for: The identity of the retry that the lock is reserved for (``keep_on_retry``); "" for none.
        reserved_ms: Milliseconds that the reservation lasts at most.
    """

    final: bool = False
    identity: str = ""
    used_ms: int = 0
    requester: str = ""
    outcome_unknown: bool = False
    queue: bool = False
    once: bool = False
    tick: str = ""
    seed: str = ""
    window_ms: int = 0
    reserved_for: str = ""
    reserved_ms: int = 0
    rolled_back: bool = False

    @property
    def text(self) -> str:
        """The request as JSON, for a release that is delegated to the watchdog."""
        text = json.dumps(self)
        # A record holds a limited number of bytes. If the text is too long, drop the requester.
        return text if len(text) <= MOST_TEXT else json.dumps(self._replace(requester=_NOBODY))

    @classmethod
    def from_text(cls, text: str) -> ReleaseRequest:
        """Parse :attr:`text`. If the text is damaged, because its writer was killed, the lock is only released."""
        try:
            return cls(**dict(zip(cls._fields, json.loads(text), strict=True)))
        except (ValueError, TypeError):
            return cls(outcome_unknown=True)


def call_again_if_reply_lost(call: Callable[..., T], *args: Any) -> T:
    """Call the store, and once more if the connection was cut before the reply came.

    Only for calls that are safe to send twice. A call that timed out is not repeated: it may take as long again.
    """
    try:
        return call(*args)
    except ReplyTimeout:
        raise
    except ReplyLost:
        return call(*args)


class ReleaseListener(Protocol):
    """A listener for releases of one lock."""

    def wait(self, timeout: float) -> bool:
        """Block at most ``timeout`` s. Return whether a release was reported. Both answers may be wrong: ask again."""
        ...


class LockStore(Protocol):
    """The store of locks.

    Every method is one round trip, takes effect as a whole or not at all, and is safe to be sent twice. A lost race
    is a result, not an error. Raises :class:`~celery_dlock.errors.StoreUnavailable` when the store did not carry a
    command out, and its subclass :class:`~celery_dlock.errors.ReplyLost` when that is not known.
    """

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, claim: AcquireRequest) -> Acquired | Refusal:
        """Take the lock for ``acquisition``, or return why not. Park the message if the request has its entry.

        Raises:
            NotConfirmed: Too few servers confirmed it (``durability``). The caller must release the acquisition.
            StoreNotReady: The store may have lost leases, and grants nothing for a while.
        """
        ...

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool | None]:
        """Move deadlines. A result is false if the acquisition does not hold the lock. Never creates a lock.

        A result is None if a server did not answer, or if too few servers confirmed the renewal.

        Args:
            renewals: The leases to renew.
            within: Seconds after which a reply is of no use.
        """
        ...

    def release(
        self, name: LockName, acquisition: str, ending: ReleaseRequest, durability: Durability = PRIMARY
    ) -> Released:
        """End an acquisition and grant the next waiter. Without effect if the acquisition has ended or never was.

        A release that too few servers confirm counts all the same. It is logged once.
        """
        ...

    def shard(self, name: LockName) -> int:
        """Return the number of the part of the store that keeps a lock. Parts fail independently. Sends nothing."""
        ...

    def inspect(self, name: LockName) -> Holder | None:
        """Return the current holder of the lock."""
        ...

    def release_listener(self, name: LockName) -> AbstractContextManager[ReleaseListener]:
        """Listen for releases. After entering, none is missed while the connection lasts."""
        ...

    def close(self) -> None:
        """Close all connections of this process. The store may be used again afterwards."""
        ...


#: Milliseconds that a granted message waits for a worker of its broker while only workers of other brokers come.
FOREIGN_MS: Final = 5 * 60 * 1000


class QueueStepResult(NamedTuple):
    """The result of a step on a queue.

    Args:
        entry: The entry of the waiter that was removed; "" if there was none.
        granted: The waiter that the lock is reserved for. Its message is to be published.
        dead_letter: The identity that became a dead letter; "" if none did.
        foreign_broker: It became one because no worker of its broker published it.
    """

    entry: str = ""
    granted: Grant | None = None
    dead_letter: str = ""
    foreign_broker: bool = False


class StoreInfo(NamedTuple):
    """The configuration of a store.

    Args:
        durable: All but its last second survives a restart.
        eviction: What it does when its memory is full: ``noeviction``, or the policy by which it drops keys of its
            own choice; "" where that cannot be told.
        unreachable: Those of its servers that did not answer, each with the reason.
        can_confirm_fsync: It can say that a write is on disk (WAITAOF).
        replicas: How many of them follow a server, at the least; None where it does not say.
        duplicate_servers: Which of its servers are one under two names, in words; "" where none is.
    """

    durable: bool
    eviction: str
    unreachable: tuple[str, ...] = ()
    can_confirm_fsync: bool = False
    replicas: int | None = None
    duplicate_servers: str = ""


class ClaimStore(Protocol):
    """The store of claims, which are made when a message is published. See :class:`LockStore` for all methods."""

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        """Claim names, in one write: None for each that is claimed, else who was first.

        Raises:
            NotConfirmed: Not all confirmed it that a publication asks for: all of these are to be given up.
        """
        ...

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        """Give a claim up; a message that follows this one keeps its own. False if there was none.

        With an ``attempt``, a claim of that name that comes later takes no effect, and one of another name stays.
        """
        ...

    def extend_claims(self, claims: Sequence[tuple[LockName, str, int]]) -> None:
        """Let claims (of a name, by a task id) last so many milliseconds from now at least. Never creates one."""
        ...

    def close(self) -> None:
        """Close all connections of this process. The store may be used again afterwards."""
        ...


class UseStore(Protocol):
    """The store of run marks, for operators. With a ``tick``, the run of that tick only."""

    def last_run(self, name: LockName, tick: str = "") -> LastRun | None:
        """Return the last run of the name; None if nothing is recorded."""
        ...

    def forget_run(self, name: LockName, tick: str = "") -> bool:
        """Delete the run mark of the name. Return false if there was none."""
        ...

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "") -> bool:
        """Resolve a run with unknown outcome: it did its work or not. Return false if there is no such run."""
        ...


class QueueStore(LockStore, ClaimStore, UseStore, Protocol):
    """The steps that belong to no acquisition: on queues, and on what workers note about themselves."""

    def sweep(
        self, name: LockName, granter: str, turn_ms: int, tries: int, foreign_ms: int = FOREIGN_MS
    ) -> QueueStepResult:
        """Grant a lock that is free, and end a grant that is due."""
        ...

    def confirm_publish(self, name: LockName, identity: str, turn_ms: int) -> bool:
        """Note that a granted message was published; false if its grant is over."""
        ...

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        """Leave a grant that was not published to another worker; false if it is published, or over.

        Args:
            name: Of the lock.
            grant: The waiter.
            foreign: Its message is of another broker. If no worker of that one comes, it becomes a dead letter.
            present: A worker of that other broker runs, so it does not.
        """
        ...

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> QueueStepResult:
        """Take a waiter out, to the dead letters with ``bury``; its turn passes on. One that runs is left alone.

        Copies of a waiter that was taken out do not run; nor, if it has ``ended``, those of one that did not wait.
        """
        ...

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        """The message of this identity has ended: copies of it do not run.

        Marks nothing where a message that was sent later, with the same id, holds the lock by now.

        Args:
            name: Of its lock.
            identity: The message's.
            owner: Who ran it.
            age_us: Microseconds since that run began.
        """
        ...

    def list_waiters(self, name: LockName, most: int) -> Waiting:
        """Return the waiters."""
        ...

    def info(self) -> StoreInfo:
        """Return the configuration of the store."""
        ...

    @property
    def clustered(self) -> bool:
        """Whether each bucket needs its own command."""
        ...

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        """Take or extend the lease on a duty that one worker of a broker does for all of them.

        Args:
            broker: The identity of the broker.
            duty: The duty.
            worker: The worker that asks.
            life_ms: Milliseconds until the lease ends.

        Returns:
            0 if this worker has the lease, else the milliseconds until the lease of another worker ends.
        """
        ...

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        """The locks of these buckets that a sweep has to look after within so many s, at most so many of each."""
        ...

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        """Store the crash record of a worker; an empty text deletes it.

        Args:
            node: The node name of the worker, which several workers may have.
            worker: The worker, by a text that no other worker has.
            text: The record.
            life_ms: Milliseconds for which the record is kept, at least.
        """
        ...

    def worker_records(self, node: str) -> dict[str, str]:
        """Return the crash records of all workers of a node name, by worker."""
        ...

    def announce_workers(self, broker: str, life_ms: int) -> None:
        """Record that a broker has running workers, for at least so many milliseconds."""
        ...

    def has_workers(self, broker: str) -> bool:
        """Return whether a worker of this broker was announced lately."""
        ...

    def dead_letters_at(self, name: LockName) -> str:
        """Return where an operator finds the dead letters of a lock. Sends nothing."""
        ...
