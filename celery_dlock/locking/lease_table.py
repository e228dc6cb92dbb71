"""The lease table: the records of one process's leases, which the watchdog reads without taking a lock.

This module has the table of a process that runs its own watchdog. The table of a pool child is in memory shared with
the worker's main process (:mod:`.shared_lease_table`). The two have the same methods.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..keys.key_spec import LockName
from ..options.derived import StopReason

if TYPE_CHECKING:
    from .shared_lease_table import SharedLeaseRecord, SharedLeaseTable

__all__ = [
    "BodyAborter",
    "LeaseRecord",
    "LeaseState",
    "LeaseTable",
    "LocalLeaseTable",
]

LeaseRecord: TypeAlias = "LocalLeaseRecord | SharedLeaseRecord"
LeaseTable: TypeAlias = "LocalLeaseTable | SharedLeaseTable"


class LeaseState(IntEnum):
    """The state of an acquisition."""

    #: The record is unused.
    FREE = 0
    #: The acquire may have been sent. If the process dies now, it is unknown whether the lock is held.
    ACQUIRING = 1
    #: The lock is held, and the watchdog renews its lease.
    HELD = 2
    #: The release may have been sent. If the process does not finish it in time, the watchdog releases the lock.
    RELEASING = 3
    #: A release failed, or an acquire was interrupted. The watchdog sends the recorded release request.
    RELEASE_DELEGATED = 4


class LocalLeaseRecord:
    """The record of one acquisition, used by its owner and by the watchdog of the same process.

    The owner opens the record, and reports through it each step from the acquire to the release. The watchdog records
    renewals and losses. Whichever of the two releases the lock calls :meth:`clear`.

    Attributes:
        name: The lock name.
        acquisition: The acquisition id: the owner and a number.
        ttl: Seconds from a renewal to the end of the lease.
        state: The state of the acquisition.
        deadline: The end of the lease on the monotonic clock.
        max_hold_until: The time of the last allowed renewal (``max_hold``), on the monotonic clock; 0 for no limit.
        lost: Whether the lease was found to be over before its release.
        stoppable: Whether newer calls may ask the holder to stop (``on_conflict="replace"``), so that renewals ask for
            that.
        replaced: Whether a newer call has asked the holder to stop.
        ending: The text of the release request that was delegated to the watchdog; empty if none was.
    """

    __slots__ = (
        "_stop", "_table", "acquisition", "deadline", "ending", "has_deadline_entry", "look_at", "lost",
        "max_hold_until", "name", "put_off", "replaced", "state", "stoppable", "ttl",
    )  # fmt: skip

    def __init__(self, records: LocalLeaseTable, name: LockName, acquisition: str, ttl: float) -> None:
        self._table = records
        self.name = name
        self.acquisition = acquisition
        self.ttl = ttl
        self.deadline = self.max_hold_until = 0.0
        self._stop: Callable[[StopReason], None] | None = None
        self.lost = self.stoppable = self.replaced = False
        self.ending = ""
        #: For the watchdog's schedule: the time of the next look at this record, whether that look was put off, and
        #: whether the deadline is scheduled.
        self.look_at = math.inf
        self.put_off = self.has_deadline_entry = False
        self.state = LeaseState.ACQUIRING

    @property
    def pid(self) -> int:
        """The id of the process that holds the lock."""
        return os.getpid()

    def held(self, deadline: float) -> None:
        """Record that the lock was acquired."""
        self.deadline = deadline
        self.state = LeaseState.HELD

    def renewed(self, deadline: float) -> None:
        """Record a renewal. An earlier deadline than the recorded one has no effect."""
        self.deadline = max(self.deadline, deadline)

    def begin_release(self) -> bool:
        """Record that the release begins. Return false if the watchdog releases the lease, or has released it."""
        if self.state in (LeaseState.RELEASE_DELEGATED, LeaseState.FREE):
            return False
        self.state = LeaseState.RELEASING
        self._table.note(self)
        return True

    def delegate_release(self, ending: str) -> None:
        """Make the watchdog send the release request ``ending``."""
        if self.state is LeaseState.FREE:
            return
        self.ending = ending
        self.state = LeaseState.RELEASE_DELEGATED
        self._table.note(self)

    def set_max_hold(self, until: float) -> None:
        self.max_hold_until = until
        self._table.note(self)

    def lose(self) -> None:
        """Mark the lease as lost."""
        self.lost = True

    def set_aside(self) -> None:
        """Record that the watchdog will not renew the lease again. From then on, it only watches the release."""
        self.look_at = -math.inf

    def set_stoppable(self) -> None:
        self.stoppable = True
        self._table.note(self)  # its next renewal is due sooner

    def request_stop(self, by: str) -> None:
        """Record that the call ``by`` has asked the holder to stop."""
        del by  # the lease knows it
        self.replaced = True

    def set_kill_after(self, seconds: float | None) -> None:
        """Allow to kill the process so many seconds after a newer call has asked the holder to stop; None: forbid it.

        Here it does nothing: this process runs other bodies too, or the worker itself.
        """

    def on_stop(self, stop: Callable[[StopReason], None] | None) -> None:
        """Set the function that stops the body for a reason; None: do not stop it. The watchdog may call it again."""
        self._stop = stop

    def stop(self, reason: StopReason) -> None:
        """Stop the body, if a function was set. Called by the watchdog."""
        # Read once: the body's thread may reset it between two reads.
        if (stop := self._stop) is not None:
            stop(reason)

    def clear(self) -> None:
        """Free the record, after the release or an acquire that took no lock."""
        self.state = LeaseState.FREE
        self._table.forget(self)


def _watched() -> bool:
    return True


class LocalLeaseTable:
    """The lease table of a process that runs its own watchdog."""

    def __init__(self) -> None:
        self._taken: dict[str, LocalLeaseRecord] = {}
        #: The records whose state has changed since the watchdog's last look, other than to held or to free.
        self._changed: dict[str, LocalLeaseRecord] = {}
        #: The time of the watchdog's last scan, on the monotonic clock; 0 before its first scan.
        self.scanned_at = 0.0
        #: Makes sure that a watchdog reads this table; returns false if it cannot be started. Set by its owner.
        self.wake: Callable[[], bool] = _watched

    def open(self, name: LockName, acquisition: str, ttl: float) -> LocalLeaseRecord:
        """Return a record for a new acquisition, in the state ``ACQUIRING``.

        Open it before the acquire is sent. If the process dies or is interrupted, the record shows what to release.
        """
        record = self._taken[acquisition] = LocalLeaseRecord(self, name, acquisition, ttl)
        self._changed[acquisition] = record
        return record

    def find(self, acquisition: str) -> LocalLeaseRecord | None:
        """Return the record of an acquisition that this process opened; None if it is free."""
        return self._taken.get(acquisition)

    def forget(self, record: LocalLeaseRecord) -> None:
        self._taken.pop(record.acquisition, None)
        self._changed.pop(record.acquisition, None)

    def note(self, record: LocalLeaseRecord) -> None:
        """Note that the watchdog must look at this record in its next round. Call this after the change."""
        if record.acquisition in self._taken:
            self._changed[record.acquisition] = record

    def changed(self) -> list[LocalLeaseRecord]:
        """Return the records that were noted since the last call, the earliest first."""
        # Each pop is atomic. If a record is noted again after its pop, the next call returns it again.
        noted = [self._changed.pop(acquisition, None) for acquisition in list(self._changed)]
        return [record for record in noted if record is not None]

    def __len__(self) -> int:
        return len(self._taken)

    def records(self) -> list[LocalLeaseRecord]:
        """Return all records that are not free."""
        # list() of a dict's values is atomic. A suspended greenlet could hold a lock, and block the watchdog.
        records = list(self._taken.values())
        for record in records:
            if record.state is LeaseState.FREE:
                self.forget(record)  # an exception interrupted clear()
        return [record for record in records if record.state is not LeaseState.FREE]


class BodyAborter(Protocol):
    """The part of a worker that stops a body by an exception, at most once.

    The exception is :class:`LockLost` if the body's lease is lost, and ``Replaced`` if a newer call replaces it.
    """

    def enter(self, record: LeaseRecord, reasons: Collection[StopReason], kill_after: float | None = None) -> None:
        """Allow to stop the body that the calling thread or greenlet is about to run under this lease.

        Args:
            record: The record of the lease.
            reasons: The reasons for which the body is to be stopped.
            kill_after: Seconds after which a replaced body is killed, if the pool can do that; None: it is not.
        """
        ...

    # Raise no ``Replaced`` in this body any more: ``lease.ensure()`` raises it. Called in the body's own thread.
    def told(self, record: LeaseRecord) -> None: ...
    # Forbid the abort, after the body. Idempotent. An exception that is requested but not raised yet is raised during
    # this call or not at all.
    def leave(self, record: LeaseRecord) -> None: ...
