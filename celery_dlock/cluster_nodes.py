"""The nodes of a Redis Cluster: which of them keeps a slot, and how to talk to it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from .causes import refused
from .chance import chance
from .clock import Clock
from .cluster_door import NodeDoor, Stranger
from .door import Door
from .errors import StoreNotReady, StoreRefused, StoreUnavailable
from .places import Address
from .slot_map import SlotMap
from .wire import ErrorReply, Wire
from .wires import Wires

__all__ = ["ClusterNodes"]

T = TypeVar("T")

#: Seconds between two looks at the map, while it is doubted.
LOOK: Final = 0.1
#: Seconds that a node which did not answer in time counts as silent; then it is waited for as long as others again.
SILENCE: Final = 1.0
#: Seconds after which those of another Cluster are believed, if nobody of the one that was known has been heard of.
ALONE: Final = 30.0
#: The shortest wait for an answer.
LEAST: Final = 0.02

_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
_INFO: Final = b"*1\r\n$4\r\nINFO\r\n"
_SLOTS: Final = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"


class ClusterNodes:
    """As much of a Cluster as one process has found out, and its connections there.

    The map is asked for again once something speaks against it, by the next one who needs it, and at most ten times a
    second: a dead node costs its callers a timeout each, and the others nothing.

    Args:
        seeds: Some of the nodes; the others are heard of from them.
        door: Makes connections to the node at an address.
        timeout: Seconds to wait for a connection and for each answer.
        clock: Where waits are measured.
        heard: Nodes that others have learnt of, and this one adds to, with what each calls itself: all seeds may be
            gone by now, or be nodes of another Cluster.
    """

    def __init__(
        self,
        seeds: Sequence[Address],
        door: Callable[[Address], Door],
        timeout: float,
        clock: Clock,
        heard: dict[Address, bytes],
    ) -> None:
        self._seeds = tuple(seeds)
        self._heard = heard
        self._door = door
        self._timeout = timeout
        self._clock = clock
        # Several threads may use these at once: values are replaced as a whole, and no lock can be left taken.
        self._map: SlotMap | None = None
        self._nodes: dict[Address, Wires] = {}
        self._silent: dict[Address, float] = {}
        self._doubted = False
        self._next_look = 0.0
        self._alone_since = math.inf

    def owner(self, slot: int) -> Address:
        """The primary that keeps this slot, as far as is known."""
        return self._known().owner(slot)

    def number(self, slot: int) -> int:
        """Of the node that keeps a slot, the same in all processes; 0 while the map is not known. Asks nobody."""
        known = self._map
        if known is None:
            return 0
        host, port = known.owner(slot)
        return zlib.crc32(f"{host}:{port}".encode())

    def primaries(self) -> Sequence[Address]:
        return self._known().addresses()

    def node(self, address: Address) -> Wires:
        found = self._nodes.get(address)
        if found is None:
            # What was heard, and not what the map says: another thread may replace that one in the meantime.
            door = NodeDoor(self._door(address), lambda: self._heard.get(address, b""))
            # One step: two threads that come first at once get the same.
            found = self._nodes.setdefault(address, Wires(door, timeout=self._timeout))
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
        if isinstance(error, StoreRefused | StoreNotReady) and not isinstance(error, Stranger):
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

    def doubt(self) -> None:
        """The map is looked at before it is used again."""
        self._doubted = True

    def close(self) -> None:
        # The map is kept, though doubted: the nodes that it names may be all that is left of those known.
        nodes, self._nodes, self._silent = self._nodes, {}, {}
        self._doubted, self._next_look = True, 0.0
        for node in nodes.values():
            node.close()

    def _known(self) -> SlotMap:
        known, now = self._map, self._clock.monotonic()
        if known is not None:
            if not self._doubted or now < self._next_look:
                return known
            # First, so that others do not look at once too.
            self._next_look = now + LOOK
        try:
            return self._learnt(self._fetched(known.addresses() if known else ()))
        except StoreUnavailable as error:
            if isinstance(error, Stranger):
                self._alone_since = min(self._alone_since, now)
                if now - self._alone_since >= ALONE:
                    self._map = None  # all of it was made anew
                    self._heard.update(dict.fromkeys(self._heard, b""))
            if known is None:
                raise
            return known  # it may still be right for some

    def _learnt(self, told: SlotMap) -> SlotMap:
        self._map, self._doubted, self._alone_since = told, False, math.inf
        self._heard.update({address: told.ids.get(address, b"") for address in told.addresses()})
        for address in self._nodes.keys() - set(told.addresses()):
            gone = self._nodes.pop(address, None)
            if gone is not None:
                gone.close()
        return told

    def _fetched(self, nodes: Sequence[Address]) -> SlotMap:
        """The map, from the first node that tells it."""
        end = self._clock.monotonic() + self._timeout
        errors: list[StoreUnavailable] = []
        for address in self._in_order(nodes):
            # Half of what is left: a dead one must not use up the time of the others.
            left = (end - self._clock.monotonic()) / 2
            if left < LEAST and errors:
                break
            try:
                return self._told_by(address, max(LEAST, left))
            except StoreUnavailable as error:
                errors.append(error)
        # What somebody has to change says more than that another one is away.
        raise next((error for error in errors if isinstance(error, StoreRefused | Stranger)), errors[0])

    def _in_order(self, nodes: Sequence[Address]) -> Iterator[Address]:
        every = list(dict.fromkeys((*nodes, *self._seeds, *self._heard)))
        # Another one first each time, because what one believes may be old; those that were silent last.
        chance.shuffle(every)
        return iter(sorted(every, key=lambda address: address in self._silent))

    def _told_by(self, address: Address, seconds: float) -> SlotMap:
        reply = self.said(address, _slots, seconds)
        if type(reply) is ErrorReply:
            raise refused(reply)
        if not reply:
            raise refused("CLUSTERDOWN no node keeps a slot")
        told, known = SlotMap.of(reply, address), set(self._heard.values()) - {b""}
        if told.ids and known and known.isdisjoint(told.ids.values()):
            raise Stranger("the lock store refused: what answers there belongs to another Cluster")
        return told


def _slots(wire: Wire) -> Any:
    reply = wire.ask(_SLOTS)
    if type(reply) is ErrorReply and reply.startswith("NOPERM") and "cluster_enabled:0" in _text(wire.ask(_INFO)):
        return ErrorReply("ERR cluster support disabled")  # what is wrong is not that this right is missing
    return reply


def _text(reply: Any) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""


class _Asking:
    """A connection on which a command is for a slot that is on its way to this node."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._owed = False

    @property
    def patience(self) -> float:
        return self._wire.patience

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
