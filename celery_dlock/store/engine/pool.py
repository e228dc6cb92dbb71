"""The connections of one process to a server that the rules do not run on.

The pools of drivers are not used: they start threads, or their locks are not safe after a fork.
"""

from __future__ import annotations

import collections
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

from ...errors import StoreUnavailable
from ...utils import threads

__all__ = ["IDLE_SECONDS", "MOST_CONNECTIONS", "Pool", "PooledConnection"]

#: Seconds without a statement after which the server closes a connection, if it can.
IDLE_SECONDS: Final = 60
#: The highest number of connections of one store in one process.
MOST_CONNECTIONS: Final = 4
#: Seconds between two attempts to borrow a connection while all are in use.
_PAUSE: Final = 0.002


class PooledConnection(Protocol):
    """A connection.

    Args:
        reply_within: Seconds to wait for each reply.
    """

    reply_within: float | None

    def usable(self) -> bool:
        """Return whether the server has left this idle connection open."""
        ...

    def close(self) -> None: ...


C = TypeVar("C", bound=PooledConnection)


class _Permit:
    """The right to use one connection. It ends at the latest when nothing refers to it any more.

    So it is not lost if an exception strikes before the code that ends it.
    """

    def __init__(self, permits: collections.deque[int]) -> None:
        self._permits = permits
        self._number: int | None = None
        self._number = permits.popleft()

    def end(self) -> None:
        if self._number is not None:
            self._permits.append(self._number)
            self._number = None

    __del__ = end


class Pool(ABC, Generic[C]):
    """The connections to one server. Each statement or transaction borrows one.

    Args:
        timeout: Seconds that connecting, waiting for a connection, and each reply may take.
    """

    #: The exception of the driver.
    error: type[Exception]

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._begin()

    @abstractmethod
    def _opened(self, limit: float) -> C:
        """Return a new connection to a server that can keep locks.

        Raises:
            StoreUnavailable: There is none.
        """

    @abstractmethod
    def _failed(self, connection: C, error: Any) -> tuple[StoreUnavailable, bool]:
        """Return the exception for an error of the driver, and whether the idle connections are of no use any more.

        They are not if the server has restarted, or has become a replica. Close the connection, or end its transaction
        and keep it (:meth:`_keep`).
        """

    def _begin(self) -> None:
        # As in store/redis/pool: the operations of a deque are atomic, and a forked process begins with new ones.
        self._pid = os.getpid()
        self._idle: collections.deque[C] = collections.deque()
        self._permits = collections.deque(range(MOST_CONNECTIONS))
        # An app that is dropped closes no store.
        weakref.finalize(self, _close_own, self._idle, self._pid)

    @contextmanager
    def lent(self, within: float | None = None) -> Iterator[C]:
        """Lend a connection. An exception rolls its transaction back.

        Args:
            within: Seconds to wait for each reply, if that is less than the pool's timeout.

        Raises:
            ReplyLost: It is unknown whether the server carried out the last statement.
            StoreUnavailable: It did not.
        """
        if self._pid != os.getpid():
            # Leave the parent's connections open: both processes have the sockets.
            self._inherited = self._idle
            self._begin()
        limit = self._timeout if within is None else min(within, self._timeout)
        idle, permit = self._idle, self._permit(self._permits, limit)
        try:
            connection = self._borrowed(idle, limit)
            connection.reply_within = limit
            try:
                yield connection
            except self.error as error:
                failure, useless = self._failed(connection, error)
                if useless:
                    _close_all(idle)
                raise failure from error
            except BaseException:
                connection.close()
                raise
            self._keep(connection, idle)
        finally:
            permit.end()

    def _keep(self, connection: C, idle: collections.deque[C] | None = None) -> None:
        """Keep an idle connection. ``idle``: those of the process that lent it."""
        kept = self._idle if idle is None else idle
        kept.append(connection)
        if kept is not self._idle:
            _close_all(kept)

    def close(self) -> None:
        _close_own(self._idle, self._pid)

    @staticmethod
    def _permit(permits: collections.deque[int], limit: float) -> _Permit:
        until = time.monotonic() + limit
        while True:
            try:
                return _Permit(permits)
            except IndexError:
                if time.monotonic() >= until:
                    raise StoreUnavailable(
                        f"all {MOST_CONNECTIONS} connections of this process to the lock store are in use"
                    ) from None
            (threads.sleep if threads.is_native_thread() else time.sleep)(_PAUSE)

    def _borrowed(self, idle: collections.deque[C], limit: float) -> C:
        while True:
            try:
                connection = idle.pop()
            except IndexError:
                return self._opened(limit)
            if connection.usable():
                return connection
            connection.close()


def _close_own(idle: collections.deque[Any], pid: int) -> None:
    """Close the connections of this process, and not those of its parent."""
    if pid == os.getpid():
        _close_all(idle)


def _close_all(idle: collections.deque[C]) -> None:
    while True:
        try:
            idle.pop().close()
        except IndexError:
            return
