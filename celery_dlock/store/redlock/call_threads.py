"""Concurrent calls, each in its own thread. The caller goes on as soon as it has enough replies.

Under gevent and eventlet the threads are greenlets of the caller's hub, because only that hub may use its sockets. In
the watchdog's native thread they are greenlets of that thread's own hub.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ...utils import threads

__all__ = ["CallThreads", "PendingReplies"]

#: Seconds after which an idle thread ends.
IDLE: Final = 5.0


class PendingReplies:
    """The replies to one concurrent call, by the server's index, as they arrive. One thread waits for them."""

    def __init__(self) -> None:
        self._arrived: collections.deque[tuple[int, Any]] = collections.deque()
        self._signal = _new_signal()
        self._replies: dict[int, Any] = {}
        #: The vote was lost and its caller waits no longer. A server that acquires later has to release.
        self.lost = False
        #: The caller waits no longer.
        self.over = False

    def put(self, index: int, reply: Any) -> None:
        self._arrived.append((index, reply))
        _send(self._signal)

    def forget(self, indexes: Iterable[int]) -> None:
        """Drop the replies of these servers, because they are called after all."""
        for index in indexes:
            self._replies.pop(index, None)

    def received(self) -> Mapping[int, Any]:
        """Return the replies that have arrived."""
        while self._arrived:
            index, reply = self._arrived.popleft()
            self._replies[index] = reply
        return self._replies

    def wait(self, seconds: Callable[[Mapping[int, Any]], float]) -> Mapping[int, Any]:
        """Wait for replies as long as ``seconds`` allows, and return them.

        Args:
            seconds: Returns how long to wait for the next reply, given the earlier ones. 0 or less ends the wait.
        """
        while (left := seconds(self.received())) > 0:
            self._signal.acquire(True, left)  # noqa: FBT003  # positional: gevent and eventlet use other names
        return self._replies


class CallThreads:
    """Threads for concurrent calls, one per call. They are reused. A forked child starts without any."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # A deque's pop, append and remove are atomic. A fork, a signal or a greenlet switch could leave a lock taken.
        self._idle: collections.deque[_WorkerThread] = collections.deque()
        self._running: dict[Callable[[], None], None] = {}

    @property
    def busy(self) -> bool:
        """Whether a call is still running."""
        return bool(self._running)

    def start(self, calls: Sequence[Callable[[], None]]) -> Mapping[int, Exception]:
        """Start these calls and wait for none. They must not raise.

        Returns:
            By a call's index, why no thread could be started for it. Such a call is not made.
        """
        failures = {}
        if self._pid != os.getpid():
            self._idle, self._running = collections.deque(), {}  # a forked child has none of its parent's threads
            self._pid = os.getpid()
        for index, call in enumerate(calls):
            self._running[call] = None
            try:
                self._start(call)
            except BaseException as error:
                self._running.pop(call, None)
                if not isinstance(error, RuntimeError | MemoryError | OSError):
                    raise
                failures[index] = error
        return failures

    def _start(self, call: Callable[[], None]) -> None:
        try:
            self._idle.pop().assign(call)
        except IndexError:
            threads.preload_imports()
            # Looked up at each call, because gevent and eventlet may replace it after this module is imported.
            _thread.start_new_thread(_WorkerThread(self._idle, self._running).run, (call,))


class _WorkerThread:
    """One thread of a :class:`CallThreads`."""

    def __init__(self, idle: collections.deque[_WorkerThread], running: dict[Callable[[], None], None]) -> None:
        self._idle = idle
        self._running = running
        self._signal = _new_signal()
        self._call: Callable[[], None] | None = None

    def assign(self, call: Callable[[], None]) -> None:
        self._call = call
        _send(self._signal)

    def run(self, call: Callable[[], None] | None) -> None:
        with threads.background():
            self._run_calls(call)

    def _run_calls(self, call: Callable[[], None] | None) -> None:
        while call is not None:
            try:
                call()
            except BaseException as error:
                if threads.is_kill(error):
                    raise
                threads.report("a call to a server of the lock store failed", error)
            finally:
                self._running.pop(call, None)
            # Drop the references: otherwise an idle thread keeps the call's objects alive.
            self._call = call = None
            self._idle.append(self)
            call = self._next()

    def _next(self) -> Callable[[], None] | None:
        if not self._signal.acquire(True, IDLE):  # noqa: FBT003  # positional: gevent and eventlet use other names
            try:
                self._idle.remove(self)
            except ValueError:
                # A caller has just taken this thread. Unless the caller was interrupted, its call arrives now.
                self._signal.acquire(True, IDLE)  # noqa: FBT003  # positional: gevent and eventlet use other names
        return self._call


def _new_signal() -> Any:
    """Return a lock that is taken. Releasing it wakes the thread that waits for it."""
    signal = _thread.allocate_lock()
    signal.acquire()
    return signal


def _send(signal: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it was already sent
        signal.release()
