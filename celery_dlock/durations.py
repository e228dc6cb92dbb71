"""Durations as a user may give them, and the error that says what is allowed."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from .errors import InvalidLockOptions

__all__ = ["FOREVER", "MAX_SECONDS", "Seconds", "as_seconds", "not_allowed", "seconds_within", "ttl_seconds"]

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
        seconds = float(value)
    else:
        raise not_allowed(option, value, f"seconds (int, float or timedelta) of at least {least:g}")
    if math.isnan(seconds) or not least <= seconds <= most:
        raise not_allowed(option, value, f"seconds from {least:g} to {most:.10g}")
    return seconds


def not_allowed(option: str, value: object, allowed: str) -> InvalidLockOptions:
    """The error for an option's value."""
    return InvalidLockOptions(f"{option}={value!r} is not allowed; allowed: {allowed}")
