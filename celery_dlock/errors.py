"""Every exception of celery-dlock.

Losing a race is a value, not one of these. Each class takes its state as positional arguments of plain types,
because Celery moves exceptions between processes by pickle and through result backends by JSON.
"""

from __future__ import annotations

__all__ = [
    "DLockError",
    "InvalidLockOptions",
    "LockHeld",
    "LockKeyError",
    "LockLost",
    "NotHeld",
    "ReplyLost",
    "StoreRefused",
    "StoreUnavailable",
]


class DLockError(Exception):
    """Root of every error that celery-dlock raises."""


class InvalidLockOptions(DLockError, ValueError):
    """An option or setting has a value that is not allowed; correct it where the task or the app is defined."""


class LockKeyError(DLockError, ValueError):
    """No lock name can be made for a call: its arguments do not bind, or a value has no stable form."""


class LockHeld(DLockError):
    """The lock is held by another; nothing was run.

    Args:
        message: Who holds it, where and since when, for people.
        name: The lock name.
        task_id: The id of the holding task, if a task holds it.
        node: The node name of the holder's worker or host.
        since: When the holder took it, in seconds since the epoch by the store's clock.
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

    def __str__(self) -> str:
        return self.message


class LockLost(DLockError):
    """The lease is over although the work is not: another may hold the lock now, so stop writing."""


class NotHeld(DLockError):
    """A lock was released by an owner that does not hold it."""


class StoreUnavailable(DLockError):
    """The store did not carry out a command; whether the lock is held is unchanged."""


class StoreRefused(StoreUnavailable):
    """The store answered, and refused a command: a wrong password, no right to it, no memory, a foreign key."""


class ReplyLost(StoreUnavailable):
    """A command was sent and its answer never came: it may have been carried out."""
