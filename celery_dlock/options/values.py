"""The allowed values of options: checks, which get the name of an option and a value, and return the value to store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import InvalidLockOptions
from ..utils.text import did_you_mean
from .durations import FOREVER, seconds_within, ttl_seconds
from .error_texts import either, invalid_value

__all__ = [
    "DEFAULT_TTL", "MAX_LIMIT", "OVERFLOW", "POLICIES", "Check", "anything", "count_or_none", "debounce", "flag", "key",
    "limit", "once_per", "one_of", "seconds", "seconds_or_none", "stop", "ttl", "unique",
]  # fmt: skip

POLICIES: Final = ("skip", "retry", "queue", "raise", "replace")
OVERFLOW: Final = ("raise", "skip", "drop_oldest")
UNIQUE: Final = ("queued", "queued+running")

#: Compared by identity: if ``ttl`` is this object, the author wrote no ttl, and the setting ``dlock_ttl`` applies.
DEFAULT_TTL: Final[float] = float("30")

#: The highest ``limit``: each acquisition looks at all seats of its name.
MAX_LIMIT: Final = 100

_KEYS: Final = (
    "None, a non-empty template such as 'sms:{user_id}', a non-empty sequence of argument names, or a callable"
)
_STOP: Final = "'raise', 'ask', or seconds (int, float or timedelta) of at least 0"
_DEBOUNCE: Final = "None, seconds from 0.001 (int, float or timedelta), or a pair of them, the longer one last"
_ONCE_PER: Final = f"'forever', 'tick', None, or seconds (int, float or timedelta) from 0.001 to {FOREVER:.10g}"

#: Values of drafts of this library, and what replaces them.
_REMOVED: Final = {
    "keep_latest": "queue_limit=1, queue_overflow='drop_oldest'",
    "wait": "wait=<seconds>, after which on_conflict applies",
    "kill": "stop=<seconds>, the time that the body has before it is killed",
}

Check = Callable[[str, Any], Any]


def key(option: str, value: object) -> object:
    """Return a checked ``key``, a sequence as a tuple."""
    if value is None or callable(value) or (isinstance(value, str) and value):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise invalid_value(option, value, _KEYS)


def ttl(option: str, value: object) -> float:
    """Return a checked ``ttl`` in seconds."""
    return DEFAULT_TTL if value is DEFAULT_TTL else ttl_seconds(option, value)


def once_per(option: str, value: object) -> object:
    """Return a checked ``once_per``."""
    if value is None or (isinstance(value, str) and value in ("forever", "tick")):
        return value
    try:
        return seconds_within(option, value, 0.001, FOREVER)
    except InvalidLockOptions:
        raise invalid_value(option, value, _ONCE_PER) from None


def unique(option: str, value: object) -> object:
    """Return a checked ``unique``."""
    if value is None or (isinstance(value, str) and value in UNIQUE):
        return value
    raise invalid_value(option, value, f"None, {either(UNIQUE)}{_similar(value, UNIQUE)}")


def flag(option: str, value: object) -> object:
    """Return a checked bool."""
    if not isinstance(value, bool):
        raise invalid_value(option, value, "True or False")
    return value


def one_of(*choices: str) -> Check:
    """Return the check of an option that has these values."""

    def check(option: str, value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise invalid_value(option, value, f"{either(choices)}{_similar(value, choices)}")
        return value

    return check


def _similar(value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str):
        return ""
    return f"; write {_REMOVED[value]}" if value in _REMOVED else did_you_mean(value, choices)


def seconds(minimum: float) -> Check:
    """Return the check of a duration."""
    return lambda option, value: seconds_within(option, value, minimum)


def seconds_or_none(minimum: float) -> Check:
    """Return the check of a duration that may be None."""
    return lambda option, value: None if value is None else seconds_within(option, value, minimum)


def count_or_none(minimum: int) -> Check:
    """Return the check of a whole number that may be None."""

    def check(option: str, value: object) -> object:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise invalid_value(option, value, f"None or a whole number of at least {minimum}")
        return value

    return check


def limit(option: str, value: object) -> object:
    """Return a checked ``limit``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        raise invalid_value(option, value, f"a whole number from 1 to {MAX_LIMIT}")
    return value


def stop(option: str, value: object) -> object:
    """Return a checked ``stop``."""
    if isinstance(value, str):
        if value in ("raise", "ask"):
            return value
        raise invalid_value(option, value, f"{_STOP}{_similar(value, ('raise', 'ask'))}")
    try:
        return seconds_within(option, value, 0.0)
    except InvalidLockOptions:
        raise invalid_value(option, value, _STOP) from None


def debounce(option: str, value: object) -> object:
    """Return a checked ``debounce``, in seconds."""
    try:
        if isinstance(value, list | tuple):
            wait, longest = value
            wait = seconds_within(option, wait, 0.001)
            return wait, seconds_within(option, longest, wait)
        return None if value is None else seconds_within(option, value, 0.001)
    except ValueError:
        raise invalid_value(option, value, _DEBOUNCE) from None


def anything(_option: str, value: object) -> object:
    """Return the value: every one is valid."""
    return value
