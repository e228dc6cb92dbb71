"""The map from hash slots to the nodes of a Redis Cluster, as one node reported it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

from ...location import Address

__all__ = ["SlotMap", "address_in"]

#: Fields before the slots in a line of CLUSTER NODES: id, address, flags, primary, ping, pong, epoch, link.
_FIXED_FIELDS: Final = 8


@dataclass(frozen=True, slots=True)
class SlotMap:
    """The ranges of slots, in order, and the primary of each.

    Args:
        starts: The first slot of each range.
        owners: The primary of each range.
        ids: The node id of each primary and replica.
        shards: For each shard the ids of its nodes, with the primary first.
        members: The ids of all nodes of the Cluster, including dead nodes and nodes without slots.
        epoch: The highest epoch of a primary, which grows with each change of an owner; None if it is not known.
        moved: The new owners of slots, from MOVED replies that came after this map.
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
        """Return the map that a node reports.

        Args:
            reply: The reply to CLUSTER SLOTS, which all server versions have.
            asked: The address of the node.
            nodes: The reply to CLUSTER NODES; empty if the permission for it is missing.
        """
        ranges = sorted((start, _address(shard[0], asked)) for start, _, *shard in reply)
        every = [node for _, _, *shard in reply for node in shard]
        ids = {_address(node, asked): _id(node) for node in every if _id(node)}
        shards = {_id(shard[0]): [_id(node) for node in shard if _id(node)] for _, _, *shard in reply if _id(shard[0])}
        lines = [line.split() for line in nodes.splitlines()]
        lines = [line for line in lines if len(line) >= _FIXED_FIELDS and "handshake" not in line[2]]
        epochs = [int(line[6]) for line in lines if any(not slot.startswith("[") for slot in line[_FIXED_FIELDS:])]
        return cls(
            [start for start, _ in ranges],
            [owner for _, owner in ranges],
            ids,
            list(shards.values()),
            {*ids.values(), *(line[0].encode() for line in lines)},
            max(epochs, default=None),
        )

    def owner(self, slot: int) -> Address:
        """Return the primary of a slot. If no node owns the slot, return any node: it replies with an error."""
        return self.moved.get(slot) or self.owners[bisect_right(self.starts, slot) - 1]

    def addresses(self) -> Sequence[Address]:
        """Return the address of every primary, once."""
        return tuple(dict.fromkeys((*self.owners, *self.moved.values())))

    def has_most_primaries(self, known: SlotMap) -> bool:
        """Return whether most primaries of an earlier map are still members."""
        return self._has_most(shard[:1] for shard in known.shards)

    def has_most_shards(self, known: SlotMap) -> bool:
        """Return whether most shards of an earlier map still have a member."""
        return self._has_most(known.shards)

    def _has_most(self, shards: Iterable[Sequence[bytes]]) -> bool:
        found = [not self.members.isdisjoint(shard) for shard in shards]
        return 2 * sum(found) > len(found)


def address_in(redirection: str, asked: Address) -> Address:
    """Return the node that ``MOVED slot host:port`` or ``ASK slot host:port`` names.

    Args:
        redirection: The reply.
        asked: The address of the node that sent it.
    """
    host, _, port = redirection.split(" ")[2].rpartition(":")
    return _host(host, asked), int(port)


def _id(node: Sequence[Any]) -> bytes:
    _, _, *rest = node
    return rest[0] if rest and isinstance(rest[0], bytes) else b""


def _address(node: Sequence[Any], asked: Address) -> Address:
    host, port, *rest = node
    text = (host or b"").decode()
    if text == "?" and len(rest) > 1:
        # The node prefers a host name and has none. Its IP address is in the metadata.
        metadata = rest[1]
        pairs = zip(metadata[::2], metadata[1::2], strict=False)
        text = next((value.decode() for key, value in pairs if key == b"ip"), text)
    return _host(text, asked), port


def _host(text: str, asked: Address) -> str:
    # A node that does not know its own host sends none. Use the host by which it was reached.
    return asked[0] if text in {"", "?"} else text
