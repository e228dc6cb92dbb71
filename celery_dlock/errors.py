"""Every exception of celery-dlock.

A lock that another owner holds is a value, not an exception, unless the caller asked for one. Each class takes its
state as positional arguments of plain types: Celery sends exceptions between processes by pickle, and to result
backends as JSON.
"""

from __future__ import annotations

__all__ = [
    "CallNotRun",
    "DLockError",
    "GuardRefused",
    "InvalidLockOptions",
    "InvalidTick",
    "LockFilesUnusable",
    "LockHeld",
    "LockKeyError",
    "LockLost",
    "NameUsed",
    "NoLockStore",
    "NotConfirmed",
    "NotHeld",
    "ReplyLost",
    "ReplyTimeout",
    "ScriptStopped",
    "StoreBusy",
    "StoreNotReady",
    "StoreQuarantined",
    "StoreRefused",
    "StoreUnavailable",
    "UnknownOutcome",
    "Unpublishable",
]


class DLockError(Exception):
    """The base class of every error that celery-dlock raises."""


class InvalidLockOptions(DLockError, ValueError):
    """An option or setting has an invalid value. Correct it where the task or the app is defined."""


class NoLockStore(InvalidLockOptions):
    """No Redis server to keep locks in: set ``dlock_url``. Neither the broker nor the result backend is Redis."""


class InvalidTick(DLockError, ValueError):
    """The due time in a message (``once_per="tick"``) is malformed, or far in the future. The task did not run."""


class LockKeyError(DLockError, ValueError):
    """A call has no lock name: its arguments do not fit the signature, or a value has no stable form."""


class CallNotRun(DLockError):
    """The base class of errors for a call that did not run because of another call.

    Args:
        message: The other call, its worker and its start, as text for people.
        name: The lock name. This and the following arguments are None if they are unknown.
        task_id: The task id of the other call, if it is a task.
        node: The node name of the other call's worker, or its host name.
        since: The start of the other call, in seconds since the epoch by the store's clock.
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
    """Another owner holds the lock. The call did not run."""


class NameUsed(CallNotRun):
    """An earlier run succeeded within ``once_per``, and ``on_used`` is ``"raise"``. The call did not run."""


class UnknownOutcome(CallNotRun):
    """The process of an earlier run died in its body, and ``after_crash`` is ``"hold"``. The call did not run.

    No call of this lock name runs until an operator calls ``task.resolve(<arguments>, sent=True)`` or ``sent=False``,
    or until the run mark expires.
    """


class GuardRefused(DLockError):
    """``lease.guard()`` cannot prove anything in this connection or transaction. Nothing was written."""


class LockLost(DLockError):
    """The lease ended before the work. Stop writing: another owner may hold the lock now."""

    def __init__(self, message: str = "the lease of the running task is over: another may run now") -> None:
        super().__init__(message)


class NotHeld(DLockError):
    """An owner released a lock that it does not hold."""


class Unpublishable(DLockError):
    """A message cannot be published again, and no later attempt can change that."""


class LockFilesUnusable(DLockError):
    """The lock files of this machine cannot be used (``on_store_error="local"``)."""


class StoreUnavailable(DLockError):
    """The store did not answer, or refused a command.

    It may have carried out a command whose reply was lost. celery-dlock repeats or undoes such a command.
    """


class StoreRefused(StoreUnavailable):
    """The store refused a command: wrong password, missing permission, no memory, or a key of another program."""


class ScriptStopped(StoreRefused):
    """The store refused a command in the middle of a script. What the script wrote before has taken effect."""


class StoreNotReady(StoreUnavailable):
    """The store cannot carry out commands yet: it loads its data, runs a long script, or is a replica. Retry later."""


class StoreQuarantined(StoreNotReady):
    """The store grants no new leases until those that it may have lost have expired.

    Args:
        message: The reason and the remaining time, as text for people.
        seconds: The remaining time in seconds.
    """

    def __init__(self, message: str = "", seconds: float = 0.0) -> None:
        super().__init__(message, seconds)
        self.message = message
        self.seconds = seconds

    def __str__(self) -> str:
        return self.message


class NotConfirmed(StoreNotReady):
    """Too few servers confirmed a command that the primary carried out (``dlock_durability``). It is rolled back."""


class StoreBusy(StoreNotReady):
    """Other transactions changed or locked the lock name until the timeout. The command had no effect."""


class ReplyLost(StoreUnavailable):
    """The connection was lost before the reply to a command. The store may have carried out the command."""


class ReplyTimeout(ReplyLost):
    """The command timed out while the connection stayed open. Retrying at once may take as long again."""
