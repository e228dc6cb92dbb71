"""The lease table: the leases of a process, recorded where the watchdog can read them without locks.

This module has the contract, and the table of a process that runs its own watchdog. The table of a pool child lies in
memory shared with the worker's main process (:mod:`.shared_lease_table`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from ..keys.key_spec import LockName
from ..options.durability import PRIMARY, Durability

__all__ = [
    "BodyAborter",
    "LeaseRecord",
    "LeaseState",
    "LeaseTable",
    "LocalLeaseTable",
]


class LeaseState(IntEnum):
    """The state of an acquisition."""

    FREE = 0
    #: The acquire was sent. If its process dies now, the lock may or may not be taken.
    ACQUIRING = 1
    #: The lock is held and its lease is renewed.
    HELD = 2
    #: The release was sent.
    RELEASING = 3
    #: The release failed. The watchdog repeats it with the recorded release request.
    RELEASE_DELEGATED = 4


class LeaseRecord(Protocol):
    """The record of one acquisition, written by its holder and read by the watchdog."""

    @property
    def name(self) -> LockName: ...
    @property
    def acquisition(self) -> str: ...
    @property
    def ttl(self) -> float: ...
    @property
    def durability(self) -> Durability:
        """The servers that must confirm each write."""
        ...

    @property
    def pid(self) -> int:
        """The process that holds the lock."""
        ...

    @property
    def state(self) -> LeaseState: ...
    @property
    def deadline(self) -> float:
        """The end of the lease on the monotonic clock."""
        ...

    @property
    def lost(self) -> bool: ...
    @property
    def max_hold_until(self) -> float:
        """The end of all renewals on the monotonic clock (``max_hold``); 0: none."""
        ...

    @property
    def ending(self) -> str:
        """The text of the release request that was delegated to the watchdog."""
        ...

    def held(self, deadline: float) -> None: ...
    def renewed(self, deadline: float) -> None:
        """Record a renewal. A deadline never moves back."""
        ...

    def set_max_hold(self, until: float) -> None: ...
    def lose(self) -> None: ...
    def on_loss(self, stop: Callable[[], None] | None) -> None:
        """Set the function that stops the body when the watchdog finds the lease lost."""
        ...

    def stop(self) -> None:
        """Stop the body, if a function was set. Called by the watchdog."""
        ...

    def begin_release(self) -> bool:
        """Record that the release begins. Return false if the watchdog releases the lease, or has released it."""
        ...

    def delegate_release(self, ending: str) -> None: ...
    def clear(self) -> None: ...


class LeaseTable(Protocol):
    """The records of all leases of one process."""

    def open(self, name: LockName, acquisition: str, ttl: float, durability: Durability = PRIMARY) -> LeaseRecord:
        """Return a record for a new acquisition. :meth:`find` finds it from its first step on."""
        ...

    def find(self, acquisition: str) -> LeaseRecord | None:
        """Return the record that this process opened for ``acquisition``; None if it is free."""
        ...

    def records(self) -> Sequence[LeaseRecord]:
        """Return all records that are not free."""
        ...

    @property
    def scanned_at(self) -> float:
        """The time of the watchdog's last scan, on the monotonic clock; 0 if unknown."""
        ...


class LocalSlot:
    """The record of an acquisition in a process with its own watchdog."""

    __slots__ = (
        "_slots", "_stop", "acquisition", "deadline", "durability", "ending", "lost", "max_hold_until", "name", "state",
        "ttl",
    )  # fmt: skip

    def __init__(
        self, slots: LocalLeaseTable, name: LockName, acquisition: str, ttl: float, durability: Durability
    ) -> None:
        self._slots = slots
        self.name = name
        self.acquisition = acquisition
        self.ttl = ttl
        self.durability = durability
        self.deadline = self.max_hold_until = 0.0
        self._stop: Callable[[], None] | None = None
        self.lost = False
        self.ending = ""
        self.state = LeaseState.ACQUIRING

    @property
    def pid(self) -> int:
        return os.getpid()

    def held(self, deadline: float) -> None:
        self.deadline = deadline
        self.state = LeaseState.HELD

    def renewed(self, deadline: float) -> None:
        self.deadline = max(self.deadline, deadline)

    def begin_release(self) -> bool:
        if self.state in (LeaseState.RELEASE_DELEGATED, LeaseState.FREE):
            return False
        self.state = LeaseState.RELEASING
        return True

    def delegate_release(self, ending: str) -> None:
        self.ending = ending
        self.state = LeaseState.RELEASE_DELEGATED

    def set_max_hold(self, until: float) -> None:
        self.max_hold_until = until

    def lose(self) -> None:
        self.lost = True

    def on_loss(self, stop: Callable[[], None] | None) -> None:
        self._stop = stop

    def stop(self) -> None:
        # Read once: the body's thread may reset it between two reads.
        if (stop := self._stop) is not None:
            stop()

    def clear(self) -> None:
        self.state = LeaseState.FREE
        self._slots.forget(self)


class LocalLeaseTable:
    """The lease table of a process that runs its own watchdog."""

    def __init__(self) -> None:
        self._taken: dict[str, LocalSlot] = {}
        #: Set by the watchdog.
        self.scanned_at = 0.0

    def open(self, name: LockName, acquisition: str, ttl: float, durability: Durability = PRIMARY) -> LocalSlot:
        slot = self._taken[acquisition] = LocalSlot(self, name, acquisition, ttl, durability)
        return slot

    def find(self, acquisition: str) -> LocalSlot | None:
        return self._taken.get(acquisition)

    def forget(self, slot: LocalSlot) -> None:
        self._taken.pop(slot.acquisition, None)

    def records(self) -> list[LocalSlot]:
        # list() of a dict's values is atomic. A lock here could be held by a suspended greenlet.
        slots = list(self._taken.values())
        for slot in slots:
            if slot.state is LeaseState.FREE:
                self.forget(slot)  # an exception interrupted clear()
        return [slot for slot in slots if slot.state is not LeaseState.FREE]


class BodyAborter(Protocol):
    """Raises :class:`LockLost` in a body, at most once, when its lease is lost."""

    def enter(self, slot: LeaseRecord) -> None:
        """Begin to watch the body that runs in the calling thread or greenlet."""
        ...

    def leave(self, slot: LeaseRecord) -> None:
        """Stop watching a body. Idempotent. An exception that is on its way is raised here at the latest."""
        ...
