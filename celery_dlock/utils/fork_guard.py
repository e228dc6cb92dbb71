"""Keeps forks apart from what other threads do under locks that a child would copy as they are.

A child that inherits a taken lock waits for it for ever: OpenSSL's, at its own first handshake (measured: 2 of 5
workers that forked their pool while a thread loaded the certificates); that of a cached property of Celery, kombu or
Python, at its first publication (1 of 65 workers whose child was killed: its place was taken by a fork made while
another thread handed the lock over). Those locks are the whole process's, and so is this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from . import threads as native

__all__ = ["no_fork"]

#: Seconds that a fork waits for one thread; longer that only waits for a server, and holds no such lock then.
_PATIENCE: Final = 0.5


class _ForkGuard:
    def __init__(self) -> None:
        #: Taken by who forks, from before until after; whoever begins passes through it.
        self._gate = native.lock()
        #: By thread: a taken lock, while it is not to be forked.
        self._inside: dict[int, Any] = {}
        os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._renew)

    @contextmanager
    def crossing(self) -> Iterator[None]:
        me = native.thread()
        if me in self._inside:
            # At the gate it would wait for the fork that waits for it.
            yield
            return
        mine = native.lock()
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
        me = native.thread()
        for thread, other in list(self._inside.items()):
            if thread != me:
                other.acquire(timeout=_PATIENCE)

    def _open(self) -> None:
        self._gate.release()

    def _renew(self) -> None:
        # Those were other threads, which are not in this process.
        self._inside.clear()
        self._gate.release()


_FENCE = _ForkGuard()


def no_fork() -> Any:
    """A context for what takes locks that are not ours: no process is forked while this thread is in it."""
    return _FENCE.crossing()
