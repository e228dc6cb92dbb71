"""Durations as a user may give them, and what an error says of any value or name that is not allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from ..errors import InvalidLockOptions
from ..utils.text import written

__all__ = [
    "FOREVER",
    "MAX_SECONDS",
    "Seconds",
    "as_seconds",
    "did_you_mean",
    "invalid_value",
    "seconds_within",
    "ttl_seconds",
]

Seconds = float | timedelta

MIN_TTL: Final = 1.0
MAX_SECONDS: Final = 366 * 24 * 3600.0
#: What ``once_per="forever"`` means: ten years.
FOREVER: Final = 10 * 366 * 24 * 3600.0


def as_seconds(value: Seconds) -> float:
    """A duration that was checked, in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def ttl_seconds(option: str, value: object) -> float:
    """A ttl in seconds, or the error that says what is allowed."""
    return seconds_within(option, value, MIN_TTL)


def seconds_within(option: str, value: object, least: float, most: float = MAX_SECONDS) -> float:
    """A duration in seconds, or the error that says what is allowed."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _as_float(value)
    else:
        raise invalid_value(option, value, f"seconds (int, float or timedelta) of at least {least:g}")
    if math.isnan(seconds) or not least <= seconds <= most:
        raise invalid_value(option, value, f"seconds from {least:g} to {most:.10g}")
    return seconds


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int beyond the largest float
        return math.inf if number > 0 else -math.inf


def invalid_value(option: str, value: object, allowed: str) -> InvalidLockOptions:
    """The error for an option's value."""
    return InvalidLockOptions(f"{option}={written(value)} is not allowed; allowed: {allowed}")


def did_you_mean(name: object, known: Iterable[str], prefix: str = "") -> str:
    """Behind an unknown name, in an error: the known one that it is most like; "" if it is like none.

    Args:
        name: The unknown one.
        known: The others.
        prefix: What all begin with, so that it makes none alike.
    """
    found = {each.removeprefix(prefix): each for each in known}
    alike = difflib.get_close_matches(str(name).removeprefix(prefix), found, 1)
    return f" (did you mean {found[alike[0]]!r}?)" if alike else ""
