"""Which node of a Redis Cluster keeps which slot, as one node has told it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

from ...location import Address

__all__ = ["SlotMap", "address_in"]

#: Fields of each line of CLUSTER NODES before its slots: id, address, flags, primary, ping, pong, epoch, link.
_LEAST: Final = 8


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Ranges of slots, in order, and the primary of each.

    Args:
        starts: The first slot of each range.
        owners: Its primary.
        ids: What each primary and each replica calls itself.
        shards: The ids of each primary and its replicas, the primary's first.
        members: The ids of all nodes of the Cluster, also of those without slots and of dead ones.
        epoch: The highest epoch of a primary, which grows with each change of an owner; None if it is not known.
        moved: Slots of which a node has said since that another keeps them.
    """

    starts: Sequence[int]
    owners: Sequence[Address]
    ids: Mapping[Address, bytes] = field(default_factory=dict)
    shards: Sequence[Sequence[bytes]] = ()
    members: AbstractSet[bytes] = frozenset()
    epoch: int | None = None
    moved: dict[int, Address] = field(default_factory=dict)

    @classmethod
    def of(cls, reply: Sequence[Any], asked: Address, nodes: str = "") -> SlotMap:
        """Read what the node ``asked`` answered to CLUSTER SLOTS, a command of every version, and to CLUSTER NODES.

        Args:
            reply: To CLUSTER SLOTS.
            asked: The node.
            nodes: To CLUSTER NODES; empty if the right for it is missing.
        """
        ranges = sorted((start, _address(shard[0], asked)) for start, _, *shard in reply)
        every = [node for _, _, *shard in reply for node in shard]
        ids = {_address(node, asked): _id(node) for node in every if _id(node)}
        shards = {_id(shard[0]): [_id(node) for node in shard if _id(node)] for _, _, *shard in reply if _id(shard[0])}
        lines = [line.split() for line in nodes.splitlines()]
        lines = [line for line in lines if len(line) >= _LEAST and "handshake" not in line[2]]
        epochs = [int(line[6]) for line in lines if any(not slot.startswith("[") for slot in line[_LEAST:])]
        return cls(
            [start for start, _ in ranges],
            [owner for _, owner in ranges],
            ids,
            list(shards.values()),
            {*ids.values(), *(line[0].encode() for line in lines)},
            max(epochs, default=None),
        )

    def owner(self, slot: int) -> Address:
        """The primary of a slot. Of one that nobody keeps, any: it says so."""
        return self.moved.get(slot) or self.owners[bisect_right(self.starts, slot) - 1]

    def addresses(self) -> Sequence[Address]:
        """Every primary, once."""
        return tuple(dict.fromkeys((*self.owners, *self.moved.values())))

    def has_most_primaries(self, known: SlotMap) -> bool:
        """Are most primaries of an earlier map members still?"""
        return self._has_most(shard[:1] for shard in known.shards)

    def has_most_shards(self, known: SlotMap) -> bool:
        """Is the primary, or a replica, of most shards of an earlier map a member still?"""
        return self._has_most(known.shards)

    def _has_most(self, shards: Iterable[Sequence[bytes]]) -> bool:
        found = [not self.members.isdisjoint(shard) for shard in shards]
        return 2 * sum(found) > len(found)


def address_in(redirection: str, asked: Address) -> Address:
    """The node that ``MOVED slot host:port`` or ``ASK slot host:port`` names, as the node ``asked`` said it."""
    host, _, port = redirection.split(" ")[2].rpartition(":")
    return _host(host, asked), int(port)


def _id(node: Sequence[Any]) -> bytes:
    _, _, *rest = node
    return rest[0] if rest and isinstance(rest[0], bytes) else b""


def _address(node: Sequence[Any], asked: Address) -> Address:
    host, port, *rest = node
    text = (host or b"").decode()
    if text == "?" and len(rest) > 1:
        # It should be known by a name, and has none: then its address is among what else is told of it.
        told = rest[1]
        text = next((value.decode() for key, value in zip(told[::2], told[1::2], strict=False) if key == b"ip"), text)
    return _host(text, asked), port


def _host(text: str, asked: Address) -> str:
    # A node that does not know by what name it is reached means the one by which it was.
    return asked[0] if text in {"", "?"} else text
