"""The store contract. The other packages use a lock store only through these protocols."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from ..errors import ReplyLost, ReplyTimeout
from ..keys.lock_name import LockName
from .claim_model import ClaimExtension, ClaimRequest, ExistingCall
from .holder_model import Holder
from .model import Acquired, AcquireRequest, Grant, Refusal, Released, Renewal, RenewalResult, Requester, Transferred
from .operator_model import RunView, Waiting
from .server_model import StoreInfo

__all__ = [
    "DUPLICATE_PAUSE_MS",
    "FOREIGN_MS",
    "NO_GUARD",
    "LineListener",
    "LockStore",
    "QueueStepResult",
    "ReleaseListener",
    "ReleaseRequest",
    "call_again_if_reply_lost",
]

T = TypeVar("T")

#: Why a store outside of an SQL database guards no transaction, and what to do.
NO_GUARD: Final = (
    "the locks are not in the database of this transaction, so no transaction can be guarded: set dlock_url to that "
    "database, or store the fencing token with the write"
)

#: Milliseconds until a granted message becomes a dead letter because no worker of its broker publishes it.
FOREIGN_MS: Final = 5 * 60 * 1000
#: Milliseconds from the release for a dead pool child until a duplicate of its message may run. Celery stores the
#: failure of a lost child within 10 s. The message then gets its done mark, and the duplicate does not run.
DUPLICATE_PAUSE_MS: Final = 15_000
#: The longest release request, in characters, that fits into a lease record beside the longest name.
MAX_TEXT_LENGTH: Final = 1200
_NO_REQUESTER: Final = Requester.of(None, None, "", 0).text


class ReleaseRequest(NamedTuple):
    """The request to end an acquisition.

    Args:
        final: The run has ended for good: its result is stored, and its message is or will be acknowledged. If copies
            of the message may exist, set the done mark.
        identity: The digest of the message's :class:`~celery_dlock.store.model.Identity`; "" outside of a message.
        used_ms: Milliseconds that the run mark of a success is kept (``once_per``); 0: the run did not succeed.
        requester: The requester of a successful run: the text of a :class:`~celery_dlock.store.model.Requester`.
        outcome_unknown: It is unknown whether the acquire took effect. It may still arrive, so leave a tombstone that
            refuses it. This is not the unknown outcome of a body (``once_per``).
        queue: The task's policy is to queue, so the lock is expected to have waiters.
        once: The acquisition has a run mark (``once_per``), and the body's process is alive. If the run did not
            succeed, the release frees the name, or restores the mark of an earlier run whose outcome is unknown.
        tick: The due time of the schedule entry that this run serves (``once_per="tick"``); "" without a tick.
        seed: The text from which ``lease.idempotency_key`` of this run was made.
        window_ms: Milliseconds that the run mark keeps the seed if the run did not succeed.
        reserved_for: The identity of the retry that the lock is reserved for (``keep_on_retry``); "" for none.
        reserved_ms: Milliseconds that the reservation lasts at most.
        replace: Under ``on_conflict="replace"``: ``"ended"`` if the body ended by itself, ``"stopped"`` if a newer call
            stopped it; "" under every other policy.
        rolled_back: With ``outcome_unknown``: the body did not begin, so ``min_hold`` does not apply.
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
    replace: str = ""

    @property
    def of_dead_child(self) -> bool:
        """Whether the watchdog releases the lock of a body whose pool child has died. Its end may still be stored."""
        return self.outcome_unknown and not self.rolled_back

    @property
    def text(self) -> str:
        """The request as JSON, for a release that is delegated to the watchdog."""
        text = json.dumps(self)
        # A lease record has limited space. If the text is too long, drop the requester.
        return text if len(text) <= MAX_TEXT_LENGTH else json.dumps(self._replace(requester=_NO_REQUESTER))

    @classmethod
    def from_text(cls, text: str) -> ReleaseRequest:
        """Parse :attr:`text`. If a killed writer left it damaged, only release the lock, and leave a tombstone."""
        try:
            return cls(**dict(zip(cls._fields, json.loads(text), strict=True)))
        except (ValueError, TypeError):
            return cls(outcome_unknown=True)


