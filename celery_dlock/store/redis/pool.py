"""The connections of one process to one server.

redis-py's pool is not used. Its locks are not safe between greenlets and native threads, nor after a fork. See
:mod:`.connection` for the measurements.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded
from redis.connection import Connection, SSLConnection

from ...errors import DLockError, ReplyLost, ReplyTimeout
from ...utils.fork_guard import no_fork
from .connection import RespConnection, Subscription, refused_or_unanswered, unanswered
from .endpoint import Endpoint
from .topology import Pipeline

__all__ = ["ConnectionPool"]

T = TypeVar("T")

#: Exceptions that do not mean a failed connection: this library's own, and the soft time limit of a task.
_RERAISED: Final = (DLockError, SoftTimeLimitExceeded)


class ConnectionPool:
    """The topology of one server, with one connection for each thread that uses it at the same time.

    Args:
        endpoint: Makes the connections.
        timeout: Seconds to wait for a connection and for each reply.
    """

    clustered = False
    wakes = "1"

    def __init__(self, endpoint: Endpoint, *, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._pid = os.getpid()
        # A deque's append and pop are atomic. A fork, a signal or a greenlet switch could leave a lock taken.
        self._idle: collections.deque[RespConnection] = collections.deque()
        #: The endpoint's address at the last checkout. Each connection has its own, because several threads open them.
        self._address: object = None

    def call(self, _key: str, operation: Callable[..., T], *args: Any, within: float | None = None) -> T:
        if within is not None:
            with self.lent(within) as connection:
                return operation(connection, *args)
        # The same as lent(), without a context manager: every acquire and release runs this code.
        connection = self._checkout()
        try:
            reply = operation(connection, *args)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._put_back(connection)
        return reply

    def each(self, pipeline: Pipeline, calls: Sequence[tuple[str, Any]], within: float | None = None) -> list[Any]:
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

    def subscribe(self, channel: str) -> Subscription:
        opened_at: list[object] = []

        def use(subscribe: Callable[[Connection], T]) -> T:
            opened_at[:] = [self._endpoint.address()]
            return self.opened(subscribe)

        return Subscription(use, channel, is_current=lambda: opened_at == [self._endpoint.address()])

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
        connection = self._checkout(within)
        try:
            if within is not None:
                connection.wait(min(within, self._timeout))
            yield connection
            if within is not None:
                connection.wait(self._timeout)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._put_back(connection)

    def _discard(self, connection: RespConnection, error: BaseException) -> None:
        # The rest of a half-read reply would be read as the reply to the next command.
        connection.close()
        if isinstance(error, OSError):
            # A restart or an idle limit that ended this connection ended the idle ones too.
            self.close()
            # A timeout with an errno is the kernel's: it ended this connection. A new connection may still get a reply.
            late = isinstance(error, TimeoutError) and error.errno is None
            raise unanswered(error, ReplyTimeout if late else ReplyLost) from error

    def _put_back(self, connection: RespConnection) -> None:
        if connection.address == self._address:
            self._idle.append(connection)
        else:
            connection.close()

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
                # No connection was opened. The error may be of any class: a credential provider raises its own.
                raise refused_or_unanswered(error, encrypted=encrypted) from error
            raise

    def _checkout(self, within: float | None = None) -> RespConnection:
        if self._pid != os.getpid():
            # A forked child shares the parent's sockets: the two processes would read each other's replies.
            self._idle = collections.deque()
            self._pid = os.getpid()
        address = self._endpoint.address()
        if address != self._address:
            self._close_idle()
            self._address = address
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                break  # another thread took the last one
            if connection.address == address:
                return connection
            connection.close()
        connection = self.opened(RespConnection, within)
        connection.address = address
        return connection
