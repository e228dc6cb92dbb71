"""The data of the memory store. Times are microseconds."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from ..rules.data import Claim, LockRecord, MarkKind, NewestCall, Place, ReplacedCalls, SeatsRecord

__all__ = ["BucketData", "HeldLock", "NameData", "Ticket"]


@dataclass
class Ticket:
    """A call that waits in its thread for a release."""

    woken: bool = False


@dataclass
class HeldLock:
    """The lock of a name or of one of its seats (``limit``), and its expiry."""

    lock: LockRecord
    until: int | None


@dataclass
class NameData:
    """Everything about one lock name. Times are microseconds; None: no expiry."""

    #: Locks by seat. A name without seats has seat 0 only.
    locks: dict[int, HeldLock] = field(default_factory=dict)
    seats: SeatsRecord | None = None
    seats_until: int = 0
    claim: Claim | None = None
    claim_until: int | None = None
    entries: dict[str, str] = field(default_factory=dict)
    places: dict[Place, dict[str, int]] = field(default_factory=lambda: {"waiting": {}, "delayed": {}})
    lost: dict[str, tuple[int, int]] = field(default_factory=dict)
    evicted_by: dict[str, str] = field(default_factory=dict)
    replaced_by: dict[str, str] = field(default_factory=dict)
    newest_call: NewestCall | None = None
    newest_until: int = 0
    replaced: ReplacedCalls | None = None
    replaced_until: int | None = None
    dead: dict[str, str] = field(default_factory=dict)
    #: Run marks by tick, with their expiry.
    runs: dict[str, tuple[str, int]] = field(default_factory=dict)
    tickets: deque[Ticket] = field(default_factory=deque)
    wake_until: int = 0

    def leave(self, ticket: Ticket) -> None:
        """Take a call that waits no longer out of the line. It may have been woken in this moment."""
        with suppress(ValueError):
            self.tickets.remove(ticket)

    @property
    def empty(self) -> bool:
        parts = (
            self.locks, self.claim, self.entries, self.dead, self.runs, self.tickets, self.newest_call, self.seats,
            self.replaced, *self.places.values(),
        )  # fmt: skip
        return not any(parts)


@dataclass
class BucketData:
    """The data that the names of one bucket share."""

    last_token: int = 0
    names: dict[str, NameData] = field(default_factory=dict)
    #: Done marks and tombstones, with their expiry.
    marks: dict[tuple[MarkKind, str], tuple[str, int]] = field(default_factory=dict)
    #: The time of the next sweep, by the name in the index (:func:`~celery_dlock.keys.lock_name.index_member`).
    sweeps: dict[str, int] = field(default_factory=dict)
    #: Since when operators see a dead letter, by identity and by the name in the index.
    shown_dead: dict[tuple[str, str], int] = field(default_factory=dict)
