"""The options that a message may choose for its call: the setting ``dlock_call_options``.

Every publisher can write the header ``dlock_call``, so its options are not trusted. By default a call cannot reach a
lock of another task. Its lock, run mark and claim last no longer than those of its task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from ..errors import InvalidLockOptions
from ..utils.text import did_you_mean, written
from .lock_options import LockOptions
from .validation import ALL_OPTIONS, as_seconds, invalid_value

__all__ = ["BOUNDED", "ENABLED", "SETTING", "Permissions"]

SETTING: Final = "dlock_call_options"
#: The value of the setting that permits any option, within bounds set by the task's own options.
BOUNDED: Final = "bounded"
_ALL: Final = "all"
#: The key of ``dlock=`` that switches the lock of a call off. It is no option of tasks.
ENABLED: Final = "enabled"


class Permissions(NamedTuple):
    """The options that messages may choose.

    Args:
        names: The names of these options; None for every option.
        bounded: Whether values must stay within bounds set by the task's own options.
        ttl: The setting ``dlock_ttl`` in seconds: the ttl of tasks that choose none.
    """

    names: Collection[str] | None
    bounded: bool
    ttl: float

    @classmethod
    def of(cls, setting: Any, ttl: float) -> Permissions:
        """Return the permissions that the setting grants.

        Raises:
            InvalidLockOptions: The setting is invalid.
        """
        known = (*LockOptions.names(), ENABLED)
        if setting in (None, BOUNDED):
            return cls(None, True, ttl)  # noqa: FBT003  # a NamedTuple's field
        if setting == _ALL:
            return cls(None, False, ttl)  # noqa: FBT003  # a NamedTuple's field
        if not isinstance(setting, list | tuple | set | frozenset):
            raise invalid_value(SETTING, setting, f"{BOUNDED!r}, {_ALL!r} or a list of options")
        for name in setting:
            if name not in known:
                meant = did_you_mean(name, known)
                raise InvalidLockOptions(f"{SETTING}: unknown option {written(name)}{meant}; {ALL_OPTIONS}")
        return cls(frozenset(setting), False, ttl)  # noqa: FBT003  # a NamedTuple's field

    def refusal(self, own: LockOptions, call: LockOptions, chosen: Iterable[str]) -> str:
        """Return the error text for a choice that is not permitted; "" if all choices are.

        Args:
            own: The options of the task.
            call: The options of the call: those of the task, overridden by the message.
            chosen: The names of the options that the message chose.
        """
        for name in sorted(chosen, key="scope".__ne__):  # the scope first: the bounds of other options depend on it
            if self.names is not None and name not in self.names:
                return f"{name} is not permitted in a message: {SETTING} permits {_listed(self.names)}"
            if self.bounded and (bound := _BOUNDS.get(name)) and (expected := bound(own, call, self.ttl)):
                value = written(getattr(call, name))
                return f"invalid {name}={value} in a message: expected {expected}, or {SETTING} that lists {name!r}"
        return ""


#: Returns the expected values if the call exceeds the bound; else "".
_Bound = Callable[[LockOptions, LockOptions, float], str]


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _scope(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    return "" if call.scope == "task" or own.scope == "shared" else "'task', which is the task's own"


def _key(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    if call.scope == "task" or call.key == own.key:
        return ""
    return f"the task's own ({written(own.key)}) with scope='shared'"


def _ttl(own: LockOptions, call: LockOptions, ttl: float) -> str:
    limit = own.ttl_or(ttl)
    return "" if call.ttl_or(ttl) <= limit else f"at most the task's own ({limit:g})"


def _at_most(name: str) -> _Bound:
    def bound(own: LockOptions, call: LockOptions, _ttl: float) -> str:
        limit = as_seconds(getattr(own, name))
        return "" if as_seconds(getattr(call, name)) <= limit else f"at most the task's own ({limit:g})"

    return bound


def _max_hold(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    if own.max_hold is None:
        return ""
    limit = as_seconds(own.max_hold)
    if call.max_hold is not None and as_seconds(call.max_hold) <= limit:
        return ""
    return f"at most the task's own ({limit:g})"


def _limit(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """The largest limit of all calls of a name counts for each of them."""
    return "" if call.limit == own.limit else f"the task's own ({own.limit})"


def _stop(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """A kill leaves half-done work, so the author of the task decides about it."""
    if not isinstance(call.stop, float):
        return ""
    if not isinstance(own.stop, float):
        return f"'raise' or 'ask', because the task's own is {written(own.stop)}"
    return "" if call.stop >= own.stop else f"at least the task's own ({own.stop:g})"


def _once(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    window, limit = call.once_seconds, own.once_seconds
    if window is None or (limit is not None and window <= limit):
        return ""
    if limit is None:
        # Only calls with once_per read the run mark. With scope="task", no other task can read the mark of this call.
        return "" if call.scope == "task" else "None, which is the task's own"
    return f"at most the task's own ({limit:g} s)"


def _debounce(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    """A debounced call removes other waiters and decides when they run."""
    if call.debounce is None or call.debounce_ms == own.debounce_ms:
        return ""
    if call.scope == "shared":
        return f"the task's own ({written(own.debounce)}) with scope='shared'"
    if own.debounce is None or all(
        chosen <= most for chosen, most in zip(call.debounce_ms, own.debounce_ms, strict=True)
    ):
        return ""
    return f"at most the task's own ({written(own.debounce)})"


def _only_own_in_shared(name: str, harmful: Callable[[Any], bool]) -> _Bound:
    def bound(own: LockOptions, call: LockOptions, _ttl: float) -> str:
        value = getattr(call, name)
        if call.scope == "task" or not harmful(value) or value == getattr(own, name):
            return ""
        return f"the task's own ({written(getattr(own, name))}) with scope='shared'"

    return bound


_BOUNDS: Final[dict[str, _Bound]] = {
    "scope": _scope,
    "key": _key,
    "ttl": _ttl,
    "min_hold": _at_most("min_hold"),
    "max_hold": _max_hold,
    "limit": _limit,
    "once_per": _once,
    "misfire_grace": _once,
    "queued_ttl": _at_most("queued_ttl"),
    "wait": _at_most("wait"),
    "stop": _stop,
    "debounce": _debounce,
    "keep_on_retry": _only_own_in_shared("keep_on_retry", bool),
    "on_conflict": _only_own_in_shared("on_conflict", "replace".__eq__),
    "queue_overflow": _only_own_in_shared(
        "queue_overflow", "drop_oldest".__eq__
    ),  # it removes waiters, perhaps of other tasks,
}
