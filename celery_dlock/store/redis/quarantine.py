"""A server that may have lost leases grants nothing new until those that it may have lost are over.

After a failover, a restart without its data or a FLUSHALL a server cannot know who believes to hold a lock. Leases that
it has are renewed and released meanwhile, and everything is read. (Chubby's lock-delay, Redlock's delayed restart.)

A restart with an append-only file is no exception. What is set when a server starts (``appendfsync always``) says
nothing of what was set when a lease was written, and what was set then may be lost with the lease.
"""

from __future__ import annotations

import math

from ...errors import StoreQuarantined
from ..model import Quarantine

__all__ = ["on_probation"]


def on_probation(left_ms: int, probation: Quarantine) -> StoreQuarantined:
    """Why nothing is granted."""
    return StoreQuarantined(
        "the lock store was started, emptied or promoted to primary a moment ago: it grants nothing new for another "
        f"{math.ceil(left_ms / 100) / 10:.1f} s, until the leases that it may have lost are over ({probation.setting})",
        left_ms / 1000,
    )
