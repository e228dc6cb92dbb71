"""The membership of a Redis Cluster, as one process knows it, and the check of new slot maps against it."""

from __future__ import annotations

import math
from typing import Final

from ....errors import StoreNotReady
from ....utils.log import logger
from ...location import Address
from .endpoint import UnexpectedNode
from .slot_map import SlotMap

__all__ = ["Members", "Outdated"]

#: Seconds after which the next call requests the map again. Otherwise, an idle process would not notice that a node
#: left. That node may own the same slot in another Cluster, and would accept the commands of this process.
CONFIRM: Final = 10.0
#: Seconds without any call after which a process forgets the map.
UNUSED: Final = 3600.0
#: Seconds after which an older epoch is accepted, if no node reports the known one: all nodes that knew it may be dead.
LAGGING: Final = 30.0
#: Seconds between two log messages about nodes of another Cluster.
REPEAT: Final = 60.0


class Outdated(StoreNotReady):
    """A node of the Cluster does not know the latest change of the Cluster yet."""


class Members:
    """The last accepted map. All connections of one process to one Cluster share it."""

    def __init__(self) -> None:
        # Values are replaced as a whole: several threads use these at once.
        self.map: SlotMap | None = None
        #: The addresses of nodes that belong to another Cluster now.
        self.foreign: frozenset[Address] = frozenset()
        self._epoch = 0
        self._confirmed = -math.inf
        self._used = -math.inf
        self._lagging_since = math.inf
        self._logged = -math.inf

    def expected(self, address: Address) -> bytes:
        """Return the id of the node at an address; empty if it is not known."""
        return self.map.ids.get(address, b"") if self.map else b""

    def current(self, now: float) -> bool:
        """Return whether the map was confirmed a short time ago."""
        return now - self._confirmed < CONFIRM

    def touch(self, now: float) -> None:
        """Record that a call needs the map. If the previous call was more than an hour ago, forget the map first."""
        if now - self._used > UNUSED:
            self.map, self.foreign, self._epoch = None, frozenset(), 0
        self._used = now

    def check(self, address: Address, reported: SlotMap, now: float) -> None:
        """Check that a map belongs to the known Cluster.

        A node that left by a soft reset keeps its id, so one known id proves nothing. The map is accepted if most known
        primaries are still members. After a failover of most primaries, it is accepted if most known shards have a
        member and the epoch has grown.

        Args:
            address: The node that reported the map.
            reported: The map.
            now: The time, by the monotonic clock.

        Raises:
            UnexpectedNode: The node belongs to another Cluster.
            Outdated: The node does not know the latest change.
        """
        known = self.map
        if known is None or not known.ids or not reported.ids:
            return
        if not reported.has_most_primaries(known) and not (
            reported.has_most_shards(known) and (reported.epoch is None or reported.epoch > self._epoch)
        ):
            self.foreign |= {address}
            raise UnexpectedNode(
                "the lock store refused: the node at {}:{} belongs to another Cluster than the one in use; if the "
                "Cluster was replaced on purpose, restart this process".format(*address)
            )
        if reported.epoch is not None and reported.epoch < self._epoch and now - self._lagging_since < LAGGING:
            self._lagging_since = min(self._lagging_since, now)
            raise Outdated(
                "the lock store refused: the node at {}:{} does not know the latest change of its Cluster".format(
                    *address
                )
            )

    def accept(self, reported: SlotMap, now: float) -> None:
        self.map, self._confirmed, self._lagging_since = reported, now, math.inf
        # A node that joined again is not foreign any more.
        self.foreign -= set(reported.addresses())
        self._epoch = reported.epoch or 0

    def log_foreign(self, error: UnexpectedNode, now: float) -> None:
        """Log once a minute that no node reports a map of the known Cluster."""
        if now - self._logged >= REPEAT:
            self._logged = now
            logger.error("no node reports a slot map of the Redis Cluster in use, keeping the last one: %s", error)
