"""The check of a lock client that a watchdog looks at the leases of its process."""

from __future__ import annotations

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
    """

    def __init__(self, lease_table: LeaseTable) -> None:
        self._lease_table = lease_table
        self._raised = False

    def is_watched(self, record: LeaseRecord, now: float) -> bool:
        """Wake the watchdog and check its last scan. Return false if no watchdog can be started.

        Args:
            record: The lease that was just acquired.
            now: The time of its acquisition on the monotonic clock.
        """
        if not self._lease_table.wake():
            return False
        scanned_at = self._lease_table.scanned_at
        if not 0 < scanned_at < now - UNWATCHED:
            self._raised = False
        elif not self._raised:
            self._raised = True
            logger.error(
                "%s: the watchdog has not looked at the leases of this process for %.0f s; unless it does, this lease "
                "is not renewed and ends in %.0f s",
                record.name, now - scanned_at, record.ttl,
            )  # fmt: skip
        return True
