"""Threads of the operating system, also where gevent or eventlet have replaced Python's.

A patched thread is a greenlet: one greenlet that does not yield would stop the keeper, and with it every renewal.
"""

from __future__ import annotations

import codecs
import collections
import importlib
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import bell

__all__ = ["Errands", "Flag", "foreign", "lock", "prepare", "sleep", "start_daemon", "thread", "wait"]

#: The real threads of ours that run beside greenlets.
_foreign: set[int] = set()


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

    Beside greenlets it must take no lock that they share: it logs through `voice`, and tells others by `Errands`.
    """
    prepare()
    start = _original("_thread", "start_new_thread")
    if bell.hang() is None:
        start(target, ())
    else:
        start(_run_foreign, (target,))


def _run_foreign(target: Callable[[], None]) -> None:
    me = thread()
    _foreign.add(me)
    try:
        target()
    finally:
        _foreign.discard(me)


def foreign() -> bool:
    """Is this a real thread beside greenlets?"""
    return bool(_foreign) and thread() in _foreign


def thread() -> int:
    """The number of this real thread."""
    return int(_original("_thread", "get_ident")())


def prepare() -> None:
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


class Flag:
    """Taken by one at a time, never waited for: safe between greenlets and real threads alike."""

    def __init__(self) -> None:
        self._lock = lock()

    def take(self) -> bool:
        return bool(self._lock.acquire(blocking=False))

    def drop(self) -> None:
        self._lock.release()


class Errands:
    """What is done for a thread that must not wait for it, one after the other.

    In a thread of its own, which beside greenlets is one of them: so they may take locks, log, and call users' code.
    """

    def __init__(self) -> None:
        # A deque, because gevent replaces the queues of the standard library.
        self._left: collections.deque[Callable[[], object]] = collections.deque()
        self._running = Flag()

    def add(self, errand: Callable[[], object]) -> None:
        """Never blocks."""
        self._left.append(errand)
        if self._running.take():
            greenlets = bell.hang()
            (start_daemon if greenlets is None else greenlets.spawn)(self._run)

    def _run(self) -> None:
        while True:
            try:
                while self._left:
                    self._left.popleft()()
            finally:
                self._running.drop()
            # What was appended after the last look found the flag still up, so look once more.
            if not self._left or not self._running.take():
                return
