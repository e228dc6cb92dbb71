"""The nodes of a Redis Cluster: which of them keeps a slot, and how to talk to it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from ....errors import StoreNotReady, StoreRefused, StoreUnavailable
from ....utils.clock import Clock
from ....utils.rng import rng
from ...location import Address
from ..connection import ErrorReply, RespConnection
from ..endpoint import Endpoint
from ..pool import ConnectionPool
from ..server_errors import error_from_reply
from .endpoint import NodeEndpoint, UnexpectedNode
from .members import Members
from .slot_map import SlotMap

__all__ = ["ClusterNodes"]

T = TypeVar("T")

_LEFT: Final = "belongs to another Cluster now; if the Cluster was replaced on purpose, restart this process"

#: Seconds between two looks at the map, while it is doubted.
LOOK: Final = 0.1
#: Seconds that a node which did not answer in time counts as silent; then it is waited for as long as others again.
SILENCE: Final = 1.0
#: The shortest wait for an answer.
LEAST: Final = 0.02

_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
_INFO: Final = b"*1\r\n$4\r\nINFO\r\n"
_SLOTS: Final = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
_NODES: Final = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nNODES\r\n"


class ClusterNodes:
    """As much of a Cluster as one process has found out, and its connections there.

    The map is asked for again once something speaks against it, or after some seconds, by the next call that needs it,
    and at most ten times a second: a dead node costs its callers a timeout each, and the others nothing.

    Args:
        seeds: Some of the nodes; the others are heard of from them.
        door: Makes connections to the node at an address.
        timeout: Seconds to wait for a connection and for each answer.
        clock: Where waits are measured.
        heard: What others of this process have learnt, and this one adds to: all seeds may be gone by now, or be nodes
            of another Cluster.
    """

    def __init__(
        self,
        seeds: Sequence[Address],
        door: Callable[[Address], Endpoint],
        timeout: float,
        clock: Clock,
        heard: dict[str, Any],
    ) -> None:
        self._seeds = tuple(seeds)
        # One step: two threads that come first at once get the same.
        self._members: Members = heard.setdefault("cluster", Members())
        self._door = door
        self._timeout = timeout
        self._clock = clock
        # Several threads may use these at once: values are replaced as a whole, and no lock can be left taken.
        self._map: SlotMap | None = None
        self._nodes: dict[Address, ConnectionPool] = {}
        self._silent: dict[Address, float] = {}
        self._doubted = False
        self._next_look = 0.0

    def owner(self, slot: int) -> Address:
        """The primary that keeps this slot, as far as is known.

        Raises:
            Stranger: It has left for another Cluster, and it is not known who keeps the slot now.
        """
        address = self._known().owner(slot)
        if address in self._members.strangers:
            raise UnexpectedNode(
                f"the lock store refused: the node that kept a key, {address[0]}:{address[1]}, {_LEFT}"
            )
        return address

    def number(self, slot: int) -> int:
        """Of the node that keeps a slot, the same in all processes; 0 while the map is not known. Asks nobody."""
        known = self._map
        if known is None:
            return 0
        host, port = known.owner(slot)
        return zlib.crc32(f"{host}:{port}".encode())

    def primaries(self) -> Sequence[Address]:
        return [address for address in self._known().addresses() if address not in self._members.strangers]

    def node(self, address: Address) -> ConnectionPool:
        found = self._nodes.get(address)
        if found is None:
            door = NodeEndpoint(self._door(address), lambda: self._members.expected(address))
            # One step: two threads that come first at once get the same.
            found = self._nodes.setdefault(address, ConnectionPool(door, timeout=self._timeout))
        return found

    def said(self, address: Address, say: Callable[[Any], T], within: float | None, *, asking: bool = False) -> T:
        """What ``say`` makes of a connection to a node.

        Args:
            address: The node's.
            say: Called with the connection.
            within: Seconds to wait for an answer, where that is less than usual.
            asking: The slot is on its way there, and who asks was sent by its owner.
        """
        began = self._clock.monotonic()
        try:
            with self.node(address).lent(within) as wire:
                return say(_Asking(wire) if asking else wire)
        except StoreUnavailable as error:
            self.failed(address, error, began)
            raise

    def failed(self, address: Address, error: StoreUnavailable, began: float) -> None:
        """A node that was asked since ``began`` gave no answer."""
        if isinstance(error, StoreRefused | StoreNotReady) and not isinstance(error, UnexpectedNode):
            return  # it did answer
        self._doubted = True
        now = self._clock.monotonic()
        if now - began >= self._timeout / 2:
            self._silent[address] = now + SILENCE

    def silent(self, address: Address) -> bool:
        """Has it just not answered in time, and so need not be waited for as long as others?"""
        return self._silent.get(address, 0.0) > self._clock.monotonic()

    def answered(self, address: Address) -> None:
        self._silent.pop(address, None)

    def correct(self, slot: int, owner: Address) -> None:
        """A node has said that this slot is kept by another."""
        self._known().moved[slot] = owner
        # Where one has moved, others have.
        self._doubted = True

    def invalidate(self) -> None:
        """The map is looked at before it is used again."""
        self._doubted = True

    def close(self) -> None:
        # The map is kept, though doubted: the nodes that it names may be all that is left of those known.
        nodes, self._nodes, self._silent = self._nodes, {}, {}
        self._doubted, self._next_look = True, 0.0
        for node in nodes.values():
            node.close()

    def _known(self) -> SlotMap:
        now = self._clock.monotonic()
        self._members.used(now)
        known = self._members.map
        if known is not self._map:
            self._adopt(known)
        if known is not None:
            if now < self._next_look or (not self._doubted and self._members.current(now)):
                return known
            # First, so that others do not look at once too.
            self._next_look = now + LOOK
        try:
            told = self._fetched(known)
        except StoreUnavailable as error:
            if known is None:
                raise
            if isinstance(error, UnexpectedNode):
                self._members.complain(error, now)
            return known  # it may still be right for some
        self._doubted = False
        self._members.believe(told, now)
        self._adopt(told)
        return told

    def _adopt(self, told: SlotMap | None) -> None:
        """Take the map for this one's own, and close what it no longer names."""
        self._map = told
        for address in self._nodes.keys() - set(told.addresses() if told else ()):
            gone = self._nodes.pop(address, None)
            if gone is not None:
                gone.close()

    def _fetched(self, known: SlotMap | None) -> SlotMap:
        """The map, from the first node that tells it."""
        end = self._clock.monotonic() + self._timeout
        errors: list[StoreUnavailable] = []
        for address in self._in_order(known):
            # Half of what is left: a dead one must not use up the time of the others.
            left = (end - self._clock.monotonic()) / 2
            if left < LEAST and errors:
                break
            try:
                return self._told_by(address, max(LEAST, left))
            except StoreUnavailable as error:
                errors.append(error)
        # What somebody has to change says more than that another one is away.
        raise next((error for error in errors if isinstance(error, StoreRefused | UnexpectedNode)), errors[0])

    def _in_order(self, known: SlotMap | None) -> Iterator[Address]:
        groups = [list(known.addresses()), list(known.ids)] if known else []
        # Another one first each time, because what one believes may be old.
        for group in (*groups, seeds := list(self._seeds)):
            rng.shuffle(group)
        every = dict.fromkeys(address for group in (*groups, seeds) for address in group)
        # Those that were silent, or have left, last.
        return iter(sorted(every, key=lambda address: (address in self._silent, address in self._members.strangers)))

    def _told_by(self, address: Address, seconds: float) -> SlotMap:
        slots, nodes = self.said(address, _slots, seconds)
        if type(slots) is ErrorReply:
            raise error_from_reply(slots)
        if not slots:
            raise error_from_reply("CLUSTERDOWN no node keeps a slot")
        told = SlotMap.of(slots, address, _text(nodes))
        self._members.judge(address, told, self._clock.monotonic())
        return told


def _slots(wire: RespConnection) -> tuple[Any, Any]:
    wire.send(_SLOTS + _NODES)
    slots, nodes = wire.read(), wire.read()
    if type(slots) is ErrorReply and slots.startswith("NOPERM") and "cluster_enabled:0" in _text(wire.ask(_INFO)):
        slots = ErrorReply("ERR cluster support disabled")  # what is wrong is not that this right is missing
    return slots, nodes


def _text(reply: Any) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""


class _Asking:
    """A connection on which a command is for a slot that is on its way to this node."""

    def __init__(self, wire: RespConnection) -> None:
        self._wire = wire
        self._owed = False

    @property
    def timeout(self) -> float:
        return self._wire.timeout

    def send(self, commands: bytes) -> None:
        self._wire.send(_ASKING + commands)
        self._owed = True

    def ask(self, commands: bytes) -> Any:
        self.send(commands)
        return self.read()

    def read(self) -> Any:
        leave = self._wire.read() if self._owed else None
        self._owed = False
        reply = self._wire.read()
        return leave if type(leave) is ErrorReply else reply
