"""A Redis Cluster as one place to keep keys at: each key's primary is asked, wherever its slot is just now."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from redis.connection import Connection
from redis.crc import key_slot
from redis.exceptions import MovedError

from ....errors import NotConfirmed, StoreNotReady, StoreRefused, StoreUnavailable
from ....utils.clock import Clock, SystemClock
from ...location import Address
from ..connection import ErrorReply, RespConnection, Subscription
from ..endpoint import Endpoint
from ..pool import ConnectionPool
from ..server_errors import error_from_reply
from ..topology import Pipeline
from .nodes import LEAST, ClusterNodes
from .slot_map import address_in

__all__ = ["Cluster"]

T = TypeVar("T")

#: Times that one command follows a slot from node to node.
HOPS: Final = 5
#: Seconds between two tries while a slot is half moved.
PAUSE: Final = 0.01
#: The part of the usual wait that a silent node is given, among others: for the sake of what else is to be asked.
SHORT: Final = 1 / 4


class _Call(NamedTuple):
    """One of many: its place among them, its slot, and what is said."""

    place: int
    slot: int
    said: Any


_Exchange: TypeAlias = Generator[None, float, list[Any]]


class Cluster:
    """The topology of many servers; primaries only, because a replica may not know the latest state of a lock.

    What a node says of a slot that has moved is followed here: it has carried nothing out. Whoever gets no answer
    repeats, as on a single server; that goes where the slot is by then.

    Args:
        seeds: Some of the nodes; the others are heard of from them.
        door: Makes connections to the node at an address.
        timeout: Seconds to wait for a connection and for each answer.
        clock: Where waits are measured.
        heard: What others of this process have learnt of the Cluster, and this one adds to.
    """

    clustered = True

    def __init__(
        self,
        seeds: Sequence[Address],
        door: Callable[[Address], Endpoint],
        *,
        timeout: float,
        clock: Clock | None = None,
        heard: dict[str, Any] | None = None,
    ) -> None:
        self._timeout = timeout
        self._clock = clock or SystemClock()
        self._nodes = ClusterNodes(seeds, door, timeout, self._clock, {} if heard is None else heard)
        self.wakes = "s"

    def call(self, key: str, talk: Callable[..., T], *words: Any, within: float | None = None) -> T:
        reply: T = self._carried(key_slot(key.encode()), lambda wire: talk(wire, *words), within)
        return reply

    def each(self, talk: Pipeline, calls: Sequence[tuple[str, Any]], within: float | None = None) -> list[Any]:
        every = [_Call(place, key_slot(key.encode()), said) for place, (key, said) in enumerate(calls)]
        answers: list[Any] = [None] * len(calls)
        end = self._clock.monotonic() + min(self._timeout, within or self._timeout)
        left = every
        for _ in range(HOPS):
            self._round(talk, left, answers, within)
            # All at once, because a whole node's slots may have moved.
            left = [call for call in left if self._moved(call.slot, answers[call.place])]
            if not left:
                break
        away: dict[Address, StoreUnavailable] = {}
        for call in every:
            # One by one, and yet no longer together than one may take: others' leases wait for these.
            seconds = max(LEAST, end - self._clock.monotonic())
            answers[call.place] = self._settled(talk, call, answers[call.place], seconds, away)
        # What is not confirmed was carried out, and is no more than an answer.
        failed = [isinstance(answer, StoreUnavailable) and not isinstance(answer, NotConfirmed) for answer in answers]
        if answers and all(failed):
            raise answers[0]
        return answers

    def shard(self, key: str) -> int:
        return self._nodes.number(key_slot(key.encode()))

    def failover_epoch(self, _key: str) -> int:
        # A node that comes back is told by the others who is in office now, and its replication id tells the scripts.
        return 0

    def everywhere(self, talk: Callable[[RespConnection], T]) -> list[T]:
        return [self._nodes.said(address, talk, None) for address in self._nodes.primaries()]

    def subscribe(self, channel: str) -> Subscription:
        if self.wakes == "s":
            try:
                return self._subscription(channel, "SSUBSCRIBE")
            except StoreRefused as error:
                if "unknown command" not in str(error):
                    raise
                self.wakes = "1"  # before Redis 7
        return self._subscription(channel, "SUBSCRIBE")

    def invalidate(self) -> None:
        self._nodes.invalidate()

    def close(self) -> None:
        self._nodes.close()

    # -- one call

    def _carried(
        self,
        slot: int,
        say: Callable[[Any], Any],
        within: float | None,
        told: Any = None,
        away: dict[Address, StoreUnavailable] | None = None,
    ) -> Any:
        """What the node of ``slot`` answers, wherever that is.

        Args:
            slot: Whose node is meant.
            say: Called with a connection to it.
            within: Seconds to wait for an answer, where that is less than usual.
            told: What the owner has answered already.
            away: Nodes that are not to be asked, because they have just not answered; this call adds to them.
        """
        away = {} if away is None else away
        end = self._clock.monotonic() + min(self._timeout, within or self._timeout)
        address, asking, hops = self._nodes.owner(slot), False, 0
        while True:
            reply = self._said(address, say, within, asking, away) if told is None else told
            told = None
            if type(reply) is not ErrorReply:
                return reply
            word = reply.partition(" ")[0]
            if word == "TRYAGAIN" and self._clock.monotonic() + PAUSE < end:
                # Some of its keys have moved and some not: from the owner on once more, until all have.
                time.sleep(PAUSE)
                address, asking, hops = self._nodes.owner(slot), False, 0
            elif word in {"MOVED", "ASK"}:
                hops += 1
                if hops > HOPS:
                    raise _disagree(reply)
                address, asking = address_in(reply, address), word == "ASK"
                if not asking:
                    self._nodes.correct(slot, address)
            else:
                return reply

    def _said(
        self,
        address: Address,
        say: Callable[[Any], Any],
        within: float | None,
        asking: bool,  # noqa: FBT001  # as ClusterNodes.said has it
        away: dict[Address, StoreUnavailable],
    ) -> Any:
        if address in away:
            raise away[address]
        try:
            return self._nodes.said(address, say, within, asking=asking)
        except StoreUnavailable as error:
            away[address] = error
            raise

    # -- many calls

    def _round(self, talk: Pipeline, calls: Sequence[_Call], answers: list[Any], within: float | None) -> None:
        """Fill in what the owners answer; those that were silent are asked behind the others, and not for long."""
        groups: dict[Address, list[_Call]] = {}
        for call in calls:
            try:
                groups.setdefault(self._nodes.owner(call.slot), []).append(call)
            except StoreUnavailable as error:
                answers[call.place] = error
        usual = min(self._timeout, within or self._timeout)
        silent = [address for address in groups if self._nodes.silent(address)]
        prompt = [address for address in groups if address not in silent]
        for some, seconds in ((prompt, usual), (silent, usual * SHORT)):
            self._ask({address: groups[address] for address in some}, talk, answers, seconds)

    def _ask(self, groups: dict[Address, list[_Call]], talk: Pipeline, answers: list[Any], seconds: float) -> None:
        """Write to all, and only then read: all of them together have so many seconds."""
        began = self._clock.monotonic()
        begun: dict[Address, _Exchange] = {}
        for address, calls in groups.items():
            exchange = _exchange(self._nodes.node(address), talk, [call.said for call in calls], seconds)
            try:
                next(exchange)
            except StoreUnavailable as error:
                self._nodes.failed(address, error, began)
                _fill(answers, calls, error)
            else:
                begun[address] = exchange
        for address, exchange in begun.items():
            try:
                # What has come meanwhile is read also when the time is over.
                exchange.send(max(LEAST, began + seconds - self._clock.monotonic()))
            except StoreUnavailable as error:
                self._nodes.failed(address, error, began)
                _fill(answers, groups[address], error)
            except StopIteration as end:
                self._nodes.answered(address)
                for call, answer in zip(groups[address], end.value, strict=True):
                    answers[call.place] = answer

    def _moved(self, slot: int, answer: Any) -> bool:
        """Has its owner said that another is? Then that is known from now on."""
        if type(answer) is not ErrorReply or not answer.startswith("MOVED "):
            return False
        self._nodes.correct(slot, address_in(answer, self._nodes.owner(slot)))
        return True

    def _settled(
        self, talk: Pipeline, call: _Call, answer: Any, within: float, away: dict[Address, StoreUnavailable]
    ) -> Any:
        """An answer that is one, or the error that it means: only of a key itself an error of the server stays one."""
        if type(answer) is not ErrorReply:
            return answer

        def say(wire: RespConnection) -> Any:
            talk.send(wire, [call.said])
            return talk.read(wire, [call.said])[0]

        try:
            answer = self._carried(call.slot, say, within, answer, away)
        except StoreUnavailable as error:
            return error
        # In Redis 6.2 the code of what failed inside a script is not the first word.
        if type(answer) is not ErrorReply or "WRONGTYPE" in answer:
            return answer
        return error_from_reply(answer)

    # -- wake-ups

    def _subscription(self, channel: str, verb: str) -> Subscription:
        slot = key_slot(channel.encode())
        place: list[Address] = []

        def use(subscribe: Callable[[Connection], Connection]) -> Connection:
            for _ in range(HOPS):
                address = self._nodes.owner(slot)
                place[:] = [address]
                began = self._clock.monotonic()
                try:
                    return self._nodes.node(address).opened(subscribe)
                except StoreUnavailable as error:
                    moved = error.__cause__
                    if not isinstance(moved, MovedError):
                        self._nodes.failed(address, error, began)
                        raise
                    self._nodes.correct(slot, (moved.host or address[0], moved.port))
            raise _disagree(f"MOVED {slot}")

        return Subscription(use, channel, verb, lambda: place == [self._nodes.owner(slot)])


def _exchange(node: ConnectionPool, talk: Pipeline, said: Sequence[Any], seconds: float) -> _Exchange:
    """Writes at once; reads when it is sent how long to wait for that."""
    with node.lent(seconds) as wire:
        talk.send(wire, said)
        wire.wait((yield))
        return talk.read(wire, said)


def _fill(answers: list[Any], calls: Sequence[_Call], answer: Any) -> None:
    for call in calls:
        answers[call.place] = answer


def _disagree(said: str) -> StoreNotReady:
    return StoreNotReady(f"the lock store refused: its nodes do not agree on who keeps a key; one said: {said}")
