"""What a process holds, written where the keeper can read it without locks.

Here: the contract, and the slots of a process in which the keeper itself lives. A pool child's slots lie in memory
shared with the worker's main process (``shared_slots``).
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
    """Where an acquisition is in its life."""

    FREE = 0
    #: The acquire is on its way; if its process dies now, it may or may not have taken the lock.
    ACQUIRING = 1
    #: Held: to be renewed.
    HELD = 2
    #: The release is on its way.
    RELEASING = 3
    #: The release did not get through; the keeper carries it out, with the ending noted here.
    RELEASE_DELEGATED = 4


class LeaseRecord(Protocol):
    """One acquisition, written by its holder and read by the keeper."""

    @property
    def name(self) -> LockName: ...
    @property
    def acquisition(self) -> str: ...
    @property
    def ttl(self) -> float: ...
    @property
    def durability(self) -> Durability:
        """Who has to confirm what is written about it."""
        ...

    @property
    def pid(self) -> int:
        """The process that holds it."""
        ...

    @property
    def state(self) -> LeaseState: ...
    @property
    def deadline(self) -> float:
        """The lease's end on the monotonic clock."""
        ...

    @property
    def lost(self) -> bool: ...
    @property
    def max_hold_until(self) -> float:
        """When the lease ends on the monotonic clock, however often it is renewed; 0: never."""
        ...

    @property
    def ending(self) -> str:
        """What the release still has to say, where it was left to the keeper."""
        ...

    def held(self, deadline: float) -> None: ...
    def renewed(self, deadline: float) -> None:
        """The lease was renewed; a deadline never moves back."""
        ...

    def set_max_hold(self, until: float) -> None: ...
    def lose(self) -> None: ...
    def on_loss(self, stop: Callable[[], None] | None) -> None:
        """What stops the work when the keeper finds the lease lost."""
        ...

    def stop(self) -> None:
        """Call what stops the work, if there is anything. Called by the keeper."""
        ...

    def begin_release(self) -> bool:
        """Its release begins; false where there is nothing to release: it is the keeper's already, or was."""
        ...

    def delegate_release(self, ending: str) -> None: ...
    def clear(self) -> None: ...


class LeaseTable(Protocol):
    """All slots of one process."""

    def open(self, name: LockName, acquisition: str, ttl: float, durability: Durability = PRIMARY) -> LeaseRecord:
        """A slot for a new acquisition. From its first step on, :meth:`find` finds it."""
        ...

    def find(self, acquisition: str) -> LeaseRecord | None:
        """The slot that this process opened for ``acquisition``, if it is not free."""
        ...

    def records(self) -> Sequence[LeaseRecord]:
        """Every slot that is not free."""
        ...

    @property
    def scanned_at(self) -> float:
        """When the watchdog last looked at these slots, on the monotonic clock; 0 if that is not known."""
        ...


class LocalSlot:
    """An acquisition of this very process."""

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
        # Read once: the body's own thread may take it back between two looks.
        if (stop := self._stop) is not None:
            stop()

    def clear(self) -> None:
        self.state = LeaseState.FREE
        self._slots.forget(self)


class LocalLeaseTable:
    """Slots of a process in which the keeper itself lives."""

    def __init__(self) -> None:
        self._taken: dict[str, LocalSlot] = {}
        #: Written by the watchdog.
        self.scanned_at = 0.0

    def open(self, name: LockName, acquisition: str, ttl: float, durability: Durability = PRIMARY) -> LocalSlot:
        slot = self._taken[acquisition] = LocalSlot(self, name, acquisition, ttl, durability)
        return slot

    def find(self, acquisition: str) -> LocalSlot | None:
        return self._taken.get(acquisition)

    def forget(self, slot: LocalSlot) -> None:
        self._taken.pop(slot.acquisition, None)

    def records(self) -> list[LocalSlot]:
        # list() of a dict's values is one step of the interpreter: no lock that a greenlet could sit on.
        slots = list(self._taken.values())
        for slot in slots:
            if slot.state is LeaseState.FREE:
                self.forget(slot)  # its clearing was interrupted
        return [slot for slot in slots if slot.state is not LeaseState.FREE]


class BodyAborter(Protocol):
    """Raises :class:`LockLost` in a body, at most once, as soon as its slot is lost."""

    def enter(self, slot: LeaseRecord) -> None:
        """The body begins, in the thread or greenlet that calls this."""
        ...

    def leave(self, slot: LeaseRecord) -> None:
        """The body has ended, or was stopped; harmless twice, and whatever is under way strikes here at the latest."""
        ...
