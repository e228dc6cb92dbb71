"""One connection to a Redis or Valkey server, and the RESP commands and replies on it.

redis-py opens the connection, and its client is not used for commands. There are three reasons:

- its retries repeat a command although only the store knows whether it may run twice;
- its locks are not safe between greenlets and native threads, nor after a fork;
- it is slower: the same scripts take 0.90 to 0.95 of its time here (docs/explanation/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.connection import Connection
from redis.exceptions import BusyLoadingError, MasterDownError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import StoreUnavailable
from .server_errors import error_from_reply, error_from_tls

__all__ = ["ErrorReply", "RespConnection", "Subscription", "refused_or_unanswered", "unanswered"]

_INTEGER, _BULK, _ARRAY, _ERROR = b":$*-"

#: A server that speaks no TLS takes our half of the handshake for a command that has not come to its end, and waits.
_SILENT = "over TLS, which rediss:// or an option asks for: perhaps the server speaks none"
#: What redis-py raises while it connects.
_CODES = ((BusyLoadingError, "LOADING"), (NoPermissionError, "NOPERM"), (MasterDownError, "MASTERDOWN"))


class ErrorReply(str):
    """The server refused a command, and says why. A value: the replies behind it must still be read."""

    __slots__ = ()


class RespConnection:
    """One open connection, made by redis-py (which knows URLs, TLS and authentication) and then spoken to directly.

    A call through redis-py's client is mostly checkout, retry wrapper and parser; here it is one write and one read.

    Source of the format: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
    """

    __slots__ = ("_connection", "_receive", "_rest", "made_for", "send")

    def __init__(self, connection: Connection) -> None:
        # It has no public name. Redis-py has read all that it asked for in connecting: its parser keeps nothing back.
        sock: Any = connection._sock  # noqa: SLF001
        self._connection = connection
        #: Send packed commands, whose answers are to be read one by one.
        self.send: Callable[[bytes], None] = sock.sendall
        self._receive: Callable[[int], bytes] = sock.recv
        #: What was received and not read yet.
        self._rest = b""
        #: Where the door to its server led to, before it was made.
        self.made_for: object = None

    def ask(self, commands: bytes) -> Any:
        """Send packed commands and read the first one's reply."""
        self.send(commands)
        if not self._rest:
            # Nearly all that our scripts answer is one short reply, and comes in one piece: so it costs half as much.
            received = self._receive(65536)
            line, _, rest = received.partition(b"\r\n")
            kind = line[:1]
            if kind == b"$" and len(rest) > 1:  # "$-1" and one byte of the next reply are no empty text
                if int(line[1:]) + 2 == len(rest):
                    return rest[:-2]
            elif kind == b":" and not rest and received[-1:] == b"\n":
                return int(line[1:])
            self._rest = received
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

    def wait(self, seconds: float) -> None:
        """Wait so long for each answer from now on."""
        sock: Any = self._connection._sock  # noqa: SLF001  # as above
        sock.settimeout(seconds)

    @property
    def timeout(self) -> float:
        """Seconds that each answer is waited for."""
        sock: Any = self._connection._sock  # noqa: SLF001  # as above
        return float(sock.gettimeout())

    def close(self) -> None:
        self._connection.disconnect()


class Subscription:
    """Tells of publications on one channel; opened again when it breaks.

    Args:
        use: Calls what it is given with a new connection to the server that keeps the channel.
        channel: Its name.
        verb: The command that subscribes.
        stands: Asked before each wait: does that server keep the channel still?
    """

    def __init__(
        self,
        use: Callable[[Callable[[Connection], Any]], Any],
        channel: str,
        verb: str = "SUBSCRIBE",
        stands: Callable[[], bool] = lambda: True,
    ) -> None:
        self._use = use
        self._channel = channel
        self._verb = verb
        self._stands = stands
        self._connection = self._subscribed()

    def wait(self, timeout: float) -> bool:
        try:
            if self._stands():
                if not self._connection.can_read(timeout=timeout):
                    return False
                told = self._connection.read_response()
                if not isinstance(told, list) or told[0] != b"sunsubscribe":
                    return True
        except (RedisError, OSError):
            pass
        # A subscription that was cut, or ended because its slot moved, costs a waiter nothing but a look of its own,
        # unless the store is away altogether.
        self._connection.disconnect()
        self._connection = self._subscribed()
        return True

    def close(self) -> None:
        self._connection.disconnect()

    def _subscribed(self) -> Connection:
        def subscribe(connection: Connection) -> Connection:
            connection.send_command(self._verb, self._channel)
            connection.read_response()
            return connection

        subscribed: Connection = self._use(subscribe)
        return subscribed


def unanswered(error: Exception, kind: type[StoreUnavailable]) -> StoreUnavailable:
    """What a connection that failed means for whoever talked on it."""
    if lasting := error_from_tls(str(error)):
        # TLS 1.3 tells it only when we read, and before the server has read anything.
        return lasting
    return kind(f"the lock store did not answer: {str(error) or type(error).__name__}")


def refused_or_unanswered(error: Exception, *, encrypted: bool = False) -> StoreUnavailable:
    """What an error in opening a connection means; ``encrypted``: over TLS."""
    # redis-py's LOADING and authentication errors are ConnectionErrors too, but there the server did answer.
    if "max number of clients" in str(error):
        return error_from_reply(str(error))
    if type(error) in (RedisConnectionError, RedisTimeoutError) or isinstance(error, OSError):
        if encrypted and isinstance(error, RedisTimeoutError | TimeoutError):
            return StoreUnavailable(f"the lock store did not answer: {error} ({_SILENT})")
        return unanswered(error, StoreUnavailable)
    if not isinstance(error, RedisError):
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        return StoreUnavailable(f"the lock store did not answer: connecting to it failed: {said}")
    # Redis-py takes the code off and makes a class of it. Of authentication it has one class for all codes.
    return error_from_reply(str(error), next((code for kind, code in _CODES if isinstance(error, kind)), ""))