class QueueStepResult(NamedTuple):
    """The result of a step on a queue.

    Args:
        entry: The entry of the waiter that was removed; "" if there was none.
        granted: The waiter that the lock is reserved for. The caller must publish its message.
        dead_letter: The identity of the waiter that became a dead letter; "" if none did.
        foreign_broker: The dead letter's message was not published, because no worker of its broker swept the lock.
        lost_grant: This sweep ended a grant whose message was published and not started in time.
    """

    entry: str = ""
    granted: Grant | None = None
    dead_letter: str = ""
    foreign_broker: bool = False
    lost_grant: bool = False


def call_again_if_reply_lost(call: Callable[..., T], *args: Any) -> T:
    """Call the store, and once more if the connection was lost before the reply.

    Only for calls that are safe to send twice. A call that timed out is not repeated: it may take as long again.

    Raises:
        ReplyLost: The second reply was lost too, or the first call timed out.
    """
    try:
        return call(*args)
    except ReplyTimeout:
        raise
    except ReplyLost:
        return call(*args)


class ReleaseListener(Protocol):
    """A listener for releases of one lock. Each release wakes the caller that has waited for the longest time."""

    def wait(self, timeout: float) -> bool:
        """Block at most ``timeout`` s. Return whether a release woke this caller. In both cases, try the lock again.

        Raises:
            StoreUnavailable: No connection could be opened, or the store refused.
        """
        ...

    def pass_on(self) -> None:
        """Wake the next caller. Call this if this one was woken, but will neither take the lock nor wait any longer.

        Never raises because of the store. If the store does not answer, the other callers poll.
        """
        ...


class LineListener(ABC):
    """A :class:`ReleaseListener` of a store whose release can transfer the lock to the call that waits in line."""

    @abstractmethod
    def wait(self, timeout: float) -> bool: ...

    @abstractmethod
    def pass_on(self) -> None: ...

    @abstractmethod
    def wait_in_line(
        self, acquisition: str, ttl_ms: int, request: AcquireRequest, seconds: float
    ) -> Transferred | bool:
        """Take the lock if it is free, else wait in line until a release transfers it.

        Otherwise return whether a release may have woken this call, as :meth:`ReleaseListener.wait` does. Then the
        acquisition does not hold the lock.

        Args:
            acquisition: The acquisition that is to hold the lock.
            ttl_ms: Milliseconds that the lock is held without a renewal.
            request: The caller, its message, and the task's options, with ``notify`` and ``waited``.
            seconds: How long to wait at most.
        """


