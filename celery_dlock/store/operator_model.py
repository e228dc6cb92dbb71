"""Values that operators and callers read: the state of a lock name, its waiters, and what needs a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from .holder_model import shown_time

__all__ = [
    "STATES",
    "AuditRecord",
    "ClaimView",
    "DeadLetter",
    "HolderView",
    "LockView",
    "Page",
    "RunView",
    "State",
    "Waiter",
    "WaiterState",
    "Waiting",
]

T = TypeVar("T")

#: A state of a lock name. A name can be in several at once: used and claimed, for example.
State = Literal["held", "granted", "kept", "used", "unknown", "claimed"]
#: A state of a waiter.
WaiterState = Literal["waiting", "granted", "delayed", "debounced", "replaced"]
STATES: tuple[State, ...] = ("held", "granted", "kept", "used", "unknown", "claimed")


@dataclass(frozen=True, slots=True)
class HolderView:
    """The holder of a lock, as operators see it. Times are seconds since the epoch by the store's clock.

    Args:
        state: ``"held"``: an owner has a lease. ``"granted"``: reserved for a waiter. ``"kept"``: no body runs, and
            ``kept_by`` is the reason.
        acquisition: The acquisition. An action on this lock names it, so it cannot reach a later holder.
        task: The name of its task; "" for a ``Lock`` outside any task.
        task_id: The id of its task; "" for a ``Lock`` outside any task.
        worker: The node name of its worker, or the host name; "" for a grant.
        pid: The process id; 0 for a grant or a hold.
        since: The time of the acquisition, or of the grant.
        expires_in: Seconds until the lease expires, or until the grant is due.
        ttl: The ttl of the lease in seconds; 0.0 for a grant.
        token: The fencing token; 0 for a grant or a hold.
        fresh: The lease was renewed within half its ttl, so its holder is alive.
        kept_by: ``"min_hold"``, ``"keep_on_retry"``, ``"operator"`` or ``"guard"``; "" in another state.
        operator: The operator of a hold, also of one that waits for the holder's release; "" for none.
        reason: The operator's reason.
        releasing: The body has ended, and the release follows.
        hold: The operator's hold, also one that waits for the holder's release; "" for none. The end of a hold names
            it, so it cannot reach a later hold.
    """

    state: Literal["held", "granted", "kept"]
    acquisition: str
    task: str
    task_id: str
    worker: str
    pid: int
    since: float
    expires_in: float
    ttl: float
    token: int
    fresh: bool = False
    kept_by: Literal["", "min_hold", "keep_on_retry", "operator", "guard"] = ""
    operator: str = ""
    reason: str = ""
    releasing: bool = False
    hold: str = ""

    def __str__(self) -> str:
        who = f"{self.task}[{self.task_id}]" if self.task_id else self.operator or "a Lock"
        return f"{who} on {self.worker} (process {self.pid})" if self.worker else who


@dataclass(frozen=True, slots=True)
class RunView:
    """The last run of a lock name under ``once_per``, or of one tick of it.

    Args:
        name: The lock name.
        tick: The digest of the tick; "" for the run of the name.
        state: ``"used"``: it succeeded. ``"unknown"``: its process died. ``"running"``: its body has not ended.
        task: The name of its task.
        task_id: The id of its task.
        worker: The node name of its worker.
        since: The time of its success, else of its start, in seconds since the epoch by the store's clock.
        expires_in: Seconds until the run mark expires.
        idempotency_key: The value of ``lease.idempotency_key`` in its body.
        mark: It tells this run from a later one: its acquisition, the id of the command that settled it, or its start.
    """

    name: str
    tick: str
    state: Literal["used", "unknown", "running"]
    task: str
    task_id: str
    worker: str
    since: float
    expires_in: float
    idempotency_key: str
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.state} by {self.task}[{self.task_id}] on {self.worker} since {shown_time(self.since)}"


@dataclass(frozen=True, slots=True)
class ClaimView:
    """The claim of a published message (``unique``).

    Args:
        name: The lock name.
        task: The name of its task.
        task_id: The id of its task.
        publisher: The host name of the process that published it.
        since: The time of the claim, in seconds since the epoch by the store's clock.
        expires_in: Seconds until the claim ends.
        generation: The position of the message among those of its task id.
    """

    name: str
    task: str
    task_id: str
    publisher: str
    since: float
    expires_in: float
    generation: int

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}], published by {self.publisher} at {shown_time(self.since)}"


@dataclass(frozen=True, slots=True)
class LockView:
    """Everything that the store knows about one lock name.

    Args:
        name: The lock name.
        states: Its states; empty if the name is free.
        holder: The holder; None if the lock is free.
        run: Its last run under ``once_per``; None without one.
        claim: The claim of a published message; None without one.
        waiting: The number of waiters. A granted message counts until it runs.
        has_dead_letters: It has dead letters, or removed waiters whose end is not stored yet.
        at: The time of this view, in seconds since the epoch by the store's clock.
        without_expiry: The number of its keys (lock, run mark, claim) that lack their expiry. The next call sets it.
    """

    name: str
    states: tuple[State, ...]
    holder: HolderView | None
    run: RunView | None
    claim: ClaimView | None
    waiting: int
    has_dead_letters: bool
    at: float
    without_expiry: int = 0

    @property
    def task(self) -> str:
        """The task of the holder, else of the last run, else of the claim; "" if there is none."""
        return next((view.task for view in (self.holder, self.run, self.claim) if view and view.task), "")

    @property
    def task_id(self) -> str:
        """The task id of the holder, else of the last run, else of the claim; "" if there is none."""
        return next((view.task_id for view in (self.holder, self.run, self.claim) if view and view.task_id), "")

    @property
    def since(self) -> float:
        """The time since which the holder, the last run or the claim is what it is; 0.0 if there is none."""
        return next((view.since for view in (self.holder, self.run, self.claim) if view), 0.0)

    @property
    def known(self) -> bool:
        """Whether it is in a state, has waiters, or has a last run that is remembered."""
        return bool(self.states or self.waiting or self.run)

    @property
    def expires_in(self) -> float | None:
        """The seconds until the holder's lease, else the run mark, else the claim ends; None if there is none."""
        return next((view.expires_in for view in (self.holder, self.run, self.claim) if view), None)

    @property
    def worker(self) -> str:
        """The worker or operator that holds it, else the last run's worker, else the publisher of the claim; or ""."""
        if self.holder:
            return self.holder.worker or self.holder.operator
        return self.run.worker if self.run else self.claim.publisher if self.claim else ""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A message that waits for its lock (``on_conflict="queue"``).

    Args:
        name: The lock name.
        identity: The digest of the message's identity, by which it is dropped.
        task: The name of its task; "" if the message cannot be read.
        task_id: The id of its task; "" if the message cannot be read.
        since: The time when it arrived, in seconds since the epoch by the store's clock.
        state: ``"waiting"``; ``"granted"``: its message is being published; ``"delayed"``: it lost a grant.
            ``"debounced"``: it waits for newer calls. ``"replaced"``: a newer call replaced it, and it will end
            REVOKED.
        position: The position in the queue, from 1. Waiters that are not due yet come last, by their due times.
        due: The time from which it may be granted the lock, by the store's clock; 0.0: it waits for the lock alone.
    """

    name: str
    identity: str
    task: str
    task_id: str
    since: float
    state: WaiterState
    position: int
    due: float = 0.0

    def __str__(self) -> str:
        due = f" ({self.state}, due at {shown_time(self.due)})" if self.due else ""
        return f"{self.task}[{self.task_id}] waiting since {shown_time(self.since)}{due}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """The waiters of one lock.

    Args:
        name: The lock name.
        count: The number of all waiters. A granted message counts until it runs.
        waiters: The first of them: the granted ones, then by rank, then those that are not due yet.
    """

    name: str
    count: int
    waiters: tuple[Waiter, ...]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A parked message that was set aside.

    Args:
        name: The lock name.
        identity: The digest of the message's identity, by which it is requeued or dropped.
        task: The name of its task; "" if the message cannot be read.
        task_id: The id of its task; "" if the message cannot be read.
        since: The time when it was set aside, in seconds since the epoch by the store's clock.
    """

    name: str
    identity: str
    task: str
    task_id: str
    since: float


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """An action of an operator.

    Args:
        action: The name of the action: ``"release"``, ``"hold"``, ``"resolve"`` and so on.
        name: The lock name.
        user: The user who did it.
        host: The host on which it was done.
        at: The time, in seconds since the epoch by the operator's clock.
        reason: The operator's reason; "" if none was given.
        detail: What was acted on, and with which result.
    """

    action: str
    name: str
    user: str
    host: str
    at: float
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a long list.

    Args:
        items: The items.
        cursor: The cursor of the next page; "" after the last page.
        scanned: The number of keys that were scanned for this page; 0 if the list has an index.
        keys: The number of keys in the store, for a progress display; 0 if the list has an index.
    """

    items: Sequence[T]
    cursor: str = ""
    scanned: int = 0
    keys: int = 0
