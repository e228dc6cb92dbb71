"""Which node of a Redis Cluster keeps which slot, as one node has told it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .places import Address

__all__ = ["SlotMap", "address_in"]


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Ranges of slots, in order, and the primary of each.

    Args:
        starts: The first slot of each range.
        owners: Its primary.
        ids: What each primary calls itself, for life.
        moved: Slots of which a node has said since that another keeps them.
    """

    starts: Sequence[int]
    owners: Sequence[Address]
    ids: Mapping[Address, bytes] = field(default_factory=dict)
    moved: dict[int, Address] = field(default_factory=dict)

    @classmethod
    def of(cls, reply: Sequence[Any], asked: Address) -> SlotMap:
        """What the node ``asked`` answered to CLUSTER SLOTS, a command of every version."""
        ranges = sorted((start, _address(node, asked), _id(node)) for start, _, node, *_ in reply)
        ids = {owner: its for _, owner, its in ranges if its}
        return cls([start for start, _, _ in ranges], [owner for _, owner, _ in ranges], ids)

    def owner(self, slot: int) -> Address:
        """The primary of a slot. Of one that nobody keeps, any: it says so."""
        return self.moved.get(slot) or self.owners[bisect_right(self.starts, slot) - 1]

    def addresses(self) -> Sequence[Address]:
        """Every primary, once."""
        return tuple(dict.fromkeys((*self.owners, *self.moved.values())))


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
