"""How a thread of the operating system reaches the greenlets of its process, under gevent and eventlet.

Their locks are no locks between such a thread and greenlets: who waits for one may wait for ever, though it is free.
Python's own are among them: a logging handler's, a queue's, a connection pool's. So a real thread of ours takes none of
them; what needs one is rung for here, and a greenlet does it.
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
    """Rung from any thread, never blocks."""

    def soon(self, step: Work) -> None:
        """Have the hub's thread call ``step``, which neither blocks nor raises."""
        ...

    def spawn(self, work: Work) -> None:
        """Have a new greenlet of that hub do ``work``."""
        ...


def current_hub_bridge() -> HubBridge | None:
    """The bell of the greenlets in this process; None where no threads are greenlets.

    The first call must come from the thread whose hub runs them.
    """
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return hub_bridge("gevent")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return hub_bridge("eventlet")
    return None


def hub_bridge(library: str) -> HubBridge:
    """The bell for the hub of ``library`` in this process; for the first call see `hang`."""
    key = library, os.getpid()
    if key not in _hung:
        _hung[key] = _KINDS[library]()
    return _hung[key]


class _GeventBell:
    def __init__(self) -> None:
        self._gevent = import_module("gevent")
        self._loop = self._gevent.get_hub().loop

    def soon(self, step: Work) -> None:
        self._loop.run_callback_threadsafe(step)

    def spawn(self, work: Work) -> None:
        self.soon(lambda: self._gevent.spawn(work))


class _EventletBell:
    """Eventlet's hub cannot be called from another thread, so a greenlet of it reads from a pipe."""

    def __init__(self) -> None:
        self._eventlet = import_module("eventlet")
        self._os = self._eventlet.patcher.original("os")
        self._steps: collections.deque[Work] = collections.deque()
        self._ear, self._rope = self._os.pipe()
        for end in (self._ear, self._rope):
            self._os.set_blocking(end, False)
        self._eventlet.spawn(self._listen)

    def soon(self, step: Work) -> None:
        self._steps.append(step)
        # Full, while a greenlet does not yield: then it has been rung.
        with suppress(BlockingIOError):
            self._os.write(self._rope, b"!")

    def spawn(self, work: Work) -> None:
        self.soon(lambda: self._eventlet.spawn_n(work))

    def _listen(self) -> None:
        while True:
            self._eventlet.hubs.trampoline(self._ear, read=True)
            self._os.read(self._ear, 4096)
            while self._steps:
                with suppress(Exception):  # a greenlet that cannot be made must not deafen this one
                    self._steps.popleft()()


_KINDS: dict[str, Callable[[], HubBridge]] = {"gevent": _GeventBell, "eventlet": _EventletBell}
#: By library and process: a fork has greenlets of its own.
_hung: dict[tuple[str, int], HubBridge] = {}
