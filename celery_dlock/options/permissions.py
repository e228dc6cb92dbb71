"""The options that a message may choose for its call: the setting ``dlock_call_options``.

Every publisher can write the header ``dlock_call``, so its options are not trusted. By default a call cannot reach a
lock of another task. Its lock, run mark and claim last no longer than those of its task.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

from ..errors import InvalidLockOptions
from ..utils.text import did_you_mean, written
from .error_texts import ALL_OPTIONS, invalid_value
from .lock_options import OPTIONS, LockOptions

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
            bound = OPTIONS[name].bound if self.bounded and name in OPTIONS else None
            if bound and (expected := bound(own, call, self.ttl)):
                value = written(getattr(call, name))
                return f"invalid {name}={value} in a message: expected {expected}, or {SETTING} that lists {name!r}"
        return ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
