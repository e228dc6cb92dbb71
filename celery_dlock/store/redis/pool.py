"""The connections of one process to one server."""

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

#: Errors that are no failure to connect: our own, and the time limit that strikes in the main thread at any step.
_PASSED_ON: Final = (DLockError, SoftTimeLimitExceeded)


class ConnectionPool:
    """The topology of one server: as few connections as there are threads that talk at once.

    Args:
        door: Makes them.
        timeout: Seconds to wait for a connection and for each answer.
    """

    clustered = False
    wakes = "1"

    def __init__(self, door: Endpoint, *, timeout: float) -> None:
        self._door = door
        self._timeout = timeout
        self._pid = os.getpid()
        # append and pop of a deque are atomic: no lock that a fork, a signal or a greenlet could leave taken.
        self._idle: collections.deque[RespConnection] = collections.deque()
        #: Where the door led to at the last look. Each connection knows for itself: several threads make some at once.
        self._where: object = None

    def call(self, _key: str, talk: Callable[..., T], *words: Any, within: float | None = None) -> T:
        if within is not None:
            with self.lent(within) as wire:
                return talk(wire, *words)
        # As `lent` does it, but without a context manager: every acquire and release comes by here.
        wire = self._checkout()
        try:
            reply = talk(wire, *words)
        except BaseException as error:
            self._give_up(wire, error)
            raise
        self._give_back(wire)
        return reply

    def each(self, talk: Pipeline, calls: Sequence[tuple[str, Any]], within: float | None = None) -> list[Any]:
        said = [call for _, call in calls]
        with self.lent(within) as wire:
            talk.send(wire, said)
            return talk.read(wire, said)

    def shard(self, _key: str) -> int:
        return 0

    def failover_epoch(self, _key: str) -> int:
        return self._door.failover_epoch()

    def everywhere(self, talk: Callable[[RespConnection], T]) -> list[T]:
        return [self.call("", talk)]

    def subscribe(self, channel: str) -> Subscription:
        opened_at: list[object] = []

        def use(subscribe: Callable[[Connection], T]) -> T:
            opened_at[:] = [self._door.address()]
            return self.opened(subscribe)

        return Subscription(use, channel, stands=lambda: opened_at == [self._door.address()])

    def invalidate(self) -> None:
        self.close()

    def close(self) -> None:
        self._door.invalidate()
        self._drop()

    def _drop(self) -> None:
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def lent(self, within: float | None = None) -> Iterator[RespConnection]:
        """A connection of the caller's own, to be read to the end of the last answer.

        Args:
            within: Seconds to wait for an answer, where that is less than usual.

        Raises:
            ReplyLost: It is not known what the server carried out.
            StoreUnavailable: The server was not asked, or let nobody in.
        """
        wire = self._checkout(within)
        try:
            if within is not None:
                wire.wait(min(within, self._timeout))
            yield wire
            if within is not None:
                wire.wait(self._timeout)
        except BaseException as error:
            self._give_up(wire, error)
            raise
        self._give_back(wire)

    def _give_up(self, wire: RespConnection, error: BaseException) -> None:
        # A half-read answer would be taken for the next command's.
        wire.close()
        if isinstance(error, OSError):
            # Whatever ended this connection (a restart, an idle limit) ended the waiting ones too.
            self.close()
            # With a number it is the kernel's, which has given this connection up; a new one may be answered.
            late = isinstance(error, TimeoutError) and error.errno is None
            raise unanswered(error, ReplyTimeout if late else ReplyLost) from error

    def _give_back(self, wire: RespConnection) -> None:
        if wire.made_for == self._where:
            self._idle.append(wire)
        else:
            wire.close()

    def opened(self, use: Callable[[Connection], T], within: float | None = None) -> T:
        """What ``use`` makes of a new connection.

        Raises:
            StoreUnavailable: The server was not asked, or let nobody in.
        """
        # To connect, to authenticate and to select come one after the other.
        connection = self._door.connection(self._timeout if within is None else min(within / 3, self._timeout))
        encrypted = isinstance(connection, SSLConnection)
        try:
            with no_fork() if encrypted else nullcontext():
                connection.connect()
            self._door.check(connection)
            return use(connection)
        except BaseException as error:
            connection.disconnect()
            self._door.invalidate()
            if isinstance(error, Exception) and not isinstance(error, _PASSED_ON):
                # Whatever it is, no connection was made: a credential provider raises errors of its own library.
                raise refused_or_unanswered(error, encrypted=encrypted) from error
            raise

    def _checkout(self, within: float | None = None) -> RespConnection:
        if self._pid != os.getpid():
            # A fork shares the parent's sockets: two processes on one would read each other's answers.
            self._idle = collections.deque()
            self._pid = os.getpid()
        where = self._door.address()
        if where != self._where:
            self._drop()
            self._where = where
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:
                break  # another thread was faster
            if wire.made_for == where:
                return wire
            wire.close()
        wire = self.opened(RespConnection, within)
        wire.made_for = where
        return wire
