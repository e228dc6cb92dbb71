"""Threads of the operating system, also where gevent or eventlet have replaced Python's.

A patched thread is a greenlet: one greenlet that does not yield would stop the keeper, and with it every renewal.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Flag", "sleep", "start_daemon"]


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
    """Run ``target`` in a real thread that never keeps the process alive."""
    _original("_thread", "start_new_thread")(target, ())


def sleep(seconds: float) -> None:
    """Block this real thread, and no greenlet of another."""
    _original("time", "sleep")(seconds)


class Flag:
    """Taken by one at a time, never waited for: safe between greenlets and real threads alike."""

    def __init__(self) -> None:
        self._lock = _original("_thread", "allocate_lock")()

    def take(self) -> bool:
        return bool(self._lock.acquire(blocking=False))

    def drop(self) -> None:
        self._lock.release()
