"""Bare connections to a Redis or Valkey server, and the words on them."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from .errors import ReplyLost, StoreRefused, StoreUnavailable

__all__ = ["ErrorReply", "Subscription", "Wire", "Wires"]

T = TypeVar("T")

_INTEGER, _BULK, _ARRAY, _ERROR = b":$*-"


class ErrorReply(str):
    """The server refused a command, and says why. A value: the replies behind it must still be read."""

    __slots__ = ()


class Wire:
    """One connection, opened by redis-py (which knows URLs, TLS and authentication) and then spoken to directly.

    A call through redis-py's client is mostly checkout, retry wrapper and parser; here it is one write and one read.

    Source of the format: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
    """

    __slots__ = ("_connection", "_receive", "_rest", "_send")

    def __init__(self, connection: Connection) -> None:
        connection.connect()
        # It has no public name. Redis-py has read all that it asked for in connecting: its parser keeps nothing back.
        sock: Any = connection._sock  # noqa: SLF001
        self._connection = connection
        self._send: Callable[[bytes], None] = sock.sendall
        self._receive: Callable[[int], bytes] = sock.recv
        #: What was received and not read yet.
        self._rest = b""

    def ask(self, commands: bytes) -> Any:
        """Send packed commands and read the first one's reply."""
        self._send(commands)
        return self.read()

    def read(self) -> Any:
        """The next reply: bytes, int, None, a list of those, or an :class:`ErrorReply`."""
        while (end := self._rest.find(b"\r\n")) < 0:
            self._more()
        line, self._rest = self._rest[:end], self._rest[end + 2 :]
        kind = line[0]
        if kind == _INTEGER:
            return int(line[1:])
        if kind == _BULK:
            return self._bulk(int(line[1:]))
        if kind == _ARRAY:
            return [self.read() for _ in range(int(line[1:]))]
        text = line[1:].decode("utf-8", "replace")
        return ErrorReply(text) if kind == _ERROR else text

    def _bulk(self, size: int) -> bytes | None:
        if size < 0:
            return None
        while len(self._rest) < size + 2:
            self._more()
        text, self._rest = self._rest[:size], self._rest[size + 2 :]
        return text

    def _more(self) -> None:
        received = self._receive(65536)
        if not received:
            raise ConnectionError("the server closed the connection")
        self._rest += received

    def close(self) -> None:
        self._connection.disconnect()


class Wires:
    """The connections of one process: as few as there are threads that talk at once.

    redis-py's retries are off: it would repeat commands on its own judgement, where only a store knows which may be.

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
            self._new()
        except RedisError as error:
            raise ValueError(str(error)) from error
        self._pid = os.getpid()
        # append and pop of a deque are atomic: no lock that a fork, a signal or a greenlet could leave taken.
        self._idle: collections.deque[Wire] = collections.deque()

    def call(self, talk: Callable[..., T], *words: Any) -> T:
        """What ``talk`` makes of a connection of its own and ``words``.

        Raises:
            ReplyLost: It is not known what the server carried out.
            StoreUnavailable: The server was not asked.
        """
        wire = self._checkout()
        try:
            reply = talk(wire, *words)
        except BaseException as error:
            # A half-read answer would be taken for the next command's.
            wire.close()
            if isinstance(error, OSError):
                # Whatever ended this connection (a restart, an idle limit) ended the waiting ones too.
                self.close()
                raise _unanswered(error, ReplyLost) from error
            raise
        self._idle.append(wire)
        return reply

    def subscribe(self, channel: str) -> Subscription:
        """Listen for what is published on ``channel``."""
        return Subscription(self._open, channel)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _checkout(self) -> Wire:
        if self._pid != os.getpid():
            # A fork shares the parent's sockets: two processes on one would read each other's answers.
            self._idle = collections.deque()
            self._pid = os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            wire: Wire = self._open(Wire)
            return wire

    def _open(self, use: Callable[[Connection], Any]) -> Any:
        connection = self._new()
        try:
            return use(connection)
        except BaseException as error:
            connection.disconnect()
            if isinstance(error, RedisError | OSError):
                raise _refused_or_unanswered(error) from error
            raise

    def _new(self) -> Connection:
        connection = self._connection_class(retry=Retry(NoBackoff(), 0), **self._options)
        bare: Any = connection  # its stubs lack some of these
        # redis-py's names for it, until and since 7: each of its two CLIENT SETINFO would be a round trip.
        bare.lib_name = bare.lib_version = bare.driver_info = None
        return connection


class Subscription:
    """Tells of publications on one channel; opened again when it breaks."""

    def __init__(self, use: Callable[[Callable[[Connection], Any]], Any], channel: str) -> None:
        self._use = use
        self._channel = channel
        self._connection = self._subscribed()

    def wait(self, timeout: float) -> bool:
        try:
            if not self._connection.can_read(timeout=timeout):
                return False
            self._connection.read_response()
        except (RedisError, OSError):
            # A cut subscription costs a waiter nothing but a look of its own, unless the store is away altogether.
            self._connection.disconnect()
            self._connection = self._subscribed()
        return True

    def close(self) -> None:
        self._connection.disconnect()

    def _subscribed(self) -> Connection:
        def subscribe(connection: Connection) -> Connection:
            connection.connect()
            connection.send_command("SUBSCRIBE", self._channel)
            connection.read_response()
            return connection

        subscribed: Connection = self._use(subscribe)
        return subscribed


def _unanswered(error: Exception, kind: type[StoreUnavailable]) -> StoreUnavailable:
    return kind(f"the lock store did not answer: {str(error) or type(error).__name__}")


def _refused_or_unanswered(error: Exception) -> StoreUnavailable:
    # redis-py's LOADING and authentication errors are ConnectionErrors too, but there the server did answer.
    if type(error) in (RedisConnectionError, RedisTimeoutError) or isinstance(error, OSError):
        return _unanswered(error, StoreUnavailable)
    return StoreRefused(f"the lock store refused: {error}")
