"""Values about the servers of a store: their configuration, and their quarantine."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Quarantine", "StoreInfo", "may_evict"]


class StoreInfo(NamedTuple):
    """The configuration of a store.

    Args:
        durability_cure: What to set, because a restart loses the data; "" if at most the last second is lost.
        eviction: The eviction policy of a full store: ``noeviction``, or one that deletes keys; "" if it is unknown.
        unreachable: The servers that did not answer, each with the reason.
        can_confirm_fsync: The store can confirm that a write is on disk (WAITAOF).
        replicas: The smallest number of replicas of one of its servers; None if it is unknown.
        duplicate_servers: The servers that the configuration lists under two names, as text; "" if there are none.
        polls: Calls that wait for a lock look whether it is free. No release can wake them.
    """

    durability_cure: str
    eviction: str
    unreachable: tuple[str, ...] = ()
    can_confirm_fsync: bool = False
    replicas: int | None = None
    duplicate_servers: str = ""
    polls: bool = False

    @property
    def durable(self) -> bool:
        return not self.durability_cure


def may_evict(eviction: str) -> bool:
    """Return whether a full store with this eviction policy may delete locks. Of an unknown one, nothing is said."""
    return eviction not in ("noeviction", "")


class Quarantine(NamedTuple):
    """The quarantine: a server that may have lost leases grants nothing new for a while.

    Args:
        delay: Seconds that a quarantine lasts. No lease may last longer.
    """

    delay: float

    @property
    def delay_ms(self) -> str:
        return str(round(self.delay * 1000))
