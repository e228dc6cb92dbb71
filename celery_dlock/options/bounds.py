"""The bounds of the options that a message chooses, which the options of its task set.

A bound returns the expected values if the call exceeds it; else "". Its arguments are the options of the task, those of
the call, and the ttl of tasks that choose none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..utils.text import written
from .durations import as_seconds

if TYPE_CHECKING:
    from .lock_options import LockOptions

__all__ = [
    "Bound",
    "at_most",
    "debounce",
    "key",
    "limit",
    "max_hold",
    "once",
    "only_own_in_shared",
    "scope",
    "stop",
    "ttl",
]

Bound = Callable[["LockOptions", "LockOptions", float], str]


def scope(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound ``scope`` to the task's own, or to the task alone."""
    return "" if call.scope == "task" or own.scope == "shared" else "'task', which is the task's own"


def key(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound the key of a shared lock to the task's own. Any other lock name contains the task's name."""
    if call.scope == "task" or call.key == own.key:
        return ""
    return f"the task's own ({written(own.key)}) with scope='shared'"


def ttl(own: LockOptions, call: LockOptions, ttl: float) -> str:
    """Bound ``ttl`` by the task's own."""
    return _at_most(own.ttl_or(ttl), call.ttl_or(ttl))


def _at_most(limit: float, chosen: float) -> str:
    return "" if chosen <= limit else f"at most the task's own ({limit:g})"


def at_most(name: str) -> Bound:
    """Return the bound of a duration by the task's own."""

    def bound(own: LockOptions, call: LockOptions, _ttl: float) -> str:
        return _at_most(as_seconds(getattr(own, name)), as_seconds(getattr(call, name)))

    return bound


def max_hold(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound ``max_hold`` by the task's own, if the task sets one."""
    if own.max_hold is None:
        return ""
    return _at_most(as_seconds(own.max_hold), math.inf if call.max_hold is None else as_seconds(call.max_hold))


def limit(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound ``limit`` to the task's own: the largest limit of all calls of a name counts for each of them."""
    return "" if call.limit == own.limit else f"the task's own ({own.limit})"


def stop(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound a kill by the task's own: it leaves half-done work, so the author of the task decides about it."""
    if not isinstance(call.stop, float):
        return ""
    if not isinstance(own.stop, float):
        return f"'raise' or 'ask', because the task's own is {written(own.stop)}"
    return "" if call.stop >= own.stop else f"at least the task's own ({own.stop:g})"


def once(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound the time for which a name stays used by the task's own."""
    window, limit = call.once_seconds, own.once_seconds
    if window is None or (limit is not None and window <= limit):
        return ""
    if limit is None:
        # Only calls with once_per read the run mark. With scope="task", no other task can read the mark of this call.
        return "" if call.scope == "task" else "None, which is the task's own"
    return f"at most the task's own ({limit:g} s)"


def debounce(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """Bound ``debounce`` by the task's own: a debounced call removes other waiters and decides when they run."""
    if call.debounce is None or call.debounce_ms == own.debounce_ms:
        return ""
    if call.scope == "shared":
        return f"the task's own ({written(own.debounce)}) with scope='shared'"
    if own.debounce is None or all(
        chosen <= most for chosen, most in zip(call.debounce_ms, own.debounce_ms, strict=True)
    ):
        return ""
    return f"at most the task's own ({written(own.debounce)})"


def only_own_in_shared(name: str, harmful: Callable[[Any], bool]) -> Bound:
    """Return the bound of an option of which a shared lock may have a harmful value only if its task has it."""

    def bound(own: LockOptions, call: LockOptions, _ttl: float) -> str:
        value = getattr(call, name)
        if call.scope == "task" or not harmful(value) or value == getattr(own, name):
            return ""
        return f"the task's own ({written(getattr(own, name))}) with scope='shared'"

    return bound
