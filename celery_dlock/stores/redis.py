"""Locks on one Redis or Valkey server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from ..errors import ReplyLost, StoreRefused
from ..keys import LockKeys
from ..records import Acquired, Claim, Duplicate, Held, Holder, Released, Renewal, Tombstoned, Used
from ..scripts import ACQUIRE, INSPECT, RELEASE, RENEW, Script
from ..store import Ending, Waker
from ..wire import ErrorReply, Wire, Wires

__all__ = ["RedisStore"]

_Call: TypeAlias = tuple[Sequence[str], Sequence[str]]

#: How long a done mark lives: longer than any broker redelivers (Redis' visibility timeout is 1 h by default).
DONE_MS = 24 * 3600 * 1000
#: How long a tombstone lives: longer than a command can linger in a socket or a stopped server's queue.
TOMBSTONE_MS = 10 * 60 * 1000
#: Commands in one write: enough to make the round trip cheap, few enough not to hold the server up.
BATCH = 500


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

    def acquire(
        self, keys: LockKeys, acquisition: str, ttl_ms: int, claim: Claim
    ) -> Acquired | Held | Used | Duplicate | Tombstoned:
        identity = claim.identity.digest if claim.identity else ""
        names = [keys.lock, keys.last, keys.tombstone(acquisition)]
        if identity:
            names.append(keys.done(identity))
            if claim.once:
                names.append(keys.used())
        args = (
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
        reply = self._run(ACQUIRE, names, args)
        if isinstance(reply, bytes):
            token, since, rank = reply.split()
            return Acquired(int(token), int(since) / 1e6, int(rank))
        verb = reply[0]
        if verb == b"held":
            holder = _holder(reply[2:])
            return Held(holder, bool(identity) and holder.identity == identity, int(reply[1]))
        if verb == b"used":
            return _used(reply[1], identity)
        return Duplicate() if verb == b"done" else Tombstoned()

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), BATCH):
            calls: list[_Call] = [
                ((r.key,), (r.acquisition, str(r.ttl_ms), *(text for note in r.notes for text in note)))
                for r in renewals[start : start + BATCH]
            ]
            replies = self._wires.call(_renewed, calls)
            if all(type(reply) is ErrorReply for reply in replies):
                raise _refused(replies[0])
            # A key that somebody overwrote is one lost lease, and must not stop the renewal of all others.
            answers += [type(reply) is not ErrorReply and bool(reply) for reply in replies]
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
        if ending.used_ms:
            args += (identity, ending.by)
        try:
            reply = self._run(RELEASE, names, args)
        except ReplyLost:
            # Whether the first command freed the lock is not known, so nobody is told that it was lost.
            reply = self._run(RELEASE, names, args) | 1
        return Released(bool(reply & 1), bool(reply & 2))

    def inspect(self, keys: LockKeys) -> Holder | None:
        try:
            reply = self._run(INSPECT, [keys.lock], ())
        except ReplyLost:
            reply = self._run(INSPECT, [keys.lock], ())
        return _holder(reply) if reply else None

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


def _evaluated(wire: Wire, script: Script, keys: Sequence[str], args: Sequence[str]) -> Any:
    reply = wire.ask(script.packed(keys, args))
    if type(reply) is ErrorReply and reply.startswith("NOSCRIPT"):
        # The server forgot it (a restart, SCRIPT FLUSH); the whole text loads it again.
        reply = wire.ask(script.packed(keys, args, whole=True))
    return reply


def _renewed(wire: Wire, calls: Sequence[_Call]) -> list[Any]:
    """All replies to one write."""
    replies = [wire.ask(b"".join([RENEW.packed(*call) for call in calls]))]
    replies += [wire.read() for _ in calls[1:]]
    for place, reply in enumerate(replies):
        if type(reply) is ErrorReply and reply.startswith("NOSCRIPT"):
            replies[place] = _evaluated(wire, RENEW, *calls[place])
    return replies


def _refused(reply: ErrorReply) -> StoreRefused:
    return StoreRefused(f"the lock store refused: {reply}")


def _holder(fields: Sequence[Any]) -> Holder:
    acquisition, identity, token, since, left, count, pttl, *by = fields
    return Holder(
        *_who(*(text.decode("utf-8", "replace") for text in by)),
        since=int(since) / 1e6,
        owner=acquisition.decode().rpartition(".")[0],
        identity=identity.decode(),
        token=int(token),
        hold_count=int(count),
        left=left == b"1",
        expires_in=max(0, int(pttl)) / 1000,
    )


def _used(mark: bytes, identity: str) -> Used:
    at, of, by = mark.split(b"\n", 2)
    return Used(Holder(*_who(*json.loads(by)), since=int(at) / 1e6, identity=of.decode()), of.decode() == identity)


def _who(task: str, task_id: str, node: str, pid: str) -> tuple[str | None, str | None, str, int]:
    return task or None, task_id or None, node, int(pid)
