"""Threads of the operating system, also where gevent or eventlet have replaced Python's.

A patched thread is a greenlet: one greenlet that does not yield would stop the keeper, and with it every renewal.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import importlib
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final

from . import greenlets as bell

__all__ = [
    "OneThread",
    "SerialExecutor",
    "TryLock",
    "background",
    "in_background",
    "is_kill",
    "is_native_thread",
    "lock",
    "preload_imports",
    "report",
    "retry_starts",
    "sleep",
    "start_daemon",
    "thread",
    "wait",
]

#: The real threads that `start_daemon` has started.
_foreign: set[int] = set()
# A child has none of them, and the number of one may be that of a thread that the child starts.
os.register_at_fork(after_in_child=_foreign.clear)
#: Is this a background thread of ours, which no log handler and no listener may end?
_background: ContextVar[bool] = ContextVar("celery_dlock_background", default=False)
#: Threads that could not be started, and the process that tried.
_owed: dict[OneThread, int] = {}
#: Seconds after which a thread that was started and has not begun is started once more.
_BEGINS_WITHIN: Final = 1.0


def _original(module: str, name: str) -> Any:
    """``module.name`` as it was before gevent or eventlet patched it."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None:
        return gevent.get_original(module, name)
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None:
        return getattr(eventlet.original(module), name)
    return getattr(importlib.import_module(module), name)


def start_daemon(target: Callable[[], None]) -> None:
    """Run ``target`` in a real thread that never keeps the process alive.

    It logs through `voice`, which has another thread write the records. Beside greenlets it must take no lock that
    they share: it tells others by `Errands`.
    """
    preload_imports()
    bell.current_hub_bridge()  # here, because its first call must come from a thread with a hub
    _original("_thread", "start_new_thread")(_run_foreign, (target,))


def _run_foreign(target: Callable[[], None]) -> None:
    me = thread()
    _foreign.add(me)
    try:
        target()
    finally:
        _foreign.discard(me)


def is_native_thread() -> bool:
    """Was this thread started by `start_daemon`?"""
    return bool(_foreign) and thread() in _foreign


def thread() -> int:
    """The number of this real thread."""
    return int(_original("_thread", "get_ident")())


def preload_imports() -> None:
    """Import here and now what a thread would import when it connects to a server.

    An import that a fork interrupts is never finished in the child; and of two threads under gevent that import one
    module at once, one may wait for ever.
    """
    codecs.lookup("idna")
    gevent = sys.modules.get("gevent")
    if gevent is not None and "gevent.monkey" in sys.modules:
        gevent.get_hub().resolver  # noqa: B018  # made, with its pool of threads, at its first use


def lock() -> Any:
    """A lock between real threads; a greenlet that waits for it stops all of its thread's."""
    return _original("_thread", "allocate_lock")()


def sleep(seconds: float) -> None:
    """Block this real thread, and no greenlet of another."""
    _original("time", "sleep")(seconds)


def wait(descriptors: Sequence[int], seconds: float) -> None:
    """Block this real thread until one of the descriptors can be read, at most so long."""
    if descriptors:
        poll = _original("select", "poll")()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
    else:
        sleep(seconds)  # also where the system has no poll


@contextlib.contextmanager
def background() -> Iterator[None]:
    """A context for background threads: in it, a log handler that raises is reported and changes nothing."""
    token = _background.set(True)
    try:
        yield
    finally:
        _background.reset(token)


def in_background() -> bool:
    """Is this a background thread of ours?"""
    return _background.get()


def is_kill(error: BaseException) -> bool:
    """Does this error end a greenlet on request? It must not be caught for good."""
    greenlet = sys.modules.get("greenlet")
    return greenlet is not None and isinstance(error, greenlet.GreenletExit)


def report(what: str, error: BaseException) -> None:
    """Write an error to stderr: the last resort where the log itself fails."""
    with contextlib.suppress(Exception):
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        # Not sys.stderr: a worker has replaced it with its log.
        print(f"celery_dlock: {what}", "".join(lines), sep="\n", end="", file=sys.__stderr__, flush=True)


class TryLock:
    """Taken by one at a time, never waited for: safe between greenlets and real threads alike."""

    def __init__(self) -> None:
        self._lock = lock()

    @property
    def taken(self) -> bool:
        return bool(self._lock.locked())

    def take(self) -> bool:
        return bool(self._lock.acquire(blocking=False))

    def drop(self) -> None:
        self._lock.release()


class OneThread:
    """Work that at most one thread does at a time; a thread is started when there is work to do.

    The thread takes the flag itself. So a start that fails, or that an exception interrupts, leaves nothing behind
    that would keep the next start from being made.

    Args:
        work: What the thread does; it may be called again by the same thread.
        needed: Asked after the work has ended: has more been asked for meanwhile?
        begin: Starts a thread.
    """

    def __init__(
        self,
        work: Callable[[], object],
        needed: Callable[[], bool],
        begin: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.running = TryLock()
        self._work = work
        self._needed = needed
        self._begin = begin
        self._begins_until = 0.0

    def wake(self) -> Exception | None:
        """Make sure that the thread runs; return the error if it cannot be started. Never blocks.

        After an error, `retry_starts` tries again.
        """
        if self.running.taken or time.monotonic() < self._begins_until:
            return None
        try:
            self._begins_until = time.monotonic() + _BEGINS_WITHIN
            (self._begin or start_daemon)(self.run)
        except BaseException as error:
            self._begins_until = 0.0
            if not isinstance(error, RuntimeError | MemoryError | OSError):
                raise  # a soft time limit, say, that has nothing to do with the thread
            _owed[self] = os.getpid()
            return error
        return None

    def run(self) -> None:
        """Do the work, in the calling thread, unless another thread does it."""
        while self.running.take():
            ended = False
            try:
                self._begins_until = 0.0
                self._work()
                ended = True
            finally:
                self.running.drop()
                if not ended:
                    self.wake()
            # What was asked for after the last look found the flag taken, so look once more.
            if not self._needed():
                return


def retry_starts() -> None:
    """Start the threads that could not be started before; every background thread calls it in each round."""
    for one, pid in list(_owed.items()):
        _owed.pop(one, None)
        if pid == os.getpid():  # else it is the thread of the process that forked this one
            one.wake()


class SerialExecutor:
    """What is done for a thread that must not wait for it, one after the other.

    In a thread of its own, which beside greenlets is one of them: so they may take locks, log, and call users' code.
    """

    def __init__(self) -> None:
        # A deque, because gevent replaces the queues of the standard library.
        self._left: collections.deque[Callable[[], object]] = collections.deque()
        self._thread = OneThread(self._work, lambda: bool(self._left), _begin_green)

    def add(self, errand: Callable[[], object]) -> None:
        """Never blocks and never raises; if no thread can be started now, the errand is done once one can be."""
        self._left.append(errand)
        self._thread.wake()

    def _work(self) -> None:
        with background():
            while self._left:
                try:
                    self._left.popleft()()
                except BaseException as error:
                    if is_kill(error):
                        raise
                    report("an errand of a background thread failed", error)


def _begin_green(work: Callable[[], None]) -> None:
    """Run ``work`` in a greenlet where threads are greenlets, else in a real thread."""
    greenlets = bell.current_hub_bridge()
    (start_daemon if greenlets is None else greenlets.spawn)(work)