class LockStore(Protocol):
    """The store of locks, claims, run marks, queues, and the records of workers.

    For each lock name, a call takes effect as a whole or not at all. Every command is safe to send twice: if a reply
    is lost, the store or the caller repeats it with equal arguments. A lost race is a result, not an error.

    An acquisition is the text ``owner.number``. Each new acquire has a new number. Every method that sends a command
    raises :class:`~celery_dlock.errors.StoreUnavailable` if the store did not execute the command. If it is unknown
    whether the store did, the method raises the subclass :class:`~celery_dlock.errors.ReplyLost`.

    The methods for claims, queues and brokers have a body here: the answer of a store that has no queues and no claims.
    A store without them derives from this class (:mod:`.features`).
    """

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
        """Take the lock, or return why it was refused. If the request has a queue entry, park a message that must wait.

        Safe to send twice: an acquisition that holds the lock already gets the same token again. Otherwise the first of
        these answers applies: ``Tombstoned``, ``Duplicate``, ``Used``, ``Held`` (under the queue policy also ``Queued``
        or ``Parked``), ``Unknown``, quarantine, ``Acquired``.

        Args:
            name: The lock name.
            acquisition: The acquisition that is to hold the lock.
            ttl_ms: Milliseconds that the lock is held without a renewal.
            request: The caller, its message, and the task's options.

        Raises:
            NotConfirmed: Too few servers confirmed the write (``dlock_durability``). Release the acquisition.
            StoreQuarantined: The store may have lost leases, and grants nothing new for a while.
        """
        ...

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[RenewalResult]:
        """Move the deadlines of leases, and set ``Renewal.fields``. Never creates a lock or shortens a lease.

        Args:
            renewals: The leases to renew.
            within: Seconds after which a reply is of no use; None: the store's timeout.

        Returns:
            One result for each renewal. True: renewed. A ``StopRequest``: renewed, and the holder is to stop.
            False: the acquisition does not hold the lock. None: the lock's server did not answer or refused, or too
            few servers confirmed the renewal. If no server answers, this raises.
        """
        ...

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        """End an acquisition, set its marks, and grant the lock to the next waiter.

        If another acquisition holds the lock, the lock does not change, but the marks are set. If too few servers
        confirm the marks (``dlock_durability``), the release still counts. The store logs the first such case.
        """
        ...

    def shard(self, name: LockName) -> int:
        """Return the number of the lock's shard, less than :data:`~.circuit_breaker.SHARDS`. Sends nothing.

        Shards are servers that fail independently. A number is a hash, so two shards may have the same one (rarely).
        """
        ...

    def inspect(self, name: LockName) -> Holder | None:
        """Return the holder of the lock; None if the lock is free."""
        ...

    def guard(self, name: LockName, acquisition: str, connection: Any, settles: ReleaseRequest | None = None) -> bool:
        """Guard the open transaction of a database connection of the user (``lease.guard``, ``lease.settle``).

        Return false if the acquisition does not hold the lock. Otherwise, no other call takes the lock before the
        transaction has ended, also after the lease has ended.

        Args:
            name: The lock name.
            acquisition: The acquisition.
            connection: The connection.
            settles: The end of a run that succeeds: its run mark is written in the transaction. None: none is.

        Raises:
            GuardRefused: This store, this connection or its state cannot give that guarantee.
        """
        ...

    def release_listener(self, name: LockName) -> ReleaseListener:
        """Return a listener for releases of the lock.

        A release wakes a caller only if callers may wait: an acquire with ``notify`` was refused, or the holder itself
        had waited. If no caller waits at that moment, the wake-up is kept for 2 s. So a caller that was refused and
        then begins to wait misses no release in between.
        """
        ...

    # -- claims, which a publisher makes (``unique``)

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        """Claim lock names. For each, return None, or the existing call that has the name.

        An existing call is another claim, a waiter, or (``refuse_while_running``) a running call. A retry has the same
        task id as the call that it repeats. It may claim the name while that call still has it.

        Raises:
            NotConfirmed: Too few servers confirmed a claim (``dlock_durability``). The caller must release all of them.
        """
        raise TypeError("this store has no claims")

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        """Release a claim. Return false if there was none.

        Args:
            name: The lock name.
            task_id: The task id of the claim.
            generation: The generation of the message. A claim of a later generation (a retry) stays.
            attempt: Release only the claim that this publication made. If its claim command arrives after this release,
                it claims nothing. "": the claim may be that of any publication.
        """
        return False

    def extend_claims(self, claims: Sequence[ClaimExtension]) -> None:
        """Extend claims. Never creates one."""
        return

    # -- run marks (``once_per``), for operators
    # With a ``tick``, only the run of that tick counts. With a ``mark``, only the run whose ``RunView`` has it.

    def last_run(self, name: LockName, tick: str = "") -> RunView | None:
        """Return the last run of the name; None if there is no run mark, or its run ended without a success."""
        ...

    def forget_run(self, name: LockName, tick: str = "", mark: str = "") -> bool:
        """Delete the run mark of the name. Return false if there was none. A body that runs now goes on."""
        ...

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "", mark: str = "") -> bool:
        """Record for ``window_ms`` whether a run with unknown outcome did its work. Return false if there is none."""
        ...

    # -- queues

    def sweep(
        self,
        name: LockName,
        granter: str,
        grant_timeout_ms: int,
        tries: int,
        foreign_ms: int = FOREIGN_MS,
        pause_ms: int = 0,
    ) -> QueueStepResult:
        """Grant the lock if it is free, and end a grant that no worker took in time.

        Args:
            name: The lock name.
            granter: A new text for each sweep. If the command is sent twice, both copies return the same grant.
            grant_timeout_ms: Milliseconds that a waiter is set aside after it lost a grant, doubled with each loss.
                The only waiter is not set aside after its first loss.
            tries: The number of lost grants after which a message becomes a dead letter.
            foreign_ms: See :data:`FOREIGN_MS`.
            pause_ms: Milliseconds for which parked duplicates of started messages wait, see
                :data:`DUPLICATE_PAUSE_MS`; 0: they do not.
        """
        return QueueStepResult()

    def confirm_publish(self, name: LockName, identity: str, grant_timeout_ms: int) -> bool:
        """Record that a granted message was published. Return false if the grant is over.

        The waiter must take the lock within ``grant_timeout_ms`` milliseconds, doubled with each grant that it lost.
        """
        return False

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        """Leave a granted message to another worker. Return false if it was published, or the grant is over.

        Args:
            name: The lock name.
            grant: The grant.
            foreign: The message is of another broker. If no worker of that broker sweeps, it becomes a dead letter.
            present: That broker has running workers, so the message does not become a dead letter.
        """
        return False

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, dead_letter: bool = False, ended: bool = False
    ) -> QueueStepResult:
        """Remove a waiter, and grant the lock to the next one if this one had a grant. If its message runs, do nothing.

        Args:
            name: The lock name.
            identity: The digest of the waiter's identity.
            granter: A new text for each call, as for :meth:`sweep`.
            dead_letter: Make it a dead letter, without a done mark. If false, set the done mark, so that no copy runs.
            ended: The task's result is stored: delete the message, and set the done mark even if it no longer waits. If
                false, keep it as a dead letter. The caller then stores the result, and calls again with ``ended``.
        """
        return QueueStepResult()

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        """Set the done mark of a message that has ended, so that no copy of it runs.

        If a later message with the same id holds the lock, this sets no mark.

        Args:
            name: The lock name.
            identity: The digest of the message's identity.
            owner: The owner of its run.
            age_us: Microseconds since that run started.
        """
        ...

    def list_waiters(self, name: LockName, most: int) -> Waiting:
        """Return the number of waiters, and at most ``most`` of them."""
        return Waiting(name.text, 0, ())

    def info(self) -> StoreInfo:
        """Return the configuration of the store."""
        ...

    @property
    def clustered(self) -> bool:
        """Whether each bucket needs its own command."""
        return False

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        """Take or extend the lease on a duty that one worker does for all workers of its broker.

        Args:
            broker: The identity of the broker.
            duty: The duty.
            worker: The worker that calls.
            life_ms: Milliseconds until the lease ends.

        Returns:
            0 if this worker has the lease, else the milliseconds until the lease of another worker ends.
        """
        return 0

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        """Return the locks that a sweep has to visit within ``within`` seconds, at most ``most`` of each bucket.

        The locks of a server that does not answer are missing. If no lock is found, raise that server's error.
        """
        return []

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        """Store the crash record of a worker; an empty text deletes it.

        Args:
            node: The node name of the worker, which several workers may have.
            worker: A text that identifies the worker's process.
            text: The record.
            life_ms: Milliseconds that the record is kept at least.
        """
        ...

    def worker_records(self, node: str) -> dict[str, str]:
        """Return the crash records of all workers with a node name, by worker."""
        ...

    def announce_workers(self, broker: str, life_ms: int) -> None:
        """Record for at least ``life_ms`` milliseconds that a broker has running workers."""
        return

    def has_workers(self, broker: str) -> bool:
        """Return whether :meth:`announce_workers` was called for this broker, and its time is not over."""
        return False

    def dead_letters_at(self, name: LockName) -> str:
        """Return where an operator finds the dead letters of a lock, as text. Sends nothing."""
        return ""

    # -- connections

    def close(self) -> None:
        """Close all connections of this process. The store may be used again afterwards."""
        ...
