"""Native threads, even if gevent or eventlet patched Python's threads.

A patched thread is a greenlet. If another greenlet did not yield, the watchdog would stop, and with it every renewal.
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

from .greenlets import current_hub_bridge

__all__ = [
    "OneThread",
    "SerialExecutor",
    "background",
    "in_background",
    "is_kill",
    "is_native_thread",
    "local_class",
    "lock",
    "preload_imports",
    "report",
    "retry_starts",
    "sleep",
    "start_daemon",
    "thread",
    "wait",
]

#: The native threads that :func:`start_daemon` started.
_native_threads: set[int] = set()
# A forked child has none of these threads, and may reuse their numbers.
os.register_at_fork(after_in_child=_native_threads.clear)
#: Whether this is a background thread of this package, which errors of log handlers must not end.
_background: ContextVar[bool] = ContextVar("celery_dlock_background", default=False)
#: Threads that could not be started, with the process that tried.
_failed_starts: dict[OneThread, int] = {}
#: Seconds after which a started thread that does not run is started once more.
_START_TIMEOUT: Final = 1.0


def _original(module: str, name: str) -> Any:
    """Return ``module.name`` as it was before gevent or eventlet patched it."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None:
        return gevent.get_original(module, name)
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None:
        return getattr(eventlet.original(module), name)
    return getattr(importlib.import_module(module), name)


def start_daemon(target: Callable[[], None]) -> None:
    """Run ``target`` in a native thread that does not keep the process alive.

    If threads are greenlets, the target must not take a lock that greenlets use. Its log records are written by another
    thread, and a :class:`SerialExecutor` makes other calls for it.
    """
    preload_imports()
    current_hub_bridge()  # its first call must come from a thread that has a hub
    _original("_thread", "start_new_thread")(_run_native, (target,))


def _run_native(target: Callable[[], None]) -> None:
    me = thread()
    _native_threads.add(me)
    try:
        target()
    finally:
        _native_threads.discard(me)


def is_native_thread() -> bool:
    """Return whether :func:`start_daemon` started this thread."""
    return bool(_native_threads) and thread() in _native_threads


def thread() -> int:
    """Return the identifier of this native thread."""
    return int(_original("_thread", "get_ident")())


def preload_imports() -> None:
    """Import the modules that a thread would import when it connects to a server.

    If a fork interrupts an import, the child never finishes it. If two threads under gevent import one module at once,
    one of them may wait for ever.
    """
    codecs.lookup("idna")
    gevent = sys.modules.get("gevent")
    if gevent is not None and "gevent.monkey" in sys.modules:
        gevent.get_hub().resolver  # noqa: B018  # its first use creates it, with its thread pool


def lock() -> Any:
    """Return a lock between native threads. A greenlet that waits for it blocks all greenlets of its thread."""
    return _original("_thread", "allocate_lock")()


def local_class() -> Any:
    """Return the class of data that belongs to one native thread. All greenlets of the thread share the data."""
    return _original("_thread", "_local")


def sleep(seconds: float) -> None:
    """Block this native thread."""
    _original("time", "sleep")(seconds)


def wait(descriptors: Sequence[int], seconds: float) -> None:
    """Block this native thread until a descriptor is readable, for at most ``seconds``."""
    if descriptors:
        poll = _original("select", "poll")()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
    else:
        sleep(seconds)  # there is nothing to poll


@contextlib.contextmanager
def background() -> Iterator[None]:
    """Return a context for background threads, in which errors of log handlers are reported instead of raised."""
    token = _background.set(True)
    try:
        yield
    finally:
        _background.reset(token)


def in_background() -> bool:
    """Return whether this is a background thread of this package."""
    return _background.get()


def is_kill(error: BaseException) -> bool:
    """Return whether this exception kills a greenlet on request. It must be raised again."""
    greenlet = sys.modules.get("greenlet")
    return greenlet is not None and isinstance(error, greenlet.GreenletExit)


def report(what: str, error: BaseException) -> None:
    """Write an error to stderr, because the log itself failed."""
    with contextlib.suppress(Exception):
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        # Not sys.stderr: a worker redirects it to its log.
        print(f"celery_dlock: {what}", "".join(lines), sep="\n", end="", file=sys.__stderr__, flush=True)


class OneThread:
    """Work that at most one thread does at a time, in a thread that is started on demand.

    The thread itself takes the lock ``running``, and nothing waits for it. So a start that fails or is interrupted
    leaves no state behind that would prevent the next one.

    Args:
        work: The work of the thread, which may call it repeatedly.
        needed: Called when the work has ended. Returns whether there is more.
        begin: Starts a thread.
    """

    def __init__(
        self,
        work: Callable[[], object],
        needed: Callable[[], bool],
        begin: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.running = lock()
        self._work = work
        self._needed = needed
        self._begin = begin
        self._starting_until = 0.0

    def wake(self) -> Exception | None:
        """Make sure that the thread runs; return the error if it cannot be started. Never blocks.

        After an error, :func:`retry_starts` tries again.
        """
        if self.running.locked() or time.monotonic() < self._starting_until:
            return None
        try:
            self._starting_until = time.monotonic() + _START_TIMEOUT
            (self._begin or start_daemon)(self.run)
        except BaseException as error:
            self._starting_until = 0.0
            if not isinstance(error, RuntimeError | MemoryError | OSError):
                raise  # a soft time limit, for example, unrelated to the thread
            _failed_starts[self] = os.getpid()
            return error
        return None

    def run(self) -> None:
        """Do the work in the calling thread, unless another thread does it."""
        while self.running.acquire(blocking=False):
            ended = False
            try:
                self._starting_until = 0.0
                self._work()
                ended = True
            finally:
                self.running.release()
                if not ended:
                    self.wake()
            # A caller that added work after the last check saw the lock taken and started no thread. Check again.
            if not self._needed():
                return


def retry_starts() -> None:
    """Start the threads that could not be started before. Every background thread calls it in each round."""
    for one, pid in list(_failed_starts.items()):
        _failed_starts.pop(one, None)
        if pid == os.getpid():  # else the thread belongs to the parent process
            one.wake()


class SerialExecutor:
    """Runs calls one after the other, for a thread that must not wait for them.

    They run in a thread of their own: in a greenlet, if threads are greenlets. So they may take locks, log, and call
    user code.
    """

    def __init__(self) -> None:
        # A deque, because gevent patches the queues of the standard library.
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._thread = OneThread(self._work, lambda: bool(self._calls), _begin_green)

    def add(self, call: Callable[[], object]) -> None:
        """Add a call. Never blocks or raises; if no thread can be started now, the call waits until one can be."""
        self._calls.append(call)
        self._thread.wake()

    def _work(self) -> None:
        with background():
            while self._calls:
                try:
                    self._calls.popleft()()
                except BaseException as error:
                    if is_kill(error):
                        raise
                    report("a call for a background thread failed", error)


def _begin_green(work: Callable[[], None]) -> None:
    """Run ``work`` in a greenlet if threads are greenlets, else in a native thread."""
    bridge = current_hub_bridge()
    (start_daemon if bridge is None else bridge.spawn)(work)
