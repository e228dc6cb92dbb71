"""Calls from a native thread into the hub of gevent or eventlet.

A lock that gevent or eventlet patched does not work between a native thread and greenlets. A waiter may wait for ever
although the lock is free. The locks of logging handlers, queues and connection pools are patched too. So native threads
take none of them: they ask a greenlet to do the work.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol

__all__ = ["HubBridge", "current_hub_bridge", "hub_bridge"]

Work = Callable[[], Any]


class HubBridge(Protocol):
    """Calls into a hub. Its methods may be called from any thread and never block."""

    def soon(self, step: Work) -> None:
        """Let the thread of the hub call ``step``, which must neither block nor raise."""
        ...

    def spawn(self, work: Work) -> None:
        """Let a new greenlet of the hub run ``work``."""
        ...


def current_hub_bridge() -> HubBridge | None:
    """Return the bridge to the greenlets of this process; None if threads are not greenlets.

    The first call must come from the thread whose hub runs the greenlets.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return hub_bridge("gevent")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return hub_bridge("eventlet")
    return None


def hub_bridge(library: str) -> HubBridge:
    """Return the bridge to the hub of ``library``; the first call is restricted as in :func:`current_hub_bridge`."""
    key = library, os.getpid()
    if key not in _bridges:
        _bridges[key] = _KINDS[library]()
    return _bridges[key]


class _GeventBridge:
    def __init__(self) -> None:
        self._gevent = import_module("gevent")
        self._loop = self._gevent.get_hub().loop

    def soon(self, step: Work) -> None:
        self._loop.run_callback_threadsafe(step)

    def spawn(self, work: Work) -> None:
        self.soon(lambda: self._gevent.spawn(work))


class _EventletBridge:
    """A greenlet that reads from a pipe, because other threads cannot call the hub of eventlet."""

    def __init__(self) -> None:
        self._eventlet = import_module("eventlet")
        self._os = self._eventlet.patcher.original("os")
        self._steps: collections.deque[Work] = collections.deque()
        self._read_end, self._write_end = self._os.pipe()
        for end in (self._read_end, self._write_end):
            self._os.set_blocking(end, False)
        self._eventlet.spawn(self._listen)

    def soon(self, step: Work) -> None:
        self._steps.append(step)
        # The pipe can be full if a greenlet has not yielded for long. The reader will then wake up anyway, without this
        # byte.
        with suppress(BlockingIOError):
            self._os.write(self._write_end, b"!")

    def spawn(self, work: Work) -> None:
        self.soon(lambda: self._eventlet.spawn_n(work))

    def _listen(self) -> None:
        while True:
            self._eventlet.hubs.trampoline(self._read_end, read=True)
            self._os.read(self._read_end, 4096)
            while self._steps:
                with suppress(Exception):  # a greenlet that cannot be created must not end this one
                    self._steps.popleft()()


_KINDS: dict[str, Callable[[], HubBridge]] = {"gevent": _GeventBridge, "eventlet": _EventletBridge}
#: Bridges by library and process: a forked child has its own hub.
_bridges: dict[tuple[str, int], HubBridge] = {}
