"""Lease sources: the processes whose leases the watchdog renews. They are this process and its pool children."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from ..store.model import Released
from .lease_table import LeaseRecord, LeaseState, LocalLeaseTable
from .renewal_schedule import RenewalSchedule

__all__ = ["LeaseSource", "LocalLeaseSource", "ScannedLeaseSource"]


class LeaseSource(Protocol):
    """A process whose leases the watchdog renews: this process or a pool child."""

    def records(self) -> Sequence[LeaseRecord]:
        """Return all records that are not free."""
        ...

    def due_records(self, now: float, until: float) -> Sequence[LeaseRecord]:
        """Return the records to look at now: at least each one that needs a renewal, a release or a report.

        Args:
            now: The time on the monotonic clock.
            until: Renewals that are due by this time count as due.
        """
        ...

    def held(self) -> list[LeaseRecord]:
        """Return the leases that are held and not lost. Any thread may call this."""
        ...

    def first_deadline(self) -> float:
        """Return the earliest deadline of the leases that are held and not lost; infinity if there is none."""
        ...

    def is_empty(self) -> bool:
        """Return whether the process has no leases."""
        ...

    def is_dead(self) -> bool:
        """Return whether the process is dead. The watchdog then releases its leases."""
        ...

    def pidfd(self) -> int | None:
        """Return a descriptor that becomes readable when the process dies; None if there is none."""
        ...

    def is_closed(self) -> bool:
        """Return whether the watchdog may end while this source has no leases."""
        ...

    def on_scan(self, now: float) -> None:
        """Record that the watchdog scanned all sources at ``now``; 0: the watchdog ends."""
        ...

    def on_released(self, record: LeaseRecord, released: Released) -> None:
        """Handle the watchdog's release of a lock, for example publish the grant that it made."""
        ...


def _held(records: Sequence[LeaseRecord]) -> list[LeaseRecord]:
    return [record for record in records if record.state is LeaseState.HELD and not record.lost]


class ScannedLeaseSource(LeaseSource, Protocol):
    """A source with few leases: each look is at all of them. Subclasses implement :meth:`_scan`."""

    _scanned: Sequence[LeaseRecord] = ()

    def _scan(self) -> Sequence[LeaseRecord]:
        """Return all records that are not free."""
        ...

    def records(self) -> Sequence[LeaseRecord]:
        self._scanned = self._scan()
        return self._scanned

    def due_records(self, now: float, until: float) -> Sequence[LeaseRecord]:  # the protocol's
        return self.records()

    def held(self) -> list[LeaseRecord]:
        return _held(self._scanned)

    def first_deadline(self) -> float:
        return min((record.deadline for record in self.held()), default=math.inf)

    def is_empty(self) -> bool:
        return not self.records()


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

    def held(self) -> list[LeaseRecord]:
        return _held(self._lease_table.records())

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
