"""A Redis Cluster: each command goes to the primary that owns the slot of its key.

redis-py's ``RedisCluster`` is not used, because it lacks three things that a lock store needs:

- one deadline for a call, including all redirections;
- pipelines in which a dead node fails its own commands only, because one pipeline renews leases on all nodes;
- the check that a node still belongs to the same Cluster.

Its connections and ``key_slot`` are used.

Single calls and pipelines are in one module, because they share the code that follows redirections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from redis.crc import key_slot

from ....errors import NotConfirmed, StoreNotReady, StoreUnavailable
from ....utils.clock import Clock, SystemClock
from ...location import Address
from ..connection import ErrorReply, RespConnection
from ..pool import ConnectionPool
from ..server_errors import error_from_reply
from ..topology import Pipeline
from .nodes import MIN_WAIT, ClusterNodes
from .slot_map import address_in

__all__ = ["Cluster"]

T = TypeVar("T")

#: The number of redirections that one command follows.
HOPS: Final = 5
#: Seconds between two tries while a slot is being moved.
PAUSE: Final = 0.01
#: The part of the timeout that a silent node gets in a pipeline, so that the calls of other nodes are not late.
SILENT_SHARE: Final = 1 / 4


class _Call(NamedTuple):
    """One call of a pipeline: its position, its slot, and its commands."""

    position: int
    slot: int
    commands: Any


_Exchange: TypeAlias = Generator[None, float, list[Any]]


class Cluster:
    """The topology of a Redis Cluster.

    Only primaries are used, because a replica may not know the latest state of a lock. Redirections are followed here:
    a node that redirects a command did not execute it. If a reply is lost, the caller repeats the call, as on a single
    server. The repetition goes to the current owner of the slot.

    Args:
        seeds: The addresses of some nodes. They report the others.
        options_at: Returns the connection options of an address.
        timeout: Seconds to wait for a connection and for each reply.
        clock: The clock for these waits.
        shared: What is known about the Cluster. All connections of this process share it.
    """

    clustered = True

    def __init__(
        self,
        seeds: Sequence[Address],
        options_at: Callable[[Address], Mapping[str, Any]],
        *,
        timeout: float,
        clock: Clock | None = None,
        shared: dict[str, Any] | None = None,
    ) -> None:
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._nodes = ClusterNodes(seeds, options_at, timeout, self._clock, {} if shared is None else shared)

    def call(self, key: str, operation: Callable[..., T], *args: Any, within: float | None = None) -> T:
        reply: T = self._call_owner(key_slot(key.encode()), lambda connection: operation(connection, *args), within)
        return reply

    def each(
        self,
        pipeline: Pipeline,
        calls: Sequence[tuple[str, Any]],
        within: float | None = None,
        *,
        awaits_moves: bool = True,
    ) -> list[Any]:
        every = [_Call(position, key_slot(key.encode()), commands) for position, (key, commands) in enumerate(calls)]
        answers: list[Any] = [None] * len(calls)
        end = self._clock.monotonic() + min(self._timeout, within or self._timeout)
        left = every
        for _ in range(HOPS):
            self._round(pipeline, left, answers, within)
            # Repeat all moved calls in one round, because all slots of a node may have moved.
            left = [call for call in left if self._moved(call.slot, answers[call.position])]
            if not left:
                break
        failed_nodes: dict[Address, StoreUnavailable] = {}
        for call in every:
            # Follow other redirections one by one, within the time of one call, because other leases wait.
            seconds = max(MIN_WAIT, end - self._clock.monotonic())
            answers[call.position] = self._settled(
                pipeline, call, answers[call.position], seconds, failed_nodes, awaits_moves=awaits_moves
            )
        # A write that was not confirmed was executed, so NotConfirmed is an answer.
        failed = [isinstance(answer, StoreUnavailable) and not isinstance(answer, NotConfirmed) for answer in answers]
        if answers and all(failed):
            raise answers[0]
        return answers

    def shard(self, key: str) -> int:
        return self._nodes.number(key_slot(key.encode()))

    def failover_epoch(self, _key: str) -> int:
        # Failovers are not counted here: a restarted node learns its role from the other nodes, and the scripts compare
        # its replication id.
        return 0

    def everywhere(self, operation: Callable[[RespConnection], T]) -> list[T]:
        return [self._nodes.call(address, operation, None) for address in self._nodes.primaries()]

    def servers(self) -> list[str]:
        return sorted(f"{host}:{port}" for host, port in self._nodes.primaries())

    def on(self, server: str, operation: Callable[..., T], *args: Any) -> T:
        host, _, port = server.rpartition(":")
        return self._nodes.call((host, int(port)), lambda connection: operation(connection, *args), None)

    def invalidate(self) -> None:
        self._nodes.invalidate()

    def close(self) -> None:
        self._nodes.close()

    # -- single calls

    def _call_owner(
        self,
        slot: int,
        say: Callable[[Any], Any],
        within: float | None,
        first_reply: Any = None,
        failed_nodes: dict[Address, StoreUnavailable] | None = None,
        *,
        awaits_moves: bool = True,
    ) -> Any:
        """Return the reply of the node that owns a slot, and follow redirections.

        Args:
            slot: The slot.
            say: Sends commands on a connection and reads the reply.
            within: Seconds to wait for a reply, if shorter than the timeout.
            first_reply: The reply that the owner sent already.
            failed_nodes: Nodes that just failed and are not asked again. This call adds to them.
            awaits_moves: As for :meth:`each`.
        """
        failed_nodes = {} if failed_nodes is None else failed_nodes
        end = self._clock.monotonic() + min(self._timeout, within or self._timeout)
        address, asking, hops = self._nodes.owner(slot), False, 0
        while True:
            reply = self._call_node(address, say, within, asking, failed_nodes) if first_reply is None else first_reply
            first_reply = None
            if type(reply) is not ErrorReply:
                return reply
            code = reply.partition(" ")[0]
            if code == "TRYAGAIN" and awaits_moves and self._clock.monotonic() + PAUSE < end:
                # Some keys of the call have moved and some have not. Ask the owner again until all have.
                time.sleep(PAUSE)
                address, asking, hops = self._nodes.owner(slot), False, 0
            elif code in {"MOVED", "ASK"}:
                hops += 1
                if hops > HOPS:
                    raise _disagree(reply)
                address, asking = address_in(reply, address), code == "ASK"
                if not asking:
                    self._nodes.correct(slot, address)
            else:
                return reply

    def _call_node(
        self,
        address: Address,
        say: Callable[[Any], Any],
        within: float | None,
        asking: bool,  # noqa: FBT001  # passed on to ClusterNodes.call
        failed_nodes: dict[Address, StoreUnavailable],
    ) -> Any:
        if address in failed_nodes:
            raise failed_nodes[address]
        try:
            return self._nodes.call(address, say, within, asking=asking)
        except StoreUnavailable as error:
            failed_nodes[address] = error
            raise

    # -- pipelines

    def _round(self, pipeline: Pipeline, calls: Sequence[_Call], answers: list[Any], within: float | None) -> None:
        """Send calls to the owners of their slots, and fill in the replies. Silent nodes are last, with less time."""
        groups: dict[Address, list[_Call]] = {}
        for call in calls:
            try:
                groups.setdefault(self._nodes.owner(call.slot), []).append(call)
            except StoreUnavailable as error:
                answers[call.position] = error
        usual = min(self._timeout, within or self._timeout)
        silent = [address for address in groups if self._nodes.silent(address)]
        prompt = [address for address in groups if address not in silent]
        for group, seconds in ((prompt, usual), (silent, usual * SILENT_SHARE)):
            self._ask({address: groups[address] for address in group}, pipeline, answers, seconds)

    def _ask(self, groups: dict[Address, list[_Call]], pipeline: Pipeline, answers: list[Any], seconds: float) -> None:
        """Write to all nodes, then read from all, within ``seconds`` in total."""
        began = self._clock.monotonic()
        started: dict[Address, _Exchange] = {}
        for address, calls in groups.items():
            exchange = _exchange(self._nodes.node(address), pipeline, [call.commands for call in calls], seconds)
            try:
                next(exchange)
            except StoreUnavailable as error:
                self._nodes.failed(address, error, began)
                _fill(answers, calls, error)
            else:
                started[address] = exchange
        for address, exchange in started.items():
            try:
                # Replies that have arrived are read even after the deadline.
                exchange.send(max(MIN_WAIT, began + seconds - self._clock.monotonic()))
            except StoreUnavailable as error:
                self._nodes.failed(address, error, began)
                _fill(answers, groups[address], error)
            except StopIteration as end:
                self._nodes.answered(address)
                for call, answer in zip(groups[address], end.value, strict=True):
                    answers[call.position] = answer

    def _moved(self, slot: int, answer: Any) -> bool:
        """Return whether the answer is a MOVED reply, and record the new owner."""
        if type(answer) is not ErrorReply or not answer.startswith("MOVED "):
            return False
        self._nodes.correct(slot, address_in(answer, self._nodes.owner(slot)))
        return True

    def _settled(
        self,
        pipeline: Pipeline,
        call: _Call,
        answer: Any,
        within: float,
        failed_nodes: dict[Address, StoreUnavailable],
        *,
        awaits_moves: bool,
    ) -> Any:
        """Return the final answer: follow redirections, and turn an error reply into an exception, except WRONGTYPE."""
        if type(answer) is not ErrorReply:
            return answer

        def say(connection: RespConnection) -> Any:
            pipeline.send(connection, [call.commands])
            return pipeline.read(connection, [call.commands])[0]

        try:
            answer = self._call_owner(call.slot, say, within, answer, failed_nodes, awaits_moves=awaits_moves)
        except StoreUnavailable as error:
            return error
        # In Redis 6.2 the code of an error inside a script is not the first word. WRONGTYPE concerns one key only.
        if type(answer) is not ErrorReply or "WRONGTYPE" in answer:
            return answer
        return error_from_reply(answer)


def _exchange(node: ConnectionPool, pipeline: Pipeline, calls: Sequence[Any], seconds: float) -> _Exchange:
    """Write the commands; read the replies when the caller sends the seconds to wait."""
    with node.lent(seconds) as connection:
        pipeline.send(connection, calls)
        connection.wait((yield))
        return pipeline.read(connection, calls)


def _fill(answers: list[Any], calls: Sequence[_Call], answer: Any) -> None:
    for call in calls:
        answers[call.position] = answer


def _disagree(redirection: str) -> StoreNotReady:
    return StoreNotReady(
        f"the lock store refused: its nodes disagree about the owner of a key; last reply: {redirection}"
    )
