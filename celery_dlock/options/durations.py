"""Durations: their type and their check."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from .error_texts import invalid_value

__all__ = [
    "FOREVER",
    "MAX_SECONDS",
    "Seconds",
    "as_seconds",
    "seconds_within",
    "ttl_seconds",
]

Seconds = float | timedelta

MIN_TTL: Final = 1.0
MAX_SECONDS: Final = 366 * 24 * 3600.0
#: The meaning of ``once_per="forever"``: 3660 days, about ten years.
FOREVER: Final = 10 * 366 * 24 * 3600.0


def as_seconds(value: Seconds) -> float:
    """Return a checked duration in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def ttl_seconds(option: str, value: object) -> float:
    """Return a ttl in seconds.

    Raises:
        InvalidLockOptions: The value is no duration, or is out of range.
    """
    return seconds_within(option, value, MIN_TTL)


def seconds_within(option: str, value: object, minimum: float, maximum: float = MAX_SECONDS) -> float:
    """Return a duration in seconds.

    Args:
        option: The name of the option, as for :func:`invalid_value`.
        value: An int, a float or a ``timedelta``.
        minimum: The smallest allowed number of seconds.
        maximum: The largest allowed number of seconds.

    Raises:
        InvalidLockOptions: The value is no duration, or is out of range.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _as_float(value)
    else:
        raise invalid_value(option, value, f"seconds (int, float or timedelta) of at least {minimum:g}")
    if math.isnan(seconds) or not minimum <= seconds <= maximum:
        raise invalid_value(option, value, f"seconds from {minimum:g} to {maximum:.10g}")
    return seconds


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int beyond the largest float
        return math.inf if number > 0 else -math.inf
