"""The store contract, continued: claims, run marks, queues, and the records of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from ..keys.lock_name import LockName
from .base import LockStore
from .claim_model import ClaimRequest, ExistingCall
from .holder_model import LastRun
from .model import Grant
from .operator_model import Waiting
from .server_model import StoreInfo

__all__ = ["DUPLICATE_PAUSE_MS", "FOREIGN_MS", "ClaimStore", "QueueStepResult", "QueueStore", "RunMarkStore"]

#: Milliseconds until a granted message becomes a dead letter because no worker of its broker publishes it.
FOREIGN_MS: Final = 5 * 60 * 1000
#: Milliseconds from the release for a dead pool child until a duplicate of its message may run. Celery stores the
#: failure of a lost child within 10 s. The message then gets its done mark, and the duplicate does not run.
DUPLICATE_PAUSE_MS: Final = 15_000


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


class ClaimStore(Protocol):
    """The store of claims, which a publisher makes (``unique``). Errors and repetition are as in :class:`LockStore`."""

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        """Claim lock names. For each, return None, or the existing call that has the name.

        An existing call is another claim, a waiter, or (``refuse_while_running``) a running call. A retry has the same
        task id as the call that it repeats. It may claim the name while that call still has it.

        Raises:
            InvalidLockOptions: This store has no claims.
            NotConfirmed: Too few servers confirmed a claim (``dlock_durability``). The caller must release all of them.
        """
        ...

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        """Release a claim. Return false if there was none.

        Args:
            name: The lock name.
            task_id: The task id of the claim.
            generation: The generation of the message. A claim of a later generation (a retry) stays.
            attempt: Release only the claim that this publication made. If its claim command arrives after this release,
                it claims nothing. "": the claim may be that of any publication.
        """
        ...

    def extend_claims(self, claims: Sequence[tuple[LockName, str, int]]) -> None:
        """Extend claims. A claim (lock name, task id, ms) then lasts at least ms from now. Never creates a claim."""
        ...

    def close(self) -> None:
        """Close all connections of this process. The store may be used again afterwards."""
        ...


class RunMarkStore(Protocol):
    """The store of run marks (``once_per``), for operators.

    With a ``tick``, only the run of that tick counts. With a ``mark``, only the run whose ``RunView`` has it.
    """

    def last_run(self, name: LockName, tick: str = "") -> LastRun | None:
        """Return the last run of the name; None if there is no run mark, or its run ended without a success."""
        ...

    def forget_run(self, name: LockName, tick: str = "", mark: str = "") -> bool:
        """Delete the run mark of the name. Return false if there was none. A body that runs now goes on."""
        ...

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "", mark: str = "") -> bool:
        """Record for ``window_ms`` whether a run with unknown outcome did its work. Return false if there is none."""
        ...


class QueueStore(LockStore, ClaimStore, RunMarkStore, Protocol):
    """The whole store contract: locks, claims, run marks, queues, and the records of workers."""

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
        ...

    def confirm_publish(self, name: LockName, identity: str, grant_timeout_ms: int) -> bool:
        """Record that a granted message was published. Return false if the grant is over.

        The waiter must take the lock within ``grant_timeout_ms`` milliseconds, doubled with each grant that it lost.
        """
        ...

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        """Leave a granted message to another worker. Return false if it was published, or the grant is over.

        Args:
            name: The lock name.
            grant: The grant.
            foreign: The message is of another broker. If no worker of that broker sweeps, it becomes a dead letter.
            present: That broker has running workers, so the message does not become a dead letter.
        """
        ...

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
        ...

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
        ...

    def info(self) -> StoreInfo:
        """Return the configuration of the store."""
        ...

    @property
    def clustered(self) -> bool:
        """Whether each bucket needs its own command."""
        ...

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
        ...

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        """Return the locks that a sweep has to visit within ``within`` seconds, at most ``most`` of each bucket.

        The locks of a server that does not answer are missing. If no lock is found, raise that server's error.
        """
        ...

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
        ...

    def has_workers(self, broker: str) -> bool:
        """Return whether :meth:`announce_workers` was called for this broker, and its time is not over."""
        ...

    def dead_letters_at(self, name: LockName) -> str:
        """Return the place where an operator finds the dead letters of a lock, as text. Sends nothing."""
        ...
