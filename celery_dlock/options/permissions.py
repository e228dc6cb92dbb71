"""Which options a message may choose for its call: the setting ``dlock_call_options``.

A message is written by its publisher, so the header ``dlock_call`` gives every publisher the options that it carries.
By default a call stays within what its task's author chose: it reaches no lock of another task, and its lock, mark and
claim last no longer than the task's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from ..errors import InvalidLockOptions
from ..utils.text import written
from .lock_options import LockOptions
from .validation import as_seconds, did_you_mean

__all__ = ["BOUNDED", "ENABLED", "SETTING", "Permissions"]

SETTING: Final = "dlock_call_options"
#: Any option, within the bounds of the task's own.
BOUNDED: Final = "bounded"
_ALL: Final = "all"
#: Not an option of the task: a call that is not enabled takes no lock.
ENABLED: Final = "enabled"
#: What ends other waiters of the name, which may belong to other tasks.
_OUSTING: Final = ("drop_oldest", "keep_latest")


class Permissions(NamedTuple):
    """Which options messages may choose.

    Args:
        names: Exactly these, with any value; None: every option.
        bounded: Only within the bounds of the task's own options.
        ttl: ``dlock_ttl``: the ttl in seconds of tasks that name none.
    """

    names: Collection[str] | None
    bounded: bool
    ttl: float

    @classmethod
    def of(cls, setting: Any, ttl: float) -> Permissions:
        """Read the setting.

        Raises:
            InvalidLockOptions: It is not allowed.
        """
        known = (*LockOptions.names(), ENABLED)
        if setting in (None, BOUNDED):
            return cls(None, True, ttl)  # noqa: FBT003  # a NamedTuple's field
        if setting == _ALL:
            return cls(None, False, ttl)  # noqa: FBT003  # likewise
        if not isinstance(setting, list | tuple | set | frozenset):
            raise InvalidLockOptions(
                f"{SETTING}={written(setting)} is not allowed; allowed: {BOUNDED!r}, {_ALL!r} or a list of options"
            )
        for name in setting:
            if name not in known:
                raise InvalidLockOptions(
                    f"{SETTING}: unknown option {written(name)}{did_you_mean(name, known)}; "
                    f"known are {', '.join(known)}"
                )
        return cls(frozenset(setting), False, ttl)  # noqa: FBT003  # likewise

    def refusal(self, own: LockOptions, call: LockOptions, chosen: Iterable[str]) -> str:
        """Why a message may not choose so; "" if it may.

        Args:
            own: The task's options.
            call: The call's: the task's with what the message chose instead.
            chosen: The names of what it chose.
        """
        for name in sorted(chosen, key="scope".__ne__):  # the scope first: what else is harmful depends on it
            if self.names is not None and name not in self.names:
                return f"{name} is not allowed in a message; allowed by {SETTING}: {_listed(self.names)}"
            if self.bounded and (within := _BOUNDS.get(name)) and (allowed := within(own, call, self.ttl)):
                value = written(getattr(call, name))
                return f"{name}={value} is not allowed in a message; allowed: {allowed}, or {SETTING} with {name!r}"
        return ""


_Bound = Callable[[LockOptions, LockOptions, float], str]


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _scope(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    return "" if call.scope == "task" or own.scope == "shared" else "'task', as the task's own"


def _key(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    if call.scope == "task" or call.key == own.key:
        return ""
    return f"the task's own ({written(own.key)}) with scope='shared'"


def _ttl(own: LockOptions, call: LockOptions, ttl: float) -> str:
    most = own.ttl_or(ttl)
    return "" if call.ttl_or(ttl) <= most else f"at most the task's own ({most:g})"


def _at_most(name: str) -> _Bound:
    def within(own: LockOptions, call: LockOptions, _ttl: float) -> str:
        most = as_seconds(getattr(own, name))
        return "" if as_seconds(getattr(call, name)) <= most else f"at most the task's own ({most:g})"

    return within


def _max_hold(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    if own.max_hold is None:
        return ""
    most = as_seconds(own.max_hold)
    if call.max_hold is not None and as_seconds(call.max_hold) <= most:
        return ""
    return f"at most the task's own ({most:g})"


def _once(own: LockOptions, call: LockOptions, _ttl: float) -> str:
    window, most = call.once_seconds, own.once_seconds
    if window is None or (most is not None and window <= most):
        return ""
    if most is None:
        # The mark is read by calls with once_per only: here by those of this task that chose it themselves.
        return "" if call.scope == "task" else "None, as the task's own"
    return f"at most the task's own ({most:g} s)"


def _only_own_in_shared(name: str, harmful: Callable[[Any], bool]) -> _Bound:
    def within(own: LockOptions, call: LockOptions, _ttl: float) -> str:
        value = getattr(call, name)
        if call.scope == "task" or not harmful(value) or value == getattr(own, name):
            return ""
        return f"the task's own ({written(getattr(own, name))}) with scope='shared'"

    return within


_BOUNDS: Final[dict[str, _Bound]] = {
    "scope": _scope,
    "key": _key,
    "ttl": _ttl,
    "min_hold": _at_most("min_hold"),
    "max_hold": _max_hold,
    "once_per": _once,
    "misfire_grace": _once,
    "queued_ttl": _at_most("queued_ttl"),
    "wait_timeout": _at_most("wait_timeout"),
    "keep_on_retry": _only_own_in_shared("keep_on_retry", bool),
    "queue_overflow": _only_own_in_shared("queue_overflow", _OUSTING.__contains__),
}
