"""The allowed values of each option: one check per option, which returns the value to store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidLockOptions
from ..utils.text import did_you_mean
from .validation import FOREVER, either, invalid_value, seconds_within, ttl_seconds

__all__ = [
    "CHECKS",
    "DEFAULT_TTL",
    "OVERFLOW",
    "POLICIES",
]

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

_Check = Callable[[str, Any], Any]


def _key(option: str, value: object) -> object:
    if value is None or callable(value) or (isinstance(value, str) and value):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise invalid_value(option, value, _KEYS)


def _ttl(option: str, value: object) -> float:
    return DEFAULT_TTL if value is DEFAULT_TTL else ttl_seconds(option, value)


def _once_per(option: str, value: object) -> object:
    if value is None or (isinstance(value, str) and value in ("forever", "tick")):
        return value
    try:
        return seconds_within(option, value, 0.001, FOREVER)
    except InvalidLockOptions:
        raise invalid_value(option, value, _ONCE_PER) from None


def _unique(option: str, value: object) -> object:
    if value is None or (isinstance(value, str) and value in UNIQUE):
        return value
    raise invalid_value(option, value, f"None, {either(UNIQUE)}{_similar(value, UNIQUE)}")


def _flag(option: str, value: object) -> object:
    if not isinstance(value, bool):
        raise invalid_value(option, value, "True or False")
    return value


def _one_of(*choices: str) -> _Check:
    def check(option: str, value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise invalid_value(option, value, f"{either(choices)}{_similar(value, choices)}")
        return value

    return check


def _similar(value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str):
        return ""
    return f"; write {_REMOVED[value]}" if value in _REMOVED else did_you_mean(value, choices)


def _seconds(minimum: float) -> _Check:
    return lambda option, value: seconds_within(option, value, minimum)


def _seconds_or_none(minimum: float) -> _Check:
    return lambda option, value: None if value is None else seconds_within(option, value, minimum)


def _count_or_none(minimum: int) -> _Check:
    def check(option: str, value: object) -> object:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise invalid_value(option, value, f"None or a whole number of at least {minimum}")
        return value

    return check


def _limit(option: str, value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LIMIT:
        raise invalid_value(option, value, f"a whole number from 1 to {MAX_LIMIT}")
    return value


def _stop(option: str, value: object) -> object:
    if isinstance(value, str):
        if value in ("raise", "ask"):
            return value
        raise invalid_value(option, value, f"{_STOP}{_similar(value, ('raise', 'ask'))}")
    try:
        return seconds_within(option, value, 0.0)
    except InvalidLockOptions:
        raise invalid_value(option, value, _STOP) from None


def _debounce(option: str, value: object) -> object:
    try:
        if isinstance(value, list | tuple):
            wait, longest = value
            wait = seconds_within(option, wait, 0.001)
            return wait, seconds_within(option, longest, wait)
        return None if value is None else seconds_within(option, value, 0.001)
    except ValueError:
        raise invalid_value(option, value, _DEBOUNCE) from None


def _anything(_option: str, value: object) -> object:
    return value


CHECKS: Final[Mapping[str, _Check]] = {
    "key": _key,
    "scope": _one_of("task", "shared"),
    "ttl": _ttl,
    "min_hold": _seconds(0.0),
    "max_hold": _seconds_or_none(1.0),
    "limit": _limit,
    "keep_on_retry": _flag,
    "wait": _seconds(0.0),
    "on_conflict": _one_of(*POLICIES),
    "skip_result": _anything,
    "retry_delay": _seconds(0.01),
    "retry_delay_max": _seconds(0.01),
    "retry_limit": _count_or_none(0),
    "queue_limit": _count_or_none(1),
    "queue_overflow": _one_of(*OVERFLOW),
    "stop": _stop,
    "debounce": _debounce,
    "unique": _unique,
    "on_duplicate": _one_of("return", "raise"),
    "queued_ttl": _seconds(1.0),
    "once_per": _once_per,
    "on_used": _one_of("skip", "return", "raise"),
    "after_crash": _one_of("run", "hold"),
    "misfire_grace": _seconds(1.0),
    "on_lost": _one_of("continue", "abort"),
    "on_store_error": _one_of("retry", "fail", "run", "local"),
}
