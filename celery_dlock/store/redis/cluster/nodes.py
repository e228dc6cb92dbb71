"""The nodes of a Redis Cluster: the owner of each slot, and the connections to it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from ....errors import StoreNotReady, StoreRefused, StoreUnavailable
from ....utils.clock import Clock
from ....utils.rng import rng
from ...circuit_breaker import SHARDS
from ...location import Address
from ..connection import ErrorReply, RespConnection
from ..pool import ConnectionPool
from ..server_errors import error_from_reply
from .endpoint import NodeEndpoint, UnexpectedNode
from .members import Members
from .slot_map import SlotMap

__all__ = ["ClusterNodes"]

T = TypeVar("T")

_FOREIGN: Final = "belongs to another Cluster now; if the Cluster was replaced on purpose, restart this process"

#: Shortest time in seconds between two requests for the map.
REFRESH_INTERVAL: Final = 0.1
#: Seconds that a node counts as silent after it did not answer in time. Then it gets the full timeout again.
SILENCE: Final = 1.0
#: The shortest wait for a reply, in seconds.
MIN_WAIT: Final = 0.02

_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"
_INFO: Final = b"*1\r\n$4\r\nINFO\r\n"
_SLOTS: Final = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nSLOTS\r\n"
_NODES: Final = b"*2\r\n$7\r\nCLUSTER\r\n$5\r\nNODES\r\n"


class ClusterNodes:
    """The known nodes of a Cluster, and one connection pool for each.

    If a reply contradicted the map, or the map is some seconds old, the next call requests it again, at most ten times
    a second. A dead node costs a timeout only the callers that need this node.

    Args:
        seeds: The addresses of some nodes. They report the others.
        options_at: Returns the connection options of an address.
        timeout: Seconds to wait for a connection and for each reply.
        clock: The clock for these waits.
        shared: What is known about the Cluster. All connections of this process share it, because a new connection may
            find all seeds dead, or in another Cluster.
    """

    def __init__(
        self,
        seeds: Sequence[Address],
        options_at: Callable[[Address], Mapping[str, Any]],
        timeout: float,
        clock: Clock,
        shared: dict[str, Any],
    ) -> None:
        self._seeds = tuple(seeds)
        # One atomic step: two threads that are first at the same time get the same object.
        self._members: Members = shared.setdefault("cluster", Members())
        self._options_at = options_at
        self._timeout = timeout
        self._clock = clock
        # Several threads may use these at once. Values are replaced as a whole, so no lock is needed.
        self._map: SlotMap | None = None
        self._nodes: dict[Address, ConnectionPool] = {}
        self._silent: dict[Address, float] = {}
        self._stale = False
        self._next_look = 0.0

    def owner(self, slot: int) -> Address:
        """Return the primary that owns a slot, as far as this process knows.

        Raises:
            UnexpectedNode: The known owner belongs to another Cluster now, and the new owner is not known.
        """
        address = self._known().owner(slot)
        if address in self._members.foreign:
            raise UnexpectedNode(
                f"the lock store refused: the node that kept a key, {address[0]}:{address[1]}, {_FOREIGN}"
            )
        return address

    def number(self, slot: int) -> int:
        """Return a number for the owner of a slot, equal in all processes; 0 if the map is not known. Does no I/O."""
        known = self._map
        if known is None:
            return 0
        host, port = known.owner(slot)
        return zlib.crc32(f"{host}:{port}".encode()) % SHARDS

    def primaries(self) -> Sequence[Address]:
        return [address for address in self._known().addresses() if address not in self._members.foreign]

    def node(self, address: Address) -> ConnectionPool:
        found = self._nodes.get(address)
        if found is None:
            endpoint = NodeEndpoint(self._options_at(address), lambda: self._members.expected(address))
            # One atomic step: two threads that are first at the same time get the same object.
            found = self._nodes.setdefault(address, ConnectionPool(endpoint, timeout=self._timeout))
        return found

    def call(self, address: Address, say: Callable[[Any], T], within: float | None, *, asking: bool = False) -> T:
        """Return the result of ``say``, called with a connection to a node.

        Args:
            address: The address of the node.
            say: Sends commands and reads the replies.
            within: Seconds to wait for a reply, if shorter than the timeout.
            asking: Whether an ASK reply named this node, because the slot is being moved to it.
        """
        began = self._clock.monotonic()
        try:
            with self.node(address).lent(within) as connection:
                return say(_Asking(connection) if asking else connection)
        except StoreUnavailable as error:
            self.failed(address, error, began)
            raise

    def failed(self, address: Address, error: StoreUnavailable, began: float) -> None:
        """Record that a request that was sent at the time ``began`` failed. An error reply does not count."""
        if isinstance(error, StoreRefused | StoreNotReady) and not isinstance(error, UnexpectedNode):
            return  # it replied
        self._stale = True
        now = self._clock.monotonic()
        if now - began >= self._timeout / 2:
            self._silent[address] = now + SILENCE

    def silent(self, address: Address) -> bool:
        """Return whether the node missed a timeout during the last second. If so, it gets a shorter timeout."""
        return self._silent.get(address, 0.0) > self._clock.monotonic()

    def answered(self, address: Address) -> None:
        self._silent.pop(address, None)

    def correct(self, slot: int, owner: Address) -> None:
        """Record the new owner of a slot, from a MOVED reply."""
        self._known().moved[slot] = owner
        # If one slot moved, others may have moved too.
        self._stale = True

    def invalidate(self) -> None:
        """Request the map again before its next use."""
        self._stale = True

    def close(self) -> None:
        # Keep the map, marked as stale: its nodes may be the only known ones that are alive.
        nodes, self._nodes, self._silent = self._nodes, {}, {}
        self._stale, self._next_look = True, 0.0
        for node in nodes.values():
            node.close()

    def _known(self) -> SlotMap:
        now = self._clock.monotonic()
        self._members.touch(now)
        known = self._members.map
        if known is not self._map:
            self._adopt(known)
        if known is not None:
            if now < self._next_look or (not self._stale and self._members.current(now)):
                return known
            # Set it first, so that other threads do not request the map too.
            self._next_look = now + REFRESH_INTERVAL
        try:
            reported = self._fetched(known)
        except StoreUnavailable as error:
            if known is None:
                raise
            if isinstance(error, UnexpectedNode):
                self._members.log_foreign(error, now)
            return known  # it may still be right for some slots
        self._stale = False
        self._members.accept(reported, now)
        self._adopt(reported)
        return reported

    def _adopt(self, reported: SlotMap | None) -> None:
        """Use a map, and close the connections to nodes that it does not name."""
        self._map = reported
        for address in self._nodes.keys() - set(reported.addresses() if reported else ()):
            removed = self._nodes.pop(address, None)
            if removed is not None:
                removed.close()

    def _fetched(self, known: SlotMap | None) -> SlotMap:
        """Return the map of the first node that reports one."""
        end = self._clock.monotonic() + self._timeout
        errors: list[StoreUnavailable] = []
        for address in self._in_order(known):
            # Half of the remaining time, so that a dead node leaves time for the others.
            left = (end - self._clock.monotonic()) / 2
            if left < MIN_WAIT and errors:
                break
            try:
                return self._reported_by(address, max(MIN_WAIT, left))
            except StoreUnavailable as error:
                errors.append(error)
        # Prefer an error that the operator must correct to the error of an unreachable node.
        raise next((error for error in errors if isinstance(error, StoreRefused | UnexpectedNode)), errors[0])

    def _in_order(self, known: SlotMap | None) -> Iterator[Address]:
        groups = [list(known.addresses()), list(known.ids)] if known else []
        # Shuffle, because the map of any one node may be outdated.
        for group in (*groups, seeds := list(self._seeds)):
            rng.shuffle(group)
        every = dict.fromkeys(address for group in (*groups, seeds) for address in group)
        # Silent nodes and nodes of another Cluster come last.
        return iter(sorted(every, key=lambda address: (address in self._silent, address in self._members.foreign)))

    def _reported_by(self, address: Address, seconds: float) -> SlotMap:
        slots, nodes = self.call(address, _slots, seconds)
        if type(slots) is ErrorReply:
            raise error_from_reply(slots)
        if not slots:
            raise error_from_reply("CLUSTERDOWN no node keeps a slot")
        reported = SlotMap.of(slots, address, _text(nodes))
        self._members.check(address, reported, self._clock.monotonic())
        return reported


def _slots(connection: RespConnection) -> tuple[Any, Any]:
    connection.send(_SLOTS + _NODES)
    slots, nodes = connection.read(), connection.read()
    if type(slots) is ErrorReply and slots.startswith("NOPERM") and "cluster_enabled:0" in _text(connection.ask(_INFO)):
        slots = ErrorReply("ERR cluster support disabled")  # this is the cause, not the missing permission
    return slots, nodes


def _text(reply: Any) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""


class _Asking:
    """A connection to the node to which a slot is being moved. It sends ASKING before each command."""

    def __init__(self, connection: RespConnection) -> None:
        self._connection = connection
        self._asking_sent = False

    @property
    def timeout(self) -> float:
        return self._connection.timeout

    def wait(self, seconds: float) -> None:
        self._connection.wait(seconds)

    def send(self, commands: bytes) -> None:
        self._connection.send(_ASKING + commands)
        self._asking_sent = True

    def ask(self, commands: bytes) -> Any:
        self.send(commands)
        return self.read()

    def read_all(self, count: int) -> list[Any]:
        return [self.read() for _ in range(count)]

    def read(self) -> Any:
        asking = self._connection.read() if self._asking_sent else None
        self._asking_sent = False
        reply = self._connection.read()
        return asking if type(asking) is ErrorReply else reply
