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

#: A server without TLS reads the client's handshake as the start of a command, and waits for the rest of it.
_TLS_TIMEOUT_HINT = "over TLS, which rediss:// or an option asks for: perhaps the server speaks none"
#: redis-py's exception classes of a failed connection, with the error codes that they replaced.
_CODES = ((BusyLoadingError, "LOADING"), (NoPermissionError, "NOPERM"), (MasterDownError, "MASTERDOWN"))


class ErrorReply(str):
    """The text of an error reply. It is a value, because the replies after it must still be read."""

    __slots__ = ()


class RespConnection:
    """One open connection. redis-py opens it (URL, TLS, authentication); commands go to its socket directly.

    A command is one write and one read, without the client's checkout, retry wrapper and general parser.

    Source of the format: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
    """

    __slots__ = ("_connection", "_receive", "_unread", "address", "send")

    def __init__(self, connection: Connection) -> None:
        # redis-py has no public name for the socket. It has read every reply of the handshake, so its buffer is empty.
        sock: Any = connection._sock  # noqa: SLF001
        self._connection = connection
        #: Sends packed commands. The caller reads one reply for each with :meth:`read`.
        self.send: Callable[[bytes], None] = sock.sendall
        self._receive: Callable[[int], bytes] = sock.recv
        #: Received bytes that no reply has used yet.
        self._unread = b""
        #: Address of the endpoint before this connection was opened. The pool sets it.
        self.address: object = None

    def ask(self, commands: bytes) -> Any:
        """Send packed commands and return the first one's reply."""
        self.send(commands)
        if not self._unread:
            # Most scripts answer with one short reply that arrives in one piece. This path costs half of read().
            received = self._receive(65536)
            line, _, rest = received.partition(b"\r\n")
            kind = line[:1]
            if kind == b"$" and len(rest) > 1:  # "$-1" and one byte of the next reply would look like an empty text
                if int(line[1:]) + 2 == len(rest):
                    return rest[:-2]
            elif kind == b":" and not rest and received[-1:] == b"\n":
                return int(line[1:])
            self._unread = received
        return self.read()

    def read(self) -> Any:
        """Return the next reply: bytes, int, None, a list of those, a status, or an :class:`ErrorReply`."""
        while (end := self._unread.find(b"\r\n")) < 0:
            self._receive_more()
        line, self._unread = self._unread[:end], self._unread[end + 2 :]
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
        while len(self._unread) < size + 2:
            self._receive_more()
        text, self._unread = self._unread[:size], self._unread[size + 2 :]
        return text

    def _receive_more(self) -> None:
        received = self._receive(65536)
        if not received:
            raise ConnectionError("the server closed the connection")
        self._unread += received

    def wait(self, seconds: float) -> None:
        """Set the seconds to wait for each reply from now on."""
        sock: Any = self._connection._sock  # noqa: SLF001  # no public name
        sock.settimeout(seconds)

    @property
    def timeout(self) -> float:
        """Seconds to wait for each reply."""
        sock: Any = self._connection._sock  # noqa: SLF001  # no public name
        return float(sock.gettimeout())

    def close(self) -> None:
        self._connection.disconnect()


class Subscription:
    """A subscription to one channel. If its connection breaks, it subscribes again.

    Args:
        use: Calls its argument with a new connection to the channel's server.
        channel: Name of the channel.
        verb: Command that subscribes.
        is_current: Returns whether that server is still the channel's server. Called before each wait.
    """

    def __init__(
        self,
        use: Callable[[Callable[[Connection], Any]], Any],
        channel: str,
        verb: str = "SUBSCRIBE",
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._use = use
        self._channel = channel
        self._verb = verb
        self._is_current = is_current
        self._connection = self._subscribe()

    def wait(self, timeout: float) -> bool:
        try:
            if self._is_current():
                if not self._connection.can_read(timeout=timeout):
                    return False
                event = self._connection.read_response()
                if not isinstance(event, list) or event[0] != b"sunsubscribe":
                    return True
        except (RedisError, OSError):
            pass
        # The connection was cut, or the server ended the subscription because the slot moved. A release may have been
        # missed, so report one: the caller tries the lock. If the store is unreachable, this raises.
        self._connection.disconnect()
        self._connection = self._subscribe()
        return True

    def close(self) -> None:
        self._connection.disconnect()

    def _subscribe(self) -> Connection:
        def subscribe(connection: Connection) -> Connection:
            connection.send_command(self._verb, self._channel)
            connection.read_response()
            return connection

        subscribed: Connection = self._use(subscribe)
        return subscribed


def unanswered(error: Exception, kind: type[StoreUnavailable]) -> StoreUnavailable:
    """Return the exception for a connection that failed while it was used."""
    if tls_error := error_from_tls(str(error)):
        # TLS 1.3 reports a refused handshake only on the first read. The server has read no command by then.
        return tls_error
    return kind(f"the lock store did not answer: {str(error) or type(error).__name__}")


def refused_or_unanswered(error: Exception, *, encrypted: bool = False) -> StoreUnavailable:
    """Return the exception for a connection that could not be opened.

    Args:
        error: Exception of the attempt.
        encrypted: The connection uses TLS.
    """
    # redis-py's LOADING and authentication errors are subclasses of ConnectionError, but then the server did answer.
    if "max number of clients" in str(error):
        return error_from_reply(str(error))
    if type(error) in (RedisConnectionError, RedisTimeoutError) or isinstance(error, OSError):
        if encrypted and isinstance(error, RedisTimeoutError | TimeoutError):
            return StoreUnavailable(f"the lock store did not answer: {error} ({_TLS_TIMEOUT_HINT})")
        return unanswered(error, StoreUnavailable)
    if not isinstance(error, RedisError):
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        return StoreUnavailable(f"the lock store did not answer: connecting to it failed: {text}")
    # redis-py removes the error code and raises a class of its own. All authentication codes share one class.
    return error_from_reply(str(error), next((code for kind, code in _CODES if isinstance(error, kind)), ""))
