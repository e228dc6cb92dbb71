"""The calls of this process that wait in lines, and the connection on which releases tell them.

All calls share one connection that listens (``LISTEN``). One of the waiting calls reads it for all, so no thread is
needed, and a forked child or a greenlet can wait. Behind a pooler there is no ``LISTEN``: each call looks at its row,
as it does if the server refuses the connection.
"""

from __future__ import annotations

import _thread
import collections
import os
import selectors
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from ....errors import StoreUnavailable
from .connection import Connection, ConnectionPool
from .line import SEPARATOR

__all__ = ["Call", "WaitingCalls"]

#: Seconds between two attempts to use the connection while another call opens it.
_PAUSE: Final = 0.002


class WaitingCalls:
    """The waiting calls of one store in this process.

    Args:
        pool: Opens the connection.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        #: The channel on which releases tell the calls of this process.
        self.channel = f"dlock_{uuid.uuid4().hex}"
        self._calls: dict[str, Call] = {}
        self._connection: Connection | None = None
        # The right to use the connection. As in store/redis/pool: the operations of a deque are atomic.
        self._reader = collections.deque([None])

    @property
    def pooled(self) -> bool:
        """Whether a pooler stands before the server, so that no release can tell a call."""
        return self._pool.pooled

    @contextmanager
    def entered(self, acquisition: str) -> Iterator[Call]:
        """Return a context in which releases can tell a call, or in which it looks itself if they cannot."""
        if self._pid != os.getpid():
            self._inherited = self._connection  # leave it open: both processes have the socket
            self._begin()
        call = self._calls[acquisition] = Call(self, listens=self._listen())
        try:
            yield call
        finally:
            self._calls.pop(acquisition, None)
            self.pass_reading()

    def _listen(self) -> bool:
        """Open the connection. Return whether it is open."""
        while not self.pooled:
            try:
                self._reader.popleft()
            except IndexError:
                if self._connection is not None:
                    return True  # another call reads it
                time.sleep(_PAUSE)
                continue
            try:
                self.read(0)
                if self._connection is None:
                    self._connection = self._pool.listening(self.channel)
            except StoreUnavailable:
                return False  # the server may have no connection left beside those of the pool
            finally:
                self.end_reading()
            return True
        return False

    def reads(self) -> bool:
        """Take the right to read. Return false if another call has it."""
        try:
            self._reader.popleft()
        except IndexError:
            return False
        return True

    def end_reading(self) -> None:
        self._reader.append(None)
        self.pass_reading()

    def pass_reading(self) -> None:
        """If no call reads the connection, let one that waits read it."""
        if self._reader:
            for call in list(self._calls.values()):
                if call.told is None:
                    call.ring()
                    return

    def read(self, seconds: float) -> None:
        """Read the connection for at most so many seconds, and tell the calls. The caller has the right to read."""
        connection = self._connection
        if connection is None:
            return
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(connection.fileno(), selectors.EVENT_READ)
                if selector.select(seconds):
                    connection.pgconn.consume_input()
            while (told := connection.pgconn.notifies()) is not None:
                acquisition, *facts = told.extra.decode().split(SEPARATOR)
                if (call := self._calls.get(acquisition)) is not None:
                    call.tell(facts)
        except psycopg.Error:
            # The server has ended an idle connection, or restarted. What it told meanwhile is lost: all calls ask.
            self._connection = None
            connection.close()
            for call in list(self._calls.values()):
                call.tell(None)

    def close(self) -> None:
        if self._pid == os.getpid() and self.reads():
            try:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
            finally:
                self._reader.append(None)


class Call:
    """One waiting call.

    Args:
        calls: The calls of its process.
        listens: The connection that listens is open.
    """

    def __init__(self, calls: WaitingCalls, *, listens: bool) -> None:
        self._calls, self._listens = calls, listens
        # Looked up at each call, because gevent and eventlet may replace it after this module is imported.
        self._bell: Any = _thread.allocate_lock()
        self._bell.acquire()
        #: What a release has told this call: the facts about the lock that it got, or nothing.
        self.told: list[str] | None = None
        #: Whether the connection has broken.
        self.deaf = False

    @property
    def hears(self) -> bool:
        """Whether releases can tell this call. The first statements of a store may find a pooler."""
        return self._listens and not self._calls.pooled

    def ring(self) -> None:
        with suppress(RuntimeError):  # it rings already
            self._bell.release()

    def tell(self, facts: list[str] | None) -> None:
        """Tell the call what a release said; None: it may have missed that."""
        if facts is None:
            self.deaf = True
        else:
            self.told = facts
        self.ring()

    def wait(self, seconds: float) -> list[str] | None:
        """Wait until a release tells this call something, and return it; None: it has to look itself."""
        end = time.monotonic() + seconds
        while (left := self._left(end)) > 0:
            if not self._calls.reads():
                self._bell.acquire(True, left)  # noqa: FBT003  # positional: gevent and eventlet use other names
                continue
            try:
                while (left := self._left(end)) > 0:
                    self._calls.read(left)
            finally:
                self._calls.end_reading()
        return self.told

    def _left(self, end: float) -> float:
        """Return the seconds that this call still waits."""
        return 0.0 if self.deaf or self.told is not None else end - time.monotonic()
