"""Locks on one Redis or Valkey server."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from ..errors import ReplyLost, StoreRefused, StoreUnavailable
from ..keys import LockKeys
from ..records import Acquired, Claim, Duplicate, Held, Holder, Released, Renewal, Tombstoned, Used
from ..scripts import ACQUIRE, INSPECT, RELEASE, RENEW, Script
from ..store import Ending, Waker

__all__ = ["RedisStore"]

T = TypeVar("T")

#: How long a done mark lives: longer than any broker redelivers (Redis' visibility timeout is 1 h by default).
DONE_MS = 24 * 3600 * 1000
#: How long a tombstone lives: longer than a command can linger in a socket or a stopped server's queue.
TOMBSTONE_MS = 10 * 60 * 1000
#: Commands in one write: enough to make the round trip cheap, few enough not to hold the server up.
BATCH = 500


class RedisStore:
    """Locks on one server, spoken to over as few connections as there are threads that talk at once.

    A call through redis-py's client is mostly checkout and retry wrapper; this store keeps bare connections and
    packed scripts. redis-py's retries are off: it would repeat commands on its own judgement, ours are repeated
    here, where it is known which of them may be.

    Args:
        url: As redis-py reads it.
        timeout: Seconds to wait for a connection and for each answer.

    Raises:
        ValueError, TypeError: redis-py cannot make a connection of this URL.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        options: dict[str, Any] = dict(parse_url(url))
        self._connection_class: type[Connection] = options.pop("connection_class", Connection)
        # RESP2 saves the HELLO round trip, and our answers need no types of RESP3.
        options |= {"socket_timeout": timeout, "socket_connect_timeout": timeout, "protocol": 2}
        self._options = options
        try:
            self._new_connection()
        except RedisError as error:
            raise ValueError(str(error)) from error
        self._pid = os.getpid()
        # append and pop of a deque are atomic: no lock that a fork, a signal or a greenlet could leave taken.
        self._idle: collections.deque[Connection] = collections.deque()

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
            claim.by,
        )
        reply = self._run(ACQUIRE, names, args)
        if isinstance(reply, bytes):
            token, since, rank = reply.split()
            return Acquired(int(token), int(since) / 1e6, int(rank))
        verb = reply[0]
        if verb == b"held":
            holder = _holder(reply[1:9])
            return Held(holder, bool(identity) and holder.identity == identity, int(reply[9]))
        if verb == b"used":
            return _used(reply[1], identity)
        return Duplicate() if verb == b"done" else Tombstoned()

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(renewals), BATCH):
            batch = renewals[start : start + BATCH]
            answers += self._renew(batch)
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
        reply = self._resend(lambda: self._run(INSPECT, [keys.lock], ()))
        return _holder(reply) if reply else None

    @contextmanager
    def waker(self, keys: LockKeys) -> Iterator[Waker]:
        waker = _Subscription(lambda: self._subscribe(keys.channel))
        try:
            yield waker
        finally:
            waker.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().disconnect()

    # -- one call

    def _resend(self, call: Callable[[], T]) -> T:
        """Once more after a lost reply: only for what is harmless twice with the same words."""
        try:
            return call()
        except ReplyLost:
            return call()

    def _run(self, script: Script, keys: Sequence[str], args: Sequence[str], *, known: bool = True) -> Any:
        connection = self._checkout()
        reply: Any
        try:
            connection.send_packed_command([script.packed(keys, args, whole=not known)], check_health=False)
            try:
                reply = connection.read_response()
            except NoScriptError:
                connection.send_packed_command([script.packed(keys, args, whole=True)], check_health=False)
                reply = connection.read_response()
        except BaseException as error:
            self._give_up(connection, error)
            raise
        self._idle.append(connection)
        return reply

    def _renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        calls = [([r.key], (r.acquisition, str(r.ttl_ms), *(t for note in r.notes for t in note))) for r in renewals]
        connection = self._checkout()
        try:
            connection.send_packed_command([RENEW.packed(*call) for call in calls], check_health=False)
            replies = [_reply_or_error(connection) for _ in calls]
        except BaseException as error:
            self._give_up(connection, error)
            raise
        self._idle.append(connection)
        if all(isinstance(reply, ResponseError) and not isinstance(reply, NoScriptError) for reply in replies):
            raise _translated(replies[0], sent=True) from replies[0]
        return [self._renewed(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def _renewed(self, call: tuple[list[str], tuple[str, ...]], reply: Any) -> bool:
        if isinstance(reply, NoScriptError):
            reply = self._run(RENEW, *call, known=False)
        # A key that somebody overwrote is one lost lease, and must not stop the renewal of all others.
        return not isinstance(reply, ResponseError) and bool(reply)

    # -- connections

    def _give_up(self, connection: Connection, error: BaseException) -> None:
        # A half-read answer would be taken for the next command's.
        connection.disconnect()
        if isinstance(error, RedisError | OSError):
            translated = _translated(error, sent=True)
            if isinstance(translated, ReplyLost):
                # Whatever ended this connection (a restart, an idle limit) ended the waiting ones too.
                self.close()
            raise translated from error

    def _checkout(self) -> Connection:
        if self._pid != os.getpid():
            # A fork shares the parent's sockets: two processes on one would read each other's answers.
            self._idle = collections.deque()
            self._pid = os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _subscribe(self, channel: str) -> Connection:
        connection = self._connect()
        try:
            connection.send_command("SUBSCRIBE", channel)
            connection.read_response()
        except BaseException as error:
            self._give_up(connection, error)
            raise
        return connection

    def _new_connection(self) -> Connection:
        connection = self._connection_class(retry=Retry(NoBackoff(), 0), **self._options)
        bare: Any = connection  # its stubs lack some of these
        # redis-py's names for it, until and since 7: each of its two CLIENT SETINFO would be a round trip.
        bare.lib_name = bare.lib_version = bare.driver_info = None
        return connection

    def _connect(self) -> Connection:
        connection = self._new_connection()
        try:
            connection.connect()
        except (RedisError, OSError) as error:
            connection.disconnect()
            raise _translated(error, sent=False) from error
        return connection


class _Subscription:
    def __init__(self, subscribe: Callable[[], Connection]) -> None:
        self._subscribe = subscribe
        self._connection = subscribe()

    def wait(self, timeout: float) -> bool:
        try:
            if not self._connection.can_read(timeout=timeout):
                return False
            self._connection.read_response()
        except (RedisError, OSError):
            # A cut subscription costs a waiter nothing but a look of its own, unless the store is away altogether.
            self._connection.disconnect()
            self._connection = self._subscribe()
        return True

    def close(self) -> None:
        self._connection.disconnect()


def _translated(error: Exception, *, sent: bool) -> StoreUnavailable:
    """Drivers' errors never leave this room. ``sent``: the command may have reached the server."""
    # redis-py's LOADING and authentication errors are ConnectionErrors too, but there the server did answer.
    unanswered = type(error) in (RedisConnectionError, RedisTimeoutError) or isinstance(error, OSError)
    if unanswered:
        kind = ReplyLost if sent else StoreUnavailable
        return kind(f"the lock store did not answer: {str(error) or type(error).__name__}")
    return StoreRefused(f"the lock store refused: {error}")


def _reply_or_error(connection: Connection) -> Any:
    """One reply of many: those behind an error must still be read."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _holder(fields: Sequence[Any]) -> Holder:
    acquisition, identity, token, since, by, left, count, pttl = fields
    return Holder(
        *_by(by),
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
    return Used(Holder(*_by(by), since=int(at) / 1e6, identity=of.decode()), of.decode() == identity)


def _by(text: bytes) -> tuple[str | None, str | None, str, int | None]:
    task, task_id, node, pid = json.loads(text)
    return task, task_id, node, pid
