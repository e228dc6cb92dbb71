"""The quarantine: a server that may have lost leases grants no new ones until the lost ones have expired.

After a failover, a FLUSHALL or a restart without its data, a server does not know all owners. It still renews and
releases the leases that it has, and it answers reads. Chubby calls this lock-delay, Redlock delayed restart.

A restart with an append-only file starts a quarantine too. The file may lack a lease: the setting that is read at the
start (``appendfsync always``) may have been another one when the lease was written.
"""

from __future__ import annotations

import math

from ...errors import StoreQuarantined
from ..model import Quarantine

__all__ = ["quarantined"]


def quarantined(left_ms: int, quarantine: Quarantine) -> StoreQuarantined:
    """Return the exception for an acquire that a quarantine refused."""
    return StoreQuarantined(
        "the lock store was started, emptied or promoted to primary a moment ago: it grants nothing new for another "
        f"{math.ceil(left_ms / 100) / 10:.1f} s, until the leases that it may have lost have expired "
        f"({quarantine.setting})",
        left_ms / 1000,
    )
