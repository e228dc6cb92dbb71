"""Locks on one Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from .. import replies
from ..errors import ReplyLost, StoreRefused
from ..keys import LockKeys
from ..names import LockName
from ..records import (
    Acquired,
    Claim,
    Holder,
    Refusal,
    Released,
    Renewal,
    Waiting,
)
from ..scripts import ACQUIRE, DUE, INSPECT, PUBLISHED, RELEASE, RENEW, SWEEP, TAKE_OUT, WAITING, Script
from ..store import Ending, Taken, Waker
from ..wire import ErrorReply, Wire, Wires

__all__ = ["RedisStore"]

_Call: TypeAlias = tuple[Sequence[str], Sequence[str]]

#: How long a done mark lives: longer than any broker redelivers (Redis' visibility timeout is 1 h by default).
DONE_MS = 24 * 3600 * 1000
#: How long a tombstone lives: longer than a command can linger in a socket or a stopped server's queue.
TOMBSTONE_MS = 10 * 60 * 1000
#: Commands in one write: enough to make the round trip cheap, few enough not to hold the server up.
BATCH = 500
#: Turn (ms) and tries of a sweep that only grants.
_NEVER_BURY = 60_000, 1_000_000


class RedisStore:
    """Locks on one server: a packed script for each verb, repeated here where it is known that it may be.

    Args:
        url: As redis-py reads it.
        timeout: Seconds to wait for a connection and for each answer.

    Raises:
        ValueError, TypeError: redis-py cannot make a connection of this URL.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self._wires = Wires(url, timeout=timeout)

    def acquire(self, keys: LockKeys, acquisition: str, ttl_ms: int, claim: Claim) -> Acquired | Refusal:
        identity = claim.identity.digest if claim.identity else ""
        names = [keys.lock, keys.last, keys.tombstone(acquisition)]
        if identity:
            names.append(keys.done(identity))
            if claim.once:
                names.append(keys.used())
        args: tuple[str, ...] = (
            acquisition,
            str(ttl_ms),
            identity,
            "1" if claim.redelivered else "0",
            "1" if claim.copied or claim.redelivered else "0",
            str(claim.age_us),
            "" if claim.rank_us is None else str(claim.rank_us),
            "1" if claim.waits else "0",
            *claim.by,
        )
        if claim.place:
            names += (*keys.queue(), keys.dead())
            place = claim.place
            args += (keys.name, place.entry, str(place.limit), "1" if place.ousts else "0")
            args += (str(place.after_us), place.turn)
        reply = self._run(ACQUIRE, names, args)
        if isinstance(reply, bytes):
            token, since, rank = reply.split()
            return Acquired(int(token), int(since) / 1e6, int(rank))
        return replies.refusal(reply, identity)

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), BATCH):
            calls: list[_Call] = [
                ((r.key,), (r.acquisition, str(r.ttl_ms), *(text for note in r.notes for text in note)))
                for r in renewals[start : start + BATCH]
            ]
            told = self._wires.call(_each, RENEW, calls)
            if all(type(reply) is ErrorReply for reply in told):
                raise _refused(told[0])
            # A key that somebody overwrote is one lost lease, and must not stop the renewal of all others.
            answers += [type(reply) is not ErrorReply and bool(reply) for reply in told]
        return answers

    def release(self, keys: LockKeys, acquisition: str, ending: Ending) -> Released:
        names = [keys.lock, keys.channel, keys.tombstone(acquisition)]
        identity = ending.identity
        if identity:
            names.append(keys.done(identity))
            if ending.used_ms:
                names.append(keys.used())
        args: tuple[str, ...] = (
            acquisition,
            str(TOMBSTONE_MS) if ending.unsure else "0",
            str(DONE_MS) if ending.final and identity else "0",
            str(ending.used_ms) if identity else "0",
        )
        if ending.used_ms or ending.queue:
            args += (identity, ending.by)
        if ending.queue:
            names += keys.queue()
            args += (keys.name,)
        try:
            reply, known = self._run(RELEASE, names, args), 0
        except ReplyLost:
            # Whether the first command freed the lock is not known, so nobody is told that it was lost.
            reply, known = self._run(RELEASE, names, args), 1
        told, granted = (reply, None) if isinstance(reply, int) else (reply[0], replies.grant(*reply[1:]))
        if told & 4 or (known and not ending.queue):
            # Whose release it was did not expect waiters, and so had not named their keys; or its answer was lost.
            granted = self.sweep(keys, acquisition, *_NEVER_BURY).granted
        return Released(bool((told | known) & 1), bool(told & 2), granted)

    def inspect(self, keys: LockKeys) -> Holder | None:
        reply = self._again(INSPECT, [keys.lock], ())
        return replies.holder(reply) if reply else None

    # -- queues

    def sweep(self, keys: LockKeys, granter: str, turn_ms: int, tries: int) -> Taken:
        reply = self._again(SWEEP, _of_queue(keys), (keys.name, granter, str(turn_ms), str(tries)))
        return Taken("", replies.grant(*reply[:3]), reply[3].decode())

    def published(self, keys: LockKeys, identity: str, turn_ms: int) -> bool:
        _, parked, _, index = keys.queue()
        return bool(self._again(PUBLISHED, (keys.lock, parked, index), (identity, keys.name, str(turn_ms))))

    def take_out(
        self, keys: LockKeys, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> Taken:
        args = (keys.name, identity, "0" if bury else str(DONE_MS), granter, "1" if ended else "0")
        entry, *granted = self._again(TAKE_OUT, (*_of_queue(keys), keys.done(identity)), args)
        return Taken(entry.decode("utf-8", "replace"), replies.grant(*granted))

    def waiting(self, keys: LockKeys, most: int) -> Waiting:
        count, *facts = self._again(WAITING, (keys.lock, *keys.queue()[:3]), (str(most),))
        return Waiting(count, tuple(map(replies.waiter, facts[::2], facts[1::2])))

    def due(self, prefix: str, buckets: Sequence[int], most: int) -> list[LockName]:
        calls = [((LockKeys.of(prefix, LockName("", bucket)).queue()[3],), (str(most),)) for bucket in buckets]
        told = self._wires.call(_each, DUE, calls)
        for reply in told:
            if type(reply) is ErrorReply:
                raise _refused(reply)
        return [LockName(name.decode(), bucket) for bucket, names in zip(buckets, told, strict=True) for name in names]

    def durable(self) -> bool:
        return b"aof_enabled:1" in self._wires.call(_persistence)

    @contextmanager
    def waker(self, keys: LockKeys) -> Iterator[Waker]:
        waker = self._wires.subscribe(keys.channel)
        try:
            yield waker
        finally:
            waker.close()

    def close(self) -> None:
        self._wires.close()

    # -- one call

    def _run(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
        reply = self._wires.call(_evaluated, script, keys, args)
        if type(reply) is ErrorReply:
            raise _refused(reply)
        return reply

    def _again(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
        """Once more after a lost reply: for what is harmless twice with the same words."""
        try:
            return self._run(script, keys, args)
        except ReplyLost:
            return self._run(script, keys, args)


def _evaluated(wire: Wire, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
    reply = wire.ask(script.packed(keys, args))
    if type(reply) is ErrorReply and reply.startswith("NOSCRIPT"):
        # The server forgot it (a restart, SCRIPT FLUSH); the whole text loads it again.
        reply = wire.ask(script.packed(keys, args, whole=True))
    return reply


def _each(wire: Wire, script: Script, calls: Sequence[_Call]) -> list[Any]:
    """All replies to one write."""
    told = [wire.ask(b"".join([script.packed(*call) for call in calls]))]
    told += [wire.read() for _ in calls[1:]]
    for place, reply in enumerate(told):
        if type(reply) is ErrorReply and reply.startswith("NOSCRIPT"):
            told[place] = wire.ask(script.packed(*calls[place], whole=True))
    return told


def _persistence(wire: Wire) -> bytes:
    reply = wire.ask(b"*2\r\n$4\r\nINFO\r\n$11\r\npersistence\r\n")
    if type(reply) is ErrorReply:
        raise _refused(reply)
    return bytes(reply)


def _refused(reply: ErrorReply) -> StoreRefused:
    return StoreRefused(f"the lock store refused: {reply}")


def _of_queue(keys: LockKeys) -> tuple[str, ...]:
    return (keys.lock, *keys.queue(), keys.dead())
