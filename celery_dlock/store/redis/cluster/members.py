"""Which nodes belong to a Redis Cluster, as one process believes, and whether a node's map is believed."""

from __future__ import annotations

import math
from typing import Final

from ....errors import StoreNotReady
from ....utils.log import logger
from ...location import Address
from .endpoint import UnexpectedNode
from .slot_map import SlotMap

__all__ = ["Members", "Outdated"]

#: Seconds after which a map that nothing speaks against is confirmed by the next call. Without a question, a process
#: that was idle while a node left would not notice: the node may keep the slot in its next Cluster, too.
CONFIRM: Final = 10.0
#: Seconds without any call after which a process knows as little as one that has just started.
UNUSED: Final = 3600.0
#: Seconds after which an older epoch is believed, if no node tells a newer one: those that knew it may be gone.
LAGGING: Final = 30.0
#: Seconds between two errors in the log.
REPEAT: Final = 60.0


class Outdated(StoreNotReady):
    """A node of the Cluster has not heard of its latest change yet."""


class Members:
    """The last map that was believed. All connections of one process to one Cluster share it."""

    def __init__(self) -> None:
        # Values are replaced as a whole: several threads use these at once.
        self.map: SlotMap | None = None
        #: Nodes that belong to another Cluster by now.
        self.strangers: frozenset[Address] = frozenset()
        self._epoch = 0
        self._confirmed = -math.inf
        self._used = -math.inf
        self._lagging_since = math.inf
        self._told = -math.inf

    def expected(self, address: Address) -> bytes:
        """Return what the node at an address calls itself; empty if that is not known."""
        return self.map.ids.get(address, b"") if self.map else b""

    def current(self, now: float) -> bool:
        """Was the map confirmed a short time ago?"""
        return now - self._confirmed < CONFIRM

    def used(self, now: float) -> None:
        """Note that somebody needs the map; forget it if that is long ago."""
        if now - self._used > UNUSED:
            self.map, self.strangers, self._epoch = None, frozenset(), 0
        self._used = now

    def judge(self, address: Address, told: SlotMap, now: float) -> None:
        """Check that the map that a node tells is one of the Cluster that is known.

        A node that left by a soft reset keeps its id, so one known id proves nothing. Most of the known primaries have
        to be members still. A failover of most of them is believed too: their replicas are members, and each promotion
        raises the epoch.

        Raises:
            Stranger: The node belongs to another Cluster.
            Outdated: The node has not heard of the latest change.
        """
        known = self.map
        if known is None or not known.ids or not told.ids:
            return
        if not told.has_most_primaries(known) and not (
            told.has_most_shards(known) and (told.epoch is None or told.epoch > self._epoch)
        ):
            self.strangers |= {address}
            raise UnexpectedNode(
                "the lock store refused: the node at {}:{} belongs to another Cluster than the one in use; if the "
                "Cluster was replaced on purpose, restart this process".format(*address)
            )
        if told.epoch is not None and told.epoch < self._epoch and now - self._lagging_since < LAGGING:
            self._lagging_since = min(self._lagging_since, now)
            raise Outdated(
                "the lock store refused: the node at {}:{} does not know the latest change of its Cluster".format(
                    *address
                )
            )

    def believe(self, told: SlotMap, now: float) -> None:
        self.map, self._confirmed, self._lagging_since = told, now, math.inf
        # A node that was let in again is none any more.
        self.strangers -= set(told.addresses())
        self._epoch = told.epoch or 0

    def complain(self, error: UnexpectedNode, now: float) -> None:
        """Log that no node tells a map that is believed, once a minute."""
        if now - self._told >= REPEAT:
            self._told = now
            logger.error("locks: no node of the Redis Cluster in use tells where its keys are: %s", error)
