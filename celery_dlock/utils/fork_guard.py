"""Delays a fork while other threads hold locks that the child would inherit locked.

A child that inherits a locked lock waits for it for ever. Two cases were measured:

- OpenSSL's lock, at the first handshake of the child. It hit 2 of 5 workers that forked their pool while a thread
  loaded the certificates.
- The lock of a cached property of Celery, kombu or Python, at the first publication. It hit 1 of 65 workers that
  replaced a killed child while another thread published a waiter.

These locks belong to the whole process, so the guard does too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from . import threads

__all__ = ["no_fork"]

#: Seconds that a fork waits for one thread. A thread that takes longer is waiting for a server and holds no such lock.
_FORK_TIMEOUT: Final = 0.5


class _ForkGuard:
    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin in this process. The threads of its parent do not exist here."""
        self._pid = os.getpid()
        #: Held by the forking thread during the fork. A thread that enters the guard takes it for a moment, so it waits
        #: for the end of a fork.
        self._gate = threads.lock()
        #: For each thread inside the guard: a lock that it holds until it leaves.
        self._inside: dict[int, Any] = {}

    @contextmanager
    def crossing(self) -> Iterator[None]:
        if self._pid != os.getpid():
            self._begin()  # a fork in C, such as that of uWSGI, calls no hook
        me = threads.thread()
        if me in self._inside:
            # This thread is inside already. At the gate, it would wait for a fork that waits for this thread.
            yield
            return
        mine = threads.lock()
        mine.acquire()
        with self._gate:
            self._inside[me] = mine
        try:
            yield
        finally:
            self._inside.pop(me, None)
            mine.release()

    def _close(self) -> None:
        self._gate.acquire()
        me = threads.thread()
        for thread, other in list(self._inside.items()):
            if thread != me:
                other.acquire(timeout=_FORK_TIMEOUT)

    def _open(self) -> None:
        self._gate.release()


_GUARD = _ForkGuard()


def no_fork() -> Any:
    """Return a context for code that takes locks of other libraries. A fork waits up to 0.5 s for its end."""
    return _GUARD.crossing()
