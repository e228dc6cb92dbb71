"""Every exception of celery-dlock.

Losing a race is a value, not one of these. Each class takes its state as positional arguments of plain types,
because Celery moves exceptions between processes by pickle and through result backends by JSON.
"""

from __future__ import annotations

__all__ = [
    "CallNotRun",
    "DLockError",
    "InvalidLockOptions",
    "InvalidTick",
    "LockHeld",
    "LockKeyError",
    "LockLost",
    "NameUsed",
    "NoLockStore",
    "NotConfirmed",
    "NotHeld",
    "ReplyLost",
    "ReplyTimeout",
    "StoreNotReady",
    "StoreQuarantined",
    "StoreRefused",
    "StoreUnavailable",
    "UnknownOutcome",
    "Unpublishable",
]


class DLockError(Exception):
    """Root of every error that celery-dlock raises."""


class InvalidLockOptions(DLockError, ValueError):
    """An option or setting has a value that is not allowed; correct it where the task or the app is defined."""


class NoLockStore(InvalidLockOptions):
    """There is no Redis to keep locks in: ``dlock_url`` is not set, and neither broker nor result backend is one."""


class InvalidTick(DLockError, ValueError):
    """A message's stamp (``once_per="tick"``) is not our scheduler's, or its clock is far ahead; nothing was run."""


class LockKeyError(DLockError, ValueError):
    """No lock name can be made for a call: its arguments do not bind, or a value has no stable form."""


class CallNotRun(DLockError):
    """Another run, or a call that came first, is why this one did nothing.

    Args:
        message: Who that is, where and since when, for people.
        name: The lock name; None, like the others below, where it does not apply.
        task_id: Its task's id, if it is a task.
        node: The node name of its worker or host.
        since: Since when, in seconds since the epoch by the store's clock.
    """

    def __init__(
        self,
        message: str,
        name: str | None = None,
        task_id: str | None = None,
        node: str | None = None,
        since: float | None = None,
    ) -> None:
        super().__init__(message, name, task_id, node, since)
        self.message = message
        self.name = name
        self.task_id = task_id
        self.node = node
        self.since = since

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"

    def __str__(self) -> str:
        return self.message


class LockHeld(CallNotRun):
    """The lock is held by another, since it took it; nothing was run."""


class NameUsed(CallNotRun):
    """An earlier run has succeeded, ``once_per`` is not over and ``on_used`` is ``"raise"``; nothing was run."""


class UnknownOutcome(CallNotRun):
    """An earlier run died after it began, nobody knows how far it came, and ``after_crash`` is ``"hold"``.

    Nothing was run, and nothing will be until somebody says which it was: ``task.resolve(..., sent=True)`` or
    ``sent=False``; or the mark's time is over.
    """


class LockLost(DLockError):
    """The lease is over although the work is not: another may hold the lock now, so stop writing."""

    def __init__(self, message: str = "the lease of the running task is over: another may run now") -> None:
        super().__init__(message)


class NotHeld(DLockError):
    """A lock was released by an owner that does not hold it."""


class Unpublishable(DLockError):
    """A message cannot be published again, and no later attempt can change that."""


class StoreUnavailable(DLockError):
    """The store did not carry out a command; whether the lock is held is unchanged."""


class StoreRefused(StoreUnavailable):
    """The store answered, and refused a command: a wrong password, no right to it, no memory, a foreign key."""


class StoreNotReady(StoreUnavailable):
    """The store answered that it cannot yet: it loads its data, is busy, is a replica; later it will."""


class StoreQuarantined(StoreNotReady):
    """The store grants nothing new until the leases that it may have lost are over.

    Args:
        message: Why, and for how long, for people.
        seconds: For how long.
    """

    def __init__(self, message: str = "", seconds: float = 0.0) -> None:
        super().__init__(message, seconds)
        self.message = message
        self.seconds = seconds

    def __str__(self) -> str:
        return self.message


class NotConfirmed(StoreNotReady):
    """The primary carried a command out, and too few others confirmed it (``durability``): it is to be taken back."""


class ReplyLost(StoreUnavailable):
    """A command was sent and its answer never came: it may have been carried out."""


class ReplyTimeout(ReplyLost):
    """... and did not come in time, on a connection that still stands: to ask again at once may cost as long again."""
