"""One connection to a Redis or Valkey server, and the RESP commands and replies on it.

redis-py opens the connection, but its client does not send the commands. There are three reasons:

- the client repeats a command after an error, but only the store knows whether the command may run twice;
- the client's locks are not safe between greenlets and native threads, nor after a fork;
- the client is slower: without it, the same scripts take about 0.9 of the time (docs/explanation/benchmarks.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from redis.connection import Connection
from redis.exceptions import BusyLoadingError, MasterDownError, NoPermissionError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import ReplyTimeout, StoreUnavailable
from .server_errors import error_from_reply, error_from_tls

__all__ = ["ErrorReply", "RespConnection", "refused_or_unanswered", "unanswered"]

_INTEGER, _BULK, _ARRAY, _ERROR = b":$*-"

#: A server without TLS reads the client's handshake as the start of a command, and waits for the rest of it.
_TLS_TIMEOUT_HINT = (
    "over TLS, which rediss:// or an option asks for: perhaps the server does not speak TLS: "
    "use its TLS port, or switch TLS off"
)
#: A server that refuses the client's certificate sends an alert and closes the connection. With TLS 1.3 the client may
#: write before it has read the alert. Then the write fails with this text.
_TLS_EOF = "EOF occurred in violation of protocol"
#: If redis-py was opening the connection, it has closed the socket, and the alert is lost.
_TLS_CLOSED: Final = re.compile(rf"{_TLS_EOF}|[Cc]onnection reset|Broken pipe|closed by server")
_TLS_CLOSED_HINT = "over TLS: perhaps it requires a client certificate: set ssl_certfile and ssl_keyfile"
#: The alert was received before the connection was closed, so reading it takes no time.
_ALERT_SECONDS = 0.05
#: redis-py raises these classes and removes the error code from their text. The code is restored from the class.
_CODES = ((BusyLoadingError, "LOADING"), (NoPermissionError, "NOPERM"), (MasterDownError, "MASTERDOWN"))


class ErrorReply(str):
    """The text of an error reply. It is returned, not raised, because the replies after it must still be read."""

    __slots__ = ()


class RespConnection:
    """One open connection. redis-py opens it (URL, TLS, authentication); commands go to its socket directly.

    A command is one write and one read. It passes no pool, no retry wrapper and no general parser of redis-py.

    Source of the format: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2).
    """

    __slots__ = ("_connection", "_receive", "_unread", "send")

    def __init__(self, connection: Connection) -> None:
        # redis-py has no public name for the socket. It has read every reply of the handshake, so its buffer is empty.
        sock: Any = connection._sock  # noqa: SLF001
        self._connection = connection
        #: Sends packed commands. The caller reads one reply for each with :meth:`read`.
        self.send: Callable[[bytes], None] = sock.sendall
        self._receive: Callable[[int], bytes] = sock.recv
        #: Received bytes that no reply has used yet.
        self._unread = b""

    def ask(self, commands: bytes) -> Any:
        """Send packed commands and return the reply to the first."""
        self.send(commands)
        if not self._unread:
            # Most scripts answer with one short reply that arrives in one piece. This path costs half of read().
            received = self._receive(65536)
            line, end, rest = received.partition(b"\r\n")
            if rest:
                size = len(rest) - 2
                # A nil reply ("$-1") and one byte of the next reply would give the size -1, and match.
                if size >= 0 and line == b"$%d" % size:
                    return rest[:size]
            elif end and line[:1] == b":":
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

    def read_all(self, count: int) -> list[Any]:
        """Return the next ``count`` replies."""
        replies: list[Any] = []
        while (left := count - len(replies)) > 0:
            *lines, rest = self._unread.split(b"\r\n", left)
            if lines and {line[:1] for line in lines} == {b":"}:
                # Replies to renewals are integers. Splitting all lines at once takes a third of the steps of read().
                replies += [int(line[1:]) for line in lines]
                self._unread = rest
            else:
                replies.append(self.read())
        return replies

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

    def reason_of(self, error: OSError) -> OSError:
        """Return the alert that the server sent before it closed a TLS connection; ``error`` if there is none."""
        if _TLS_EOF in str(error):
            self.wait(_ALERT_SECONDS)
            try:
                self._receive(1)
            except OSError as alert:
                return alert if error_from_tls(str(alert)) else error
        return error

    def wait(self, seconds: float) -> None:
        """Set the timeout of each reply from now on. This method itself does not wait."""
        sock: Any = self._connection._sock  # noqa: SLF001  # no public name
        sock.settimeout(seconds)

    @property
    def timeout(self) -> float:
        """Seconds to wait for each reply."""
        sock: Any = self._connection._sock  # noqa: SLF001  # no public name
        return float(sock.gettimeout())

    def close(self) -> None:
        self._connection.disconnect()


#: Hints to the settings that may cause an error, by exception class.
_SETTINGS: Final = {StoreUnavailable: " (check dlock_url)", ReplyTimeout: " (see dlock_timeout)"}


def unanswered(error: Exception, kind: type[StoreUnavailable]) -> StoreUnavailable:
    """Return the exception for a connection that failed."""
    if tls_error := error_from_tls(str(error)):
        # TLS 1.3 reports a refused handshake only on the first read. The server has read no command by then.
        return tls_error
    return kind(f"the lock store did not answer: {str(error) or type(error).__name__}{_SETTINGS.get(kind, '')}")


def refused_or_unanswered(error: Exception, *, encrypted: bool = False) -> StoreUnavailable:
    """Return the exception for a connection that could not be opened.

    Args:
        error: Exception of the attempt.
        encrypted: The connection uses TLS.
    """
    if "max number of clients" in str(error):
        return error_from_reply(str(error))
    # Compare the exact class: redis-py's LOADING and authentication errors are subclasses, but mean that the server
    # answered.
    if type(error) in (RedisConnectionError, RedisTimeoutError) or isinstance(error, OSError):
        if encrypted and isinstance(error, RedisTimeoutError | TimeoutError):
            return StoreUnavailable(f"the lock store did not answer: {error} ({_TLS_TIMEOUT_HINT})")
        if encrypted and _TLS_CLOSED.search(str(error)):
            return StoreUnavailable(f"the lock store did not answer: {error} ({_TLS_CLOSED_HINT})")
        return unanswered(error, StoreUnavailable)
    if not isinstance(error, RedisError):
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        return StoreUnavailable(f"the lock store did not answer: connecting to it failed: {text}")
    # redis-py has removed the error code from the text, so derive it from the class. All authentication codes share one
    # class, so their code is found by the text.
    return error_from_reply(str(error), next((code for kind, code in _CODES if isinstance(error, kind)), ""))
