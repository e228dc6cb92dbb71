"""Waits for the release of a lock: BLPOP on the list of its name, over the pooled connections.

A release pushes one entry, which wakes one waiter: the one that has waited for the longest time. Its own release wakes
the next one (``scripts/lib/wake.lua``).

Nothing depends on an entry to arrive. A waiter that gets none asks again after the slow poll of
:mod:`celery_dlock.locking.client`. An entry is lost if its waiter dies, or if the list or a lease expires. Then the
first waiter that polls takes the lock, and its release wakes the next one.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Final

from ...errors import ReplyLost, StoreUnavailable
from ...utils.clock import SystemClock
from ...utils.log import logger
from .commands import command
from .connection import ErrorReply, RespConnection
from .execution import execute
from .keys import LockKeys
from .server_errors import right_missing
from .topology import Topology

__all__ = ["MAX_BLOCKED", "Listener", "Wakeups"]

#: Number of connections that one store may block on at the same time. Further waiters queue in their process.
MAX_BLOCKED: Final = 100
#: Seconds after the end of a BLPOP in which its reply must arrive. Else the server hangs, or the connection is dead.
LATE: Final = 0.5
#: Shortest BLPOP in seconds, because 0 would block without an end.
SHORTEST: Final = 0.01
#: Seconds until the next try if a wait fails at once.
PAUSE: Final = 0.05
#: Seconds that passing on a wake-up may take: its caller has an exception to raise.
PASS_ON_WITHIN: Final = 1.0

_monotonic: Final = SystemClock.monotonic


class Wakeups:
    """Waits for releases, and passes on wake-ups, for the locks of one store.

    Args:
        topology: The servers.
        exception_for: Returns the exception for an error reply.
    """

    def __init__(self, topology: Topology, exception_for: Callable[[ErrorReply], StoreUnavailable]) -> None:
        self._topology = topology
        self._exception_for = exception_for
        self._places = _Places(MAX_BLOCKED)
        self._warned: set[str] = set()

    def wait(self, keys: LockKeys, timeout: float) -> bool:
        """Block until a release wakes this caller, at most ``timeout`` seconds. Return whether one may have done so.

        Raises:
            StoreUnavailable: No connection could be opened, or the server refused.
        """
        began = _monotonic()
        end = began + timeout
        entered = False
        try:
            entered = self._places.enter(timeout)
            if not entered:
                return False
            reply = self._topology.call(keys.wake, _pop, keys.wake.encode(), end)
        except ReplyLost:
            # The entry may have been popped, and its reply lost.
            time.sleep(max(0.0, min(PAUSE, timeout, began + PAUSE - _monotonic())))
            return True
        finally:
            if entered:
                self._places.leave()
        if type(reply) is not ErrorReply:
            return bool(reply)
        if reply.startswith("UNBLOCKED"):
            return True  # the server has become a replica, or its slot has moved
        if not right_missing(reply):
            raise self._exception_for(reply)
        self.warn_refused("BLPOP", reply)
        time.sleep(max(0.0, end - _monotonic()))
        return False

    def pass_on(self, keys: LockKeys) -> None:
        """Wake the next waiter, because the caller was woken and does not take the lock. Never raises for the store."""
        variant, texts = command("pass_on_wake", keys)
        with contextlib.suppress(StoreUnavailable):
            reply = self._topology.call(keys.wake, execute, variant, texts, within=PASS_ON_WITHIN)
            if isinstance(reply, bytes):
                self.warn_refused("RPUSH", reply.decode("utf-8", "replace"))

    def warn_refused(self, command: str, error: str) -> None:
        """Log once that a missing right makes waiters poll. Other errors, such as OOM, also refuse an acquire."""
        if right_missing(error) and command not in self._warned:
            self._warned.add(command)
            logger.warning(
                "lock store: a right is missing: %s; a release wakes no waiting call, which asks every 2 s instead; "
                "action required: grant what docs/reference/redis-keys-and-permissions.md lists under Permissions",
                command,
            )  # fmt: skip


class Listener:
    """Listens for releases of one lock. It opens no connection before its first wait.

    Args:
        wakeups: Waits of its store.
        keys: Keys of the lock.
    """

    def __init__(self, wakeups: Wakeups, keys: LockKeys) -> None:
        self._wakeups = wakeups
        self._keys = keys

    def wait(self, timeout: float) -> bool:
        return self._wakeups.wait(self._keys, timeout)

    def pass_on(self) -> None:
        self._wakeups.pass_on(self._keys)


class _Places:
    """A limited number of permits, and a line of callers that wait for one, first in, first out.

    Threads and greenlets share it without a lock: each step on a deque is atomic. A fork or a killed greenlet could
    leave a lock taken.

    Args:
        number: Number of permits.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._fill()

    def _fill(self) -> None:
        self._pid = os.getpid()
        self._free = collections.deque([None] * self._number)
        self._line: collections.deque[Any] = collections.deque()

    def enter(self, timeout: float) -> bool:
        """Take a permit, and wait for one at most ``timeout`` seconds. Return False if none became free."""
        if self._pid != os.getpid():
            self._fill()  # a forked child has none of its parent's waiters
        with contextlib.suppress(IndexError):
            self._free.pop()
            return True
        # Looked up at each call, because gevent and eventlet may replace it after this module is imported.
        signal = _thread.allocate_lock()
        signal.acquire()
        self._line.append(signal)
        self._serve()  # a permit may have become free before this caller joined the line
        served = False
        try:
            served = signal.acquire(True, timeout)  # noqa: FBT003  # positional: gevent and eventlet use other names
        finally:
            if not served:
                try:
                    self._line.remove(signal)
                except ValueError:
                    self.leave()  # it was served at the last moment
        return served

    def leave(self) -> None:
        """Give a permit back."""
        self._free.append(None)
        self._serve()

    def _serve(self) -> None:
        while self._line:
            try:
                self._free.pop()
            except IndexError:
                return
            try:
                self._line.popleft().release()
            except IndexError:
                self._free.append(None)  # the last one has left the line


def _pop(connection: RespConnection, key: bytes, end: float) -> Any:
    """Pop an entry of a list, or block until one is pushed or until ``end``. Return None or an empty list without one.

    The pool keeps the connection only if the reply was read whole. After any exception it closes the connection.
    """
    seconds = max(SHORTEST, end - _monotonic())
    usual = connection.timeout
    connection.wait(seconds + min(LATE, usual))
    reply = connection.ask(b"*3\r\n$5\r\nBLPOP\r\n$%d\r\n%b\r\n%b" % (len(key), key, _bulk(b"%.3f" % seconds)))
    connection.wait(usual)
    return reply


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)
