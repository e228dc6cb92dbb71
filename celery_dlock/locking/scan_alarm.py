"""The check of a lock client that a watchdog looks at the leases of its process."""

from __future__ import annotations

from collections.abc import Callable

from ..utils.log import logger
from .lease_table import LeaseRecord, LeaseTable

__all__ = ["UNWATCHED", "ScanAlarm"]

#: Seconds without a scan by the watchdog after which an acquire logs an error. Longer than any round of it.
UNWATCHED = 10.0


class ScanAlarm:
    """The check that a watchdog looks at the lease table of this process.

    It logs an error if the last scan is long ago, and again only after a scan.

    Args:
        lease_table: The lease table of this process.
        wake: Starts the watchdog if it does not run; returns false if it cannot be started.
    """

    def __init__(self, lease_table: LeaseTable, wake: Callable[[], bool]) -> None:
        self._lease_table = lease_table
        self._wake = wake
        self._raised = False

    def is_watched(self, record: LeaseRecord, now: float) -> bool:
        """Wake the watchdog and check its last scan. Return false if no watchdog can be started.

        Args:
            record: The lease that was just acquired.
            now: The time of its acquisition on the monotonic clock.
        """
        if not self._wake():
            return False
        scanned_at = self._lease_table.scanned_at
        unwatched = 0 < scanned_at < now - UNWATCHED
        if unwatched and not self._raised:
            logger.error(
                "%s: the watchdog has not looked at the leases of this process for %.0f s; unless it does, this lease "
                "is not renewed and ends in %.0f s",
                record.name, now - scanned_at, record.ttl,
            )  # fmt: skip
        self._raised = unwatched
        return True
