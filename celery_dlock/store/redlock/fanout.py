"""Calls that are made at once, each in a thread of its own; whoever asked goes on when it has heard enough.

The threads are those of the caller's world: real ones, and under gevent and eventlet greenlets of the caller's hub,
which alone may use its sockets. In the keeper's real thread they are greenlets of a hub of its own.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ...utils import threads as native

__all__ = ["FanOut", "PendingReplies"]

#: Seconds after which a thread that has nothing to do ends.
IDLE: Final = 5.0


class PendingReplies:
    """The answers to one question, by who gave them, as they come. It is waited for by one thread."""

    def __init__(self) -> None:
        self._told: collections.deque[tuple[int, Any]] = collections.deque()
        self._bell = _bell()
        self._answers: dict[int, Any] = {}
        #: Whoever asked has gone on, and what was done by those who come later is to be undone.
        self.lost = False
        #: Whoever asked has gone on.
        self.over = False

    def tell(self, place: int, answer: Any) -> None:
        self._told.append((place, answer))
        _ring(self._bell)

    def forget(self, places: Iterable[int]) -> None:
        """They are asked after all."""
        for place in places:
            self._answers.pop(place, None)

    def heard(self) -> Mapping[int, Any]:
        """The answers that have come."""
        while self._told:
            place, answer = self._told.popleft()
            self._answers[place] = answer
        return self._answers

    def wait(self, seconds: Callable[[Mapping[int, Any]], float]) -> Mapping[int, Any]:
        """The answers, once ``seconds``, called with those that have come, says that none more are waited for.

        Args:
            seconds: How long the next one is to be waited for; 0 or less: no longer.
        """
        while (left := seconds(self.heard())) > 0:
            self._bell.acquire(True, left)  # noqa: FBT003  # by place: gevent's and eventlet's have other names
        return self._answers


class FanOut:
    """Threads that make calls, as many as are made at once; in a forked process it begins anew."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # pop, append and remove of a deque are atomic: no lock that a fork, a signal or a greenlet could leave taken.
        self._idle: collections.deque[_WorkerThread] = collections.deque()
        self._begun: dict[Callable[[], None], None] = {}

    @property
    def busy(self) -> bool:
        """A call was begun and has not come to its end."""
        return bool(self._begun)

    def begin(self, calls: Sequence[Callable[[], None]]) -> Mapping[int, Exception]:
        """Make these calls, none of which may raise, and wait for none.

        Returns:
            Why no thread could be started for a call, by its place; such a call is not made.
        """
        not_begun = {}
        if self._pid != os.getpid():
            self._idle, self._begun = collections.deque(), {}  # a fork has none of its parent's threads
            self._pid = os.getpid()
        for place, call in enumerate(calls):
            self._begun[call] = None
            try:
                self._begin(call)
            except BaseException as error:
                self._begun.pop(call, None)
                if not isinstance(error, RuntimeError | MemoryError | OSError):
                    raise
                not_begun[place] = error
        return not_begun

    def _begin(self, call: Callable[[], None]) -> None:
        try:
            self._idle.pop().take(call)
        except IndexError:
            native.preload_imports()
            # Looked up here, because gevent and eventlet may replace it after this import.
            _thread.start_new_thread(_WorkerThread(self._idle, self._begun).run, (call,))


class _WorkerThread:
    """One thread of a crew."""

    def __init__(self, idle: collections.deque[_WorkerThread], begun: dict[Callable[[], None], None]) -> None:
        self._idle = idle
        self._begun = begun
        self._bell = _bell()
        self._call: Callable[[], None] | None = None

    def take(self, call: Callable[[], None]) -> None:
        self._call = call
        _ring(self._bell)

    def run(self, call: Callable[[], None] | None) -> None:
        with native.background():
            self._make(call)

    def _make(self, call: Callable[[], None] | None) -> None:
        while call is not None:
            try:
                call()
            except BaseException as error:
                if native.is_kill(error):
                    raise
                native.report("a call to a server of the lock store failed", error)
            finally:
                self._begun.pop(call, None)
            # Else it would keep what the call knows alive until the next one.
            self._call = call = None
            self._idle.append(self)
            call = self._next()

    def _next(self) -> Callable[[], None] | None:
        if not self._bell.acquire(True, IDLE):  # noqa: FBT003  # as above
            try:
                self._idle.remove(self)
            except ValueError:
                # Somebody has chosen it just now; unless he was interrupted, the call is coming.
                self._bell.acquire(True, IDLE)  # noqa: FBT003  # as above
        return self._call


def _bell() -> Any:
    bell = _thread.allocate_lock()
    bell.acquire()
    return bell


def _ring(bell: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it rings already
        bell.release()
