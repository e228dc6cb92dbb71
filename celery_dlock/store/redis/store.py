"""Locks on Redis or Valkey: on one server, or on all that a topology makes one of."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import NotConfirmed, ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from ...keys.lock_name import LockName
from ...options.durability import PRIMARY, Durability
from ...utils.log import logger
from ..base import (
    FOREIGN_MS,
    QueueStepResult,
    ReleaseListener,
    ReleaseRequest,
    StoreInfo,
    call_again_if_reply_lost,
)
from ..model import Acquired, AcquireRequest, Grant, Holder, LastRun, Quarantine, Refusal, Released, Renewal
from ..queue_model import ClaimRequest, ExistingCall, Waiting
from . import commands, replies
from .commands import Command
from .connection import ErrorReply, RespConnection
from .execution import ScriptPipeline, execute
from .keys import LockKeys, node_key, presence_key, queue_indexes, sweeper_key
from .quarantine import quarantined
from .server_errors import error_from_reply, overwritten
from .server_info import read_info, store_info
from .topology import Pipeline, Topology

__all__ = ["RedisStore"]


#: What a script of ours answers when all is well.
_ANSWERS = frozenset({bytes, int, list, type(None)})
#: Locks of which a store remembers the keys.
NAMES = 128
#: Commands in one write: enough to make the round trip cheap, few enough not to hold the server up.
BATCH = 500
#: Turn (ms), tries and milliseconds among foreign workers of a sweep that only grants.
_NEVER_BURY = 60_000, 1_000_000, 10**12


class RedisStore:
    """A packed script for each verb, repeated here where it is known that it may be.

    Args:
        topology: The servers.
        prefix: The start of every key.
        probation: For how long one that may have lost leases grants nothing new; None: it grants at once.
    """

    def __init__(self, topology: Topology, prefix: str, probation: Quarantine | None = None) -> None:
        self._topology = topology
        self._prefix = prefix
        #: A run asks four times for the keys of its lock.
        self._keys: Callable[[LockName], LockKeys] = functools.lru_cache(NAMES)(functools.partial(LockKeys.of, prefix))
        self._probation = probation
        self._warned = False

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, claim: AcquireRequest) -> Acquired | Refusal:
        keys = self._keys(name)
        terms = () if self._probation is None else self._terms(keys, self._probation)
        command = commands.acquire(keys, acquisition, ttl_ms, claim, self._topology.wakes, terms)
        reply, short = self._said(command, claim.durability)
        if self._probation is not None:
            self._check_granted(reply, self._probation, keys, terms)
        # What wrote nothing needs no confirmation.
        if short is not None and (isinstance(reply, bytes) or reply[0] == b"parked"):
            raise short
        if isinstance(reply, bytes):
            token, since, rank, *once = reply.split()
            acquired = Acquired(int(token), int(since) / 1e6, int(rank))
            return acquired._replace(seed=once[0].decode(), after_crash=once[1] == b"1") if once else acquired
        return replies.refusal(reply, claim.identity.digest if claim.identity else "")

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool | None]:
        answers: list[bool | None] = []
        refusals: list[ErrorReply] = []
        for start in range(0, len(renewals), BATCH):
            batch = renewals[start : start + BATCH]
            calls = [(*commands.renew(self._keys(one.name), one), one.durability) for one in batch]
            told = self._each(ScriptPipeline(), calls, within)
            refusals += filter(_unexecuted, told)
            answers += map(_renewed, told)
        if refusals:
            error = self._refused(refusals[0])  # the topology hears of it also where some were renewed
            if len(refusals) == len(answers):
                raise error
        return answers

    def release(
        self, name: LockName, acquisition: str, ending: ReleaseRequest, durability: Durability = PRIMARY
    ) -> Released:
        keys = self._keys(name)
        command = commands.release(keys, acquisition, ending)
        if durability is not PRIMARY and not (ending.final or ending.used_ms or ending.once):
            durability = PRIMARY  # it leaves no mark, and a lock that comes back ends with its ttl
        try:
            (reply, short), known = self._said(command, durability), 0
        except ReplyTimeout:
            raise
        except ReplyLost:
            # Whether the first command freed the lock is not known, so nobody is told that it was lost.
            (reply, short), known = self._said(command, durability), 1
        if short is not None and not self._warned:
            self._warned = True
            logger.warning("the end of a run under %s may be forgotten by a failover: %s", name.text, short)
        told, granted = (reply, None) if isinstance(reply, int) else (reply[0], replies.grant(*reply[1:]))
        if told & 4 or (known and not ending.queue):
            # Whose release it was did not expect waiters, and so had not named their keys; or its answer was lost.
            granted = self.sweep(name, acquisition, *_NEVER_BURY).granted
        return Released(bool((told | known) & 1), bool(told & 2), granted)

    def shard(self, name: LockName) -> int:
        return self._topology.shard(self._keys(name).lock) if self._topology.clustered else 0

    def inspect(self, name: LockName) -> Holder | None:
        reply = self._again(commands.inspect(self._keys(name)))
        return replies.holder(reply) if reply else None

    def agree(self, name: LockName, acquisition: str, token: int, seed: str = "", tick: str = "") -> bool:
        """Take over the token (and the seed) of a vote that was won; false if the lock is another's here."""
        return bool(self._again(commands.adopt_token(self._keys(name), acquisition, token, seed, tick)))

    # -- names that were used

    def use(self, name: LockName, tick: str = "") -> LastRun | None:
        return replies.use(self._again(commands.last_run(self._keys(name), tick)), name.text)

    def forget(self, name: LockName, tick: str = "") -> bool:
        return bool(self._again(commands.forget_run(self._keys(name), tick)))

    def resolve(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "") -> bool:
        command = commands.resolve_run(self._keys(name), sent=sent, window_ms=window_ms, tick=tick)
        return bool(self._again(command))

    # -- claims of messages on their way

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        calls = [(*commands.claim(self._keys(name), request), request.durability) for name, request in publications]
        return list(map(replies.first, self._all(ScriptPipeline(operator.not_), calls)))

    def unclaim(self, name: LockName, task_id: str, turn: int, attempt: str = "") -> bool:
        return bool(self._again(commands.release_claim(self._keys(name), task_id, turn, attempt)))

    def keep_claims(self, claims: Sequence[tuple[LockName, str, int]]) -> None:
        built = [commands.extend_claim(self._keys(name), task_id, life_ms) for name, task_id, life_ms in claims]
        self._all(ScriptPipeline(), [(*one, PRIMARY) for one in built])

    # -- queues

    def sweep(
        self, name: LockName, granter: str, turn_ms: int, tries: int, foreign_ms: int = FOREIGN_MS
    ) -> QueueStepResult:
        reply = self._again(commands.sweep(self._keys(name), granter, turn_ms, tries, foreign_ms))
        buried, _, why = reply[3].decode().partition(" ")
        return QueueStepResult("", replies.grant(*reply[:3]), buried, why == "foreign")

    def published(self, name: LockName, identity: str, turn_ms: int) -> bool:
        return bool(self._again(commands.confirm_publish(self._keys(name), identity, turn_ms)))

    def pass_on(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        return bool(self._again(commands.pass_on(self._keys(name), grant, foreign=foreign, present=present)))

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> QueueStepResult:
        command = commands.remove_waiter(self._keys(name), identity, granter, bury=bury, ended=ended)
        entry, *granted = self._again(command)
        return QueueStepResult(entry.decode("utf-8", "replace"), replies.grant(*granted))

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        self._again(commands.mark_done(self._keys(name), identity, owner, age_us))

    def waiting(self, name: LockName, most: int) -> Waiting:
        count, *facts = self._again(commands.list_waiters(self._keys(name), most))
        return Waiting(count, tuple(map(replies.waiter, facts[::2], facts[1::2])))

    @property
    def clustered(self) -> bool:
        return self._topology.clustered

    def dead_letters_at(self, name: LockName) -> str:
        return self._keys(name).dead()

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        sweeper = sweeper_key(self._prefix, broker, duty)
        return int(self._again(commands.sweep_lease(sweeper, worker, life_ms)))

    def due(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        indexes, within_us = queue_indexes(self._prefix), round(within * 1e6)
        refusals: list[ErrorReply] = []
        # One script for all of them. In a Cluster they are in different slots: a script for each that exists.
        parts = self._existing(indexes, buckets, refusals) if self.clustered else [list(buckets)]
        built = [commands.list_due_queues([indexes[bucket] for bucket in part], most, within_us) for part in parts]
        told = self._told(ScriptPipeline(), [(*one, PRIMARY) for one in built], refusals) if built else []
        # A bucket whose server does not answer, or refuses, is looked at again in the next round.
        answered = [(part, reply) for part, reply in zip(parts, told, strict=True) if isinstance(reply, list)]
        found = [(part[place - 1], names) for part, reply in answered for place, names in _pairs(reply)]
        error = self._refused(refusals[0]) if refusals else None
        if error is not None and not found:
            raise error
        return [LockName(name.decode(), bucket) for bucket, names in found for name in names]

    def _existing(self, indexes: Sequence[str], buckets: Sequence[int], refusals: list[ErrorReply]) -> list[list[int]]:
        told = self._told(_Exist(), [("EXISTS", (indexes[bucket],)) for bucket in buckets], refusals)
        return [[bucket] for bucket, answer in zip(buckets, told, strict=True) if answer == 1]

    def _told(self, talk: Pipeline, calls: Sequence[Any], refusals: list[ErrorReply]) -> list[Any]:
        told = self._each(talk, calls)
        refusals += [reply for reply in told if type(reply) is ErrorReply]
        return told

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        self._again(commands.save_worker_record(node_key(self._prefix, node), worker, text, life_ms))

    def worker_records(self, node: str) -> dict[str, str]:
        return self._noted(node_key(self._prefix, node))

    def announce_workers(self, broker: str, life_ms: int) -> None:
        presence = presence_key(self._prefix, broker)
        self._again(commands.save_worker_record(presence, "workers", "running", life_ms))

    def has_workers(self, broker: str) -> bool:
        return bool(self._noted(presence_key(self._prefix, broker)))

    def _noted(self, key: str) -> dict[str, str]:
        reply = self._topology.call(key, _fields, key)
        if type(reply) is ErrorReply:
            raise self._refused(reply)
        texts = [part.decode("utf-8", "replace") for part in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def facts(self) -> StoreInfo:
        return store_info(self._topology.everywhere(read_info), clustered=self._topology.clustered)

    @contextmanager
    def waker(self, name: LockName) -> Iterator[ReleaseListener]:
        waker = self._topology.subscribe(self._keys(name).channel)
        try:
            yield waker
        finally:
            waker.close()

    def close(self) -> None:
        self._topology.close()

    # -- one call

    def _run(self, command: Command) -> Any:
        return self._said(command, PRIMARY)[0]

    def _said(self, command: Command, durability: Durability) -> tuple[Any, NotConfirmed | None]:
        """The reply, and what its confirmation lacks."""
        variant, texts = command
        if durability is PRIMARY or durability == PRIMARY:
            reply = self._topology.call(texts[0], execute, variant, texts)
            return reply if type(reply) in _ANSWERS else self._checked(reply), None
        told = self._topology.call(texts[0], execute, variant, texts, durability)
        if isinstance(told, ErrorReply):
            raise self._refused(told)
        reply, short = told
        return self._checked(reply), short

    def _checked(self, reply: Any) -> Any:
        if type(reply) is ErrorReply:
            raise self._refused(reply)
        if type(reply) is str:  # a status: no script of ours ends so
            raise StoreRefused(f"what answers is no Redis or Valkey, or something stands between: {reply[:40]!r}")
        return reply

    def _terms(self, keys: LockKeys, probation: Quarantine) -> tuple[str, ...]:
        return probation.delay_ms, str(self._topology.failover_epoch(keys.lock))

    def _check_granted(self, reply: Any, probation: Quarantine, keys: LockKeys, terms: tuple[str, ...]) -> None:
        """Raise if the reply says that the server is on probation."""
        if not isinstance(reply, bytes) and reply[0] == b"quarantined":
            _, left_ms, began = reply
            if began == b"1":
                self._enter_office(keys, *terms)
            raise quarantined(left_ms, probation)

    def _enter_office(self, keys: LockKeys, delay_ms: str, term: str) -> None:
        """Let the probation of all buckets begin with that of the first one that was asked for."""
        offices = keys.quarantines()
        for start in range(0, len(offices), BATCH):
            batch = offices[start : start + BATCH]
            calls = [(*commands.start_quarantine(office, delay_ms, term), PRIMARY) for office in batch]
            try:
                self._each(ScriptPipeline(), calls)
            except StoreUnavailable:
                return  # then each begins when it is asked for

    def _refused(self, reply: ErrorReply) -> StoreUnavailable:
        error = error_from_reply(reply)
        if isinstance(error, StoreNotReady):
            # Where its name leads may have changed: to the server that was promoted.
            self._topology.invalidate()
        return error

    def _each(self, talk: Pipeline, calls: Sequence[Any], within: float | None = None) -> list[Any]:
        return self._topology.each(talk, [(call[1][0], call) for call in calls], within)

    def _again(self, command: Command) -> Any:
        """Once more after a lost reply: for what is harmless twice with the same words."""
        return call_again_if_reply_lost(self._run, command)

    def _each_again(self, talk: Pipeline, calls: Sequence[Any]) -> list[Any]:
        answers = call_again_if_reply_lost(self._each, talk, calls)
        # Where one server of several has cut its connection, the others' answers stand.
        lost = [place for place, answer in enumerate(answers) if type(answer) is ReplyLost]
        if lost:
            for place, answer in zip(lost, self._each(talk, [calls[place] for place in lost]), strict=True):
                answers[place] = answer
        return answers

    def _all(self, talk: Pipeline, calls: Sequence[Any]) -> list[Any]:
        """In few writes, each once more after a lost reply."""
        told: list[Any] = []
        for start in range(0, len(calls), BATCH):
            told += self._each_again(talk, calls[start : start + BATCH])
        for reply in told:
            if type(reply) is ErrorReply:
                raise self._refused(reply)
            if isinstance(reply, StoreUnavailable):
                raise reply
        return told


class _Exist:
    """Asks of many keys whether each exists, without a script."""

    def send(self, wire: RespConnection, calls: Sequence[tuple[str, tuple[str]]]) -> None:
        keys = [key.encode() for _, (key,) in calls]
        wire.send(b"".join([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]))

    def read(self, wire: RespConnection, calls: Sequence[Any]) -> list[Any]:
        return [wire.read() for _ in calls]


def _pairs(reply: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(reply[::2], reply[1::2], strict=True)


def _unexecuted(reply: Any) -> bool:
    """Return whether the server refused this renewal without a look at the lock, as a replica or a full disk does."""
    return type(reply) is ErrorReply and not overwritten(reply)


def _renewed(reply: Any) -> bool | None:
    if isinstance(reply, StoreUnavailable) or _unexecuted(reply):
        return None
    # A key that was overwritten is one lost lease, and must not stop the renewal of all others.
    return type(reply) is not ErrorReply and bool(reply)


def _fields(wire: RespConnection, key: str) -> Any:
    return wire.ask(b"*2\r\n$7\r\nHGETALL\r\n$%d\r\n%b\r\n" % (len(key.encode()), key.encode()))
