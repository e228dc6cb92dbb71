"""Locks on Redis or Valkey: on one server, or on all that a topology makes one of."""

from __future__ import annotations

import functools
import itertools
import operator
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

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
from . import replies
from .connection import ErrorReply, RespConnection
from .keys import LockKeys, node_key, presence_key, queue_indexes, sweeper_key
from .quarantine import on_probation
from .replication_wait import PipelineWithWait, execute_and_wait
from .scripts import (
    ACQUIRE,
    AGREE,
    CLAIM,
    DONE,
    DUE,
    ENTER_OFFICE,
    FORGET,
    INSPECT,
    KEEP_CLAIM,
    NOTE,
    PASS_ON,
    PUBLISHED,
    RELEASE,
    RENEW,
    RESOLVE,
    SWEEP,
    SWEEP_LEASE,
    TAKE_OUT,
    UNCLAIM,
    USE,
    WAITING,
    Script,
)
from .server_errors import error_from_reply, overwritten
from .topology import Pipeline, Topology

__all__ = ["RedisStore"]


_Call: TypeAlias = tuple[Sequence[str], Sequence[str]]

#: How long a done mark lives: longer than any broker redelivers (Redis' visibility timeout is 1 h by default).
DONE_MS = 24 * 3600 * 1000
#: How long a tombstone lives: longer than a command can linger in a socket or a stopped server's queue.
TOMBSTONE_MS = 10 * 60 * 1000
#: What a script of ours answers when all is well.
_ANSWERS = frozenset({bytes, int, list, type(None)})
#: Locks of which a store remembers the keys.
NAMES = 128
#: Commands in one write: enough to make the round trip cheap, few enough not to hold the server up.
BATCH = 500
#: The first version that has it. Valkey says which Redis it is like.
_WAITAOF = 7, 2
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
        identity = claim.identity.digest if claim.identity else ""
        names = [keys.lock, keys.last, *keys.marks(acquisition, identity)]
        if identity and claim.once:
            names.append(keys.used(claim.tick))
        args: tuple[str, ...] = (
            acquisition,
            str(ttl_ms),
            identity,
            "1" if claim.redelivered else "0",
            "1" if claim.copied or claim.redelivered else "0",
            str(claim.age_us),
            "" if claim.rank_us is None else str(claim.rank_us),
            self._topology.wakes if claim.waits else "0",
            *claim.by,
            str(claim.keep_ms),
        )
        if claim.place:
            names += (*keys.queue(), keys.dead())
            place = claim.place
            args += (name.text, place.entry, str(place.limit), "1" if place.ousts else "0")
            args += (str(place.after_us), place.turn)
        if claim.once:
            args += (claim.by.text, str(claim.begun_ms), "1" if claim.hold else "0")
        if self._probation is None:
            reply, short = self._said(ACQUIRE, names, args, claim.durability)
        else:
            reply, short = self._granted(self._probation, keys, names, args, claim.durability)
        # What wrote nothing needs no confirmation.
        if short is not None and (isinstance(reply, bytes) or reply[0] == b"parked"):
            raise short
        if isinstance(reply, bytes):
            token, since, rank, *once = reply.split()
            acquired = Acquired(int(token), int(since) / 1e6, int(rank))
            return acquired._replace(seed=once[0].decode(), after_crash=once[1] == b"1") if once else acquired
        return replies.refusal(reply, identity)

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool | None]:
        answers: list[bool | None] = []
        refusals: list[ErrorReply] = []
        for start in range(0, len(renewals), BATCH):
            calls = [
                ((self._keys(r.name).lock,), (r.acquisition, str(r.ttl_ms), *itertools.chain(*r.notes)), r.durability)
                for r in renewals[start : start + BATCH]
            ]
            told = self._each(_many(RENEW, calls, bool), calls, within)
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
        names, args = _of_release(keys, acquisition, ending)
        if not (ending.final or ending.used_ms or ending.once):
            durability = PRIMARY  # it leaves no mark, and a lock that comes back ends with its ttl
        try:
            (reply, short), known = self._said(RELEASE, names, args, durability), 0
        except ReplyTimeout:
            raise
        except ReplyLost:
            # Whether the first command freed the lock is not known, so nobody is told that it was lost.
            (reply, short), known = self._said(RELEASE, names, args, durability), 1
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
        reply = self._again(INSPECT, [self._keys(name).lock], ())
        return replies.holder(reply) if reply else None

    def agree(self, name: LockName, acquisition: str, token: int, seed: str = "", tick: str = "") -> bool:
        """Take over the token (and the seed) of a vote that was won; false if the lock is another's here."""
        keys = self._keys(name)
        names = [keys.lock, keys.last, *([keys.used(tick)] if seed else [])]
        return bool(self._again(AGREE, names, (acquisition, str(token), *([seed] if seed else []))))

    # -- names that were used

    def use(self, name: LockName, tick: str = "") -> LastRun | None:
        keys = self._keys(name)
        return replies.use(self._again(USE, (keys.lock, keys.used(tick)), ()), name.text)

    def forget(self, name: LockName, tick: str = "") -> bool:
        # The number tells the second of two equal commands from another's.
        return bool(self._again(FORGET, (self._keys(name).used(tick),), (uuid.uuid4().hex, str(TOMBSTONE_MS))))

    def resolve(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "") -> bool:
        keys = self._keys(name)
        args = (uuid.uuid4().hex, "used" if sent else "free", str(window_ms))
        return bool(self._again(RESOLVE, (keys.lock, keys.used(tick)), args))

    # -- claims of messages on their way

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        calls = [(_of_claim(self._keys(name), p.attempt), _claimed(p), p.durability) for name, p in publications]
        return list(map(replies.first, self._all(_many(CLAIM, calls, operator.not_), calls)))

    def unclaim(self, name: LockName, task_id: str, turn: int, attempt: str = "") -> bool:
        keys = self._keys(name)
        names, args = [keys.queued()], [task_id, str(turn)]
        if attempt:
            names.append(keys.tombstone(attempt))
            args += attempt, str(TOMBSTONE_MS)
        return bool(self._again(UNCLAIM, names, args))

    def keep_claims(self, claims: Sequence[tuple[LockName, str, int]]) -> None:
        calls = [((self._keys(name).queued(),), (task_id, str(life_ms))) for name, task_id, life_ms in claims]
        self._all(_Many(KEEP_CLAIM), calls)

    # -- queues

    def sweep(
        self, name: LockName, granter: str, turn_ms: int, tries: int, foreign_ms: int = FOREIGN_MS
    ) -> QueueStepResult:
        keys = self._keys(name)
        args = (name.text, granter, str(turn_ms), str(tries), str(foreign_ms))
        reply = self._again(SWEEP, (*_of_queue(keys), keys.channel), args)
        buried, _, why = reply[3].decode().partition(" ")
        return QueueStepResult("", replies.grant(*reply[:3]), buried, why == "foreign")

    def published(self, name: LockName, identity: str, turn_ms: int) -> bool:
        keys = self._keys(name)
        _, parked, _, index = keys.queue()
        return bool(self._again(PUBLISHED, (keys.lock, parked, index), (identity, name.text, str(turn_ms))))

    def pass_on(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        keys = self._keys(name)
        args = (grant.identity, grant.turn, name.text, ("2" if present else "1") if foreign else "0")
        return bool(self._again(PASS_ON, (keys.lock, keys.queue()[3]), args))

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> QueueStepResult:
        keys = self._keys(name)
        args = (name.text, identity, "0" if bury else str(DONE_MS), granter, "1" if ended else "0")
        entry, *granted = self._again(TAKE_OUT, (*_of_queue(keys), keys.done(identity), keys.channel), args)
        return QueueStepResult(entry.decode("utf-8", "replace"), replies.grant(*granted))

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        keys = self._keys(name)
        self._again(DONE, [keys.lock, keys.done(identity)], (identity, str(DONE_MS), str(age_us), owner))

    def waiting(self, name: LockName, most: int) -> Waiting:
        keys = self._keys(name)
        count, *facts = self._again(WAITING, (keys.lock, *keys.queue()[:3]), (str(most),))
        return Waiting(count, tuple(map(replies.waiter, facts[::2], facts[1::2])))

    @property
    def clustered(self) -> bool:
        return self._topology.clustered

    def dead_letters_at(self, name: LockName) -> str:
        return self._keys(name).dead()

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        key = sweeper_key(self._prefix, broker, duty)
        return int(self._again(SWEEP_LEASE, (key,), (worker, str(life_ms))))

    def due(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        args, indexes = (str(most), str(round(within * 1e6))), queue_indexes(self._prefix)
        refusals: list[ErrorReply] = []
        # One script for all of them. In a Cluster they are in different slots: a script for each that exists.
        parts = self._existing(indexes, buckets, refusals) if self.clustered else [list(buckets)]
        calls = [(tuple(indexes[bucket] for bucket in part), args) for part in parts]
        told = self._told(_Many(DUE), calls, refusals) if calls else []
        # A bucket whose server does not answer, or refuses, is looked at again in the next round.
        answered = [(part, reply) for part, reply in zip(parts, told, strict=True) if isinstance(reply, list)]
        found = [(part[place - 1], names) for part, reply in answered for place, names in _pairs(reply)]
        error = self._refused(refusals[0]) if refusals else None
        if error is not None and not found:
            raise error
        return [LockName(name.decode(), bucket) for bucket, names in found for name in names]

    def _existing(self, indexes: Sequence[str], buckets: Sequence[int], refusals: list[ErrorReply]) -> list[list[int]]:
        told = self._told(_Exist(), [((indexes[bucket],), ()) for bucket in buckets], refusals)
        return [[bucket] for bucket, answer in zip(buckets, told, strict=True) if answer == 1]

    def _told(self, talk: Pipeline, calls: Sequence[Any], refusals: list[ErrorReply]) -> list[Any]:
        told = self._each(talk, calls)
        refusals += [reply for reply in told if type(reply) is ErrorReply]
        return told

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        self._again(NOTE, (node_key(self._prefix, node),), (worker, text, str(life_ms)))

    def worker_records(self, node: str) -> dict[str, str]:
        return self._noted(node_key(self._prefix, node))

    def announce_workers(self, broker: str, life_ms: int) -> None:
        self._again(NOTE, (presence_key(self._prefix, broker),), ("workers", "running", str(life_ms)))

    def has_workers(self, broker: str) -> bool:
        return bool(self._noted(presence_key(self._prefix, broker)))

    def _noted(self, key: str) -> dict[str, str]:
        reply = self._topology.call(key, _fields, key)
        if type(reply) is ErrorReply:
            raise self._refused(reply)
        texts = [part.decode("utf-8", "replace") for part in reply]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def facts(self) -> StoreInfo:
        texts = self._topology.everywhere(_info)
        told = [dict(line.split(":", 1) for line in text.splitlines() if ":" in line) for text in texts]
        if not self._topology.clustered and told[0].get("cluster_enabled") == "1":
            raise error_from_reply("MOVED: cluster_enabled is 1")
        if "sentinel" in (told[0].get("redis_mode"), told[0].get("server_mode")):
            raise error_from_reply("SENTINEL redis_mode is sentinel")
        if replica := next((facts for facts in told if facts.get("role") == "slave"), None):
            raise error_from_reply(
                f"READONLY it is a replica of {replica.get('master_host')}:{replica.get('master_port')}"
            )
        policies = [facts.get("maxmemory_policy", "") for facts in told]
        evicting = (policy for policy in policies if policy != "noeviction")
        durable = all(facts.get("aof_enabled") == "1" for facts in told)
        fsyncs = durable and all(_version(facts.get("redis_version", "")) >= _WAITAOF for facts in told)
        return StoreInfo(durable, next(evicting, "noeviction"), fsyncs=fsyncs, replicas=_replicas(told))

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

    def _run(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
        return self._said(script, keys, args, PRIMARY)[0]

    def _said(
        self, script: Script, keys: Sequence[str], args: Sequence[str], durability: Durability
    ) -> tuple[Any, NotConfirmed | None]:
        """The reply, and what its confirmation lacks."""
        if durability is PRIMARY or durability == PRIMARY:
            reply = self._topology.call(keys[0], _evaluated, script, keys, args)
            return reply if type(reply) in _ANSWERS else self._checked(reply), None
        told = self._topology.call(keys[0], execute_and_wait, script, keys, args, durability)
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

    def _granted(
        self, probation: Quarantine, keys: LockKeys, names: list[str], args: tuple[str, ...], durability: Durability
    ) -> tuple[Any, NotConfirmed | None]:
        """What the acquire script answers, unless the server is on probation."""
        terms = probation.delay_ms, str(self._topology.failover_epoch(keys.lock))
        told = self._said(ACQUIRE, [*names, keys.office()], (*args, *terms), durability)
        if not isinstance(told[0], bytes) and told[0][0] == b"probation":
            _, left_ms, began = told[0]
            if began == b"1":
                self._enter_office(keys, *terms)
            raise on_probation(left_ms, probation)
        return told

    def _enter_office(self, keys: LockKeys, *terms: str) -> None:
        """Let the probation of all buckets begin with that of the first one that was asked for."""
        offices = keys.offices()
        for start in range(0, len(offices), BATCH):
            calls = [((office,), terms) for office in offices[start : start + BATCH]]
            try:
                self._each(_Many(ENTER_OFFICE), calls)
            except StoreUnavailable:
                return  # then each begins when it is asked for

    def _refused(self, reply: ErrorReply) -> StoreUnavailable:
        error = error_from_reply(reply)
        if isinstance(error, StoreNotReady):
            # Where its name leads may have changed: to the server that was promoted.
            self._topology.invalidate()
        return error

    def _each(self, talk: Pipeline, calls: Sequence[Any], within: float | None = None) -> list[Any]:
        return self._topology.each(talk, [(call[0][0], call) for call in calls], within)

    def _again(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
        """Once more after a lost reply: for what is harmless twice with the same words."""
        return call_again_if_reply_lost(self._run, script, keys, args)

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


def _evaluated(wire: RespConnection, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
    reply = wire.ask(script.packed(keys, args))
    if type(reply) is ErrorReply and reply.startswith("NOSCRIPT"):
        # The server forgot it (a restart, SCRIPT FLUSH); the whole text loads it again.
        reply = wire.ask(script.packed(keys, args, whole=True))
    return reply


class _Many:
    """One script many times."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def send(self, wire: RespConnection, calls: Sequence[_Call]) -> None:
        wire.send(b"".join([self._script.packed(call[0], call[1]) for call in calls]))

    def read(self, wire: RespConnection, calls: Sequence[_Call]) -> list[Any]:
        told = [wire.read() for _ in calls]
        for place, reply in enumerate(told):
            if type(reply) is ErrorReply and reply.startswith("NOSCRIPT"):
                told[place] = wire.ask(self._script.packed(*calls[place][:2], whole=True))
        return told


class _Exist:
    """Asks of many keys whether each exists, without a script."""

    def send(self, wire: RespConnection, calls: Sequence[_Call]) -> None:
        keys = [call[0][0].encode() for call in calls]
        wire.send(b"".join([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]))

    def read(self, wire: RespConnection, calls: Sequence[_Call]) -> list[Any]:
        return [wire.read() for _ in calls]


def _pairs(reply: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(reply[::2], reply[1::2], strict=True)


def _replicas(told: Sequence[Mapping[str, str]]) -> int | None:
    counts = [facts.get("connected_slaves", "") for facts in told]
    return min(map(int, counts)) if all(count.isdigit() for count in counts) else None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _many(script: Script, calls: Sequence[tuple[Any, Any, Durability]], wrote: Callable[[Any], bool]) -> Pipeline:
    durable = any(durability != PRIMARY for _, _, durability in calls)
    return PipelineWithWait(script, wrote) if durable else _Many(script)


def _unexecuted(reply: Any) -> bool:
    """Return whether the server refused this renewal without a look at the lock, as a replica or a full disk does."""
    return type(reply) is ErrorReply and not overwritten(reply)


def _renewed(reply: Any) -> bool | None:
    if isinstance(reply, StoreUnavailable) or _unexecuted(reply):
        return None
    # A key that was overwritten is one lost lease, and must not stop the renewal of all others.
    return type(reply) is not ErrorReply and bool(reply)


def _info(wire: RespConnection) -> str:
    # All of it: before Redis 7 it takes one section at a time.
    reply = wire.ask(b"*1\r\n$4\r\nINFO\r\n")
    if type(reply) is ErrorReply:
        raise error_from_reply(reply)
    return bytes(reply).decode("utf-8", "replace")


def _fields(wire: RespConnection, key: str) -> Any:
    return wire.ask(b"*2\r\n$7\r\nHGETALL\r\n$%d\r\n%b\r\n" % (len(key.encode()), key.encode()))


def _of_release(keys: LockKeys, acquisition: str, ending: ReleaseRequest) -> tuple[list[str], tuple[str, ...]]:
    identity, once = ending.identity, ending.used_ms or ending.once
    names = [keys.lock, keys.channel, *keys.marks(acquisition, identity)]
    if identity and once:
        names.append(keys.used(ending.tick))
    args: tuple[str, ...] = (
        acquisition,
        f"{'-' if ending.rolled_back else ''}{TOMBSTONE_MS}" if ending.outcome_unknown else "0",
        str(DONE_MS) if ending.final and identity else "0",
        str(ending.used_ms) if identity else "0",
    )
    if once or ending.reserved_for or ending.queue:
        window_ms = ending.window_ms if ending.once and identity else 0
        args += (identity, ending.by, ending.seed, str(window_ms), ending.reserved_for, str(ending.heir_ms))
    if ending.queue:
        names += keys.queue()
        args += (keys.name,)
    return names, args


def _of_queue(keys: LockKeys) -> tuple[str, ...]:
    return (keys.lock, *keys.queue(), keys.dead())


def _of_claim(keys: LockKeys, attempt: str) -> tuple[str, ...]:
    return (keys.queued(), keys.lock, *keys.queue()[:3], keys.tombstone(attempt))


def _claimed(publication: ClaimRequest) -> tuple[str, ...]:
    task_id, turn, life_ms, running, by, attempt, _ = publication
    return (task_id, str(life_ms), "1" if running else "0", str(turn), by.task, by.node, by.task_id, attempt)
