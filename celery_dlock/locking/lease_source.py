"""Lease sources: the processes whose leases the watchdog renews. They are this process and its pool children."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..store.model import Released
from .lease_table import LeaseRecord, LeaseState, LocalLeaseTable
from .renewal_schedule import RenewalSchedule

__all__ = ["LeaseSource", "LocalLeaseSource"]


class LeaseSource(ABC):
    """A process whose leases the watchdog renews. By default, each look is at all of its leases."""

    @abstractmethod
    def records(self) -> Sequence[LeaseRecord]:
        """Return all records that are not free."""

    def due_records(self, now: float, until: float) -> Sequence[LeaseRecord]:
        """Return the records to look at now: at least each one that needs a renewal, a release or a report.

        Args:
            now: The time on the monotonic clock.
            until: Renewals that are due by this time count as due.
        """
        return self.records()

    def known_records(self) -> Sequence[LeaseRecord]:
        """Return the records of the last look, without a new one. Any thread may call this."""
        return self.records()

    def held(self) -> list[LeaseRecord]:
        """Return the leases that are held and not lost. Any thread may call this."""
        return [record for record in self.known_records() if record.state is LeaseState.HELD and not record.lost]

    def first_deadline(self) -> float:
        """Return the earliest deadline of the leases that are held and not lost; infinity if there is none."""
        return min((record.deadline for record in self.held()), default=math.inf)

    def is_empty(self) -> bool:
        """Return whether the process has no leases."""
        return not self.records()

    @abstractmethod
    def is_dead(self) -> bool:
        """Return whether the process is dead. The watchdog then releases its leases."""

    @abstractmethod
    def pidfd(self) -> int | None:
        """Return a descriptor that becomes readable when the process dies; None if there is none."""

    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether the watchdog may end while this source has no leases."""

    @abstractmethod
    def on_scan(self, now: float) -> None:
        """Record that the watchdog scanned all sources at ``now``; 0: the watchdog ends."""

    @abstractmethod
    def on_released(self, record: LeaseRecord, released: Released) -> None:
        """Handle the watchdog's release of a lock, for example publish the grant that it made."""


class LocalLeaseSource(LeaseSource):
    """The source for a process that runs its own watchdog.

    Args:
        lease_table: The lease table of this process.
        freed: Called with each lease that the watchdog released.
    """

    def __init__(self, lease_table: LocalLeaseTable, freed: Callable[[LeaseRecord, Released], None]) -> None:
        self._lease_table = lease_table
        self._on_freed = freed
        self._schedule = RenewalSchedule(lease_table)

    def records(self) -> Sequence[LeaseRecord]:
        return self._lease_table.records()

    def due_records(self, now: float, until: float) -> Sequence[LeaseRecord]:
        return self._schedule.due_records(now, until)

    def first_deadline(self) -> float:
        return self._schedule.first_deadline()

    def is_empty(self) -> bool:
        return len(self._lease_table) == 0

    def is_dead(self) -> bool:
        return False

    def pidfd(self) -> None:
        return None

    def is_closed(self) -> bool:
        return True

    def on_scan(self, now: float) -> None:
        self._lease_table.scanned_at = now

    def on_released(self, record: LeaseRecord, released: Released) -> None:
        self._on_freed(record, released)
