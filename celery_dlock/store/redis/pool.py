"""The connections of one process to one server.

redis-py's pool is not used. Its locks are not safe between greenlets and native threads, nor after a fork. See
:mod:`.connection` for the measurements.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeAlias, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from redis.connection import Connection, SSLConnection

from ...errors import DLockError, ReplyLost, ReplyTimeout
from ...utils.fork_guard import no_fork
from .connection import RespConnection, refused_or_unanswered, unanswered
from .endpoint import Endpoint
from .topology import Pipeline

__all__ = ["ConnectionPool"]

T = TypeVar("T")
_Idle: TypeAlias = "collections.deque[RespConnection]"

#: Exceptions that do not mean a failed connection: this library's own, and the soft time limit of a task.
_RERAISED: Final = (DLockError, SoftTimeLimitExceeded)


class ConnectionPool:
    """The topology of one server. Threads that use the server at the same time have a connection each.

    Args:
        endpoint: Makes the connections.
        timeout: Seconds to wait for a connection and for each reply.
    """

    clustered = False

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        # A deque's append and pop are atomic. A lock could stay taken by a fork, a signal or a greenlet switch.
        #
        # For a new address, and in a forked process, a new deque replaces this one. A connection that was lent before
        # is closed after its use, because its deque is not the current one.
        self._idle: _Idle = collections.deque()
        #: The process and the endpoint's address that the idle connections belong to.
        self._address: tuple[int, object] = os.getpid(), None

    def call(self, _key: str, operation: Callable[..., T], *args: Any, within: float | None = None) -> T:
        if within is not None:
            with self.lent(within) as connection:
                return operation(connection, *args)
        # The same as lent(), without a context manager: every acquire and release runs this code.
        idle, connection = self._checkout()
        try:
            reply = operation(connection, *args)
        except BaseException as error:
            self._discard(connection, error)
            raise
        if idle is self._idle:
            idle.append(connection)
        else:
            connection.close()
        return reply

    def each(
        self,
        pipeline: Pipeline,
        calls: Sequence[tuple[str, Any]],
        within: float | None = None,
        *,
        awaits_moves: bool = True,
    ) -> list[Any]:
        commands = [command for _, command in calls]
        with self.lent(within) as connection:
            pipeline.send(connection, commands)
            return pipeline.read(connection, commands)

    def shard(self, _key: str) -> int:
        return 0

    def failover_epoch(self, _key: str) -> int:
        return self._endpoint.failover_epoch()

    def everywhere(self, operation: Callable[[RespConnection], T]) -> list[T]:
        return [self.call("", operation)]

    def servers(self) -> list[str]:
        return [""]

    def on(self, _server: str, operation: Callable[..., T], *args: Any) -> T:
        return self.call("", operation, *args)

    def invalidate(self) -> None:
        self.close()

    def close(self) -> None:
        self._endpoint.invalidate()
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def lent(self, within: float | None = None) -> Iterator[RespConnection]:
        """Lend a connection to the caller, which has to read every reply.

        Args:
            within: Seconds to wait for each reply, if that is less than the pool's timeout.

        Raises:
            ReplyLost: It is unknown which commands the server executed.
            StoreUnavailable: No command was sent, because no connection could be opened.
        """
        idle, connection = self._checkout(within)
        try:
            if within is not None:
                connection.wait(min(within, self._timeout))
            yield connection
            if within is not None:
                connection.wait(self._timeout)
        except BaseException as error:
            self._discard(connection, error)
            raise
        if idle is self._idle:
            idle.append(connection)
        else:
            connection.close()

    def _discard(self, connection: RespConnection, error: BaseException) -> None:
        if isinstance(error, OSError):
            error = connection.reason_of(error)
        # The rest of a half-read reply would be read as the reply to the next command.
        connection.close()
        if isinstance(error, OSError):
            # If a restart or an idle limit of the server ended this connection, it ended the idle ones too.
            self.close()
            # A timeout with an errno comes from the kernel, which ended this connection. The server may still answer.
            late = isinstance(error, TimeoutError) and error.errno is None
            raise unanswered(error, ReplyTimeout if late else ReplyLost) from error

    def opened(self, use: Callable[[Connection], T], within: float | None = None) -> T:
        """Open a connection and return the result of ``use`` for it.

        Raises:
            StoreUnavailable: The connection could not be opened.
        """
        # Connecting, authenticating and selecting a database are three steps, each with this timeout.
        connection = self._endpoint.connection(self._timeout if within is None else min(within / 3, self._timeout))
        encrypted = isinstance(connection, SSLConnection)
        try:
            with no_fork() if encrypted else nullcontext():
                connection.connect()
            self._endpoint.check(connection)
            return use(connection)
        except BaseException as error:
            connection.disconnect()
            self._endpoint.invalidate()
            if isinstance(error, Exception) and not isinstance(error, _RERAISED):
                # The error may be of any class, because a credential provider raises its own.
                raise refused_or_unanswered(error, encrypted=encrypted) from error
            raise

    def _checkout(self, within: float | None = None) -> tuple[_Idle, RespConnection]:
        """Return a connection, and the deque that takes it back."""
        address = os.getpid(), self._endpoint.address()
        if address != self._address:
            self._replace_idle(address)
        idle = self._idle
        try:
            return idle, idle.pop()
        except IndexError:
            pass  # all connections are in use
        return idle, self.opened(RespConnection, within)

    def _replace_idle(self, address: tuple[int, object]) -> None:
        """Begin with no idle connections: this process was forked, or the server has another address."""
        if self._address[0] == address[0]:
            self._close_idle()
        # In a forked process, leave them open: they are the parent's. If this process used the parent's sockets, the
        # two would read each other's replies.
        self._idle = collections.deque()
        self._address = address
