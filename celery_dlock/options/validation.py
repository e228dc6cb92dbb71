"""Checks of single values, and the texts of the errors for invalid ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from ..errors import InvalidLockOptions
from ..utils.text import written

__all__ = [
    "ALL_OPTIONS",
    "FOREVER",
    "MAX_SECONDS",
    "Seconds",
    "as_seconds",
    "either",
    "invalid_value",
    "seconds_within",
    "ttl_seconds",
    "unmet_requirement",
]

Seconds = float | timedelta

#: The end of an error for an unknown option.
ALL_OPTIONS: Final = "all options: docs/reference/options.md"
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


def invalid_value(option: str, value: object, expected: str) -> InvalidLockOptions:
    """Return the error for an option's value.

    Args:
        option: The name of the option, which may follow the call that it belongs to: ``"Lock(name).acquire: timeout"``.
        value: Its value.
        expected: The allowed values.
    """
    return InvalidLockOptions(f"{_invalid(option, value)}: expected {expected}")


def unmet_requirement(option: str, value: object, requirement: str) -> InvalidLockOptions:
    """Return the error for an option that has no effect without another one.

    Args:
        option: The name of the option.
        value: Its value.
        requirement: The choice of another option that it needs: ``"on_conflict='queue'"``.
    """
    return InvalidLockOptions(f"{_invalid(option, value)}: it needs {requirement}")


def _invalid(option: str, value: object) -> str:
    call, separator, name = option.rpartition(": ")
    return f"{call}{separator}invalid {name}={written(value)}"


def either(choices: Sequence[str]) -> str:
    """Return the choices as a list for an error: ``'skip', 'retry' or 'raise'``."""
    shown = [repr(choice) for choice in choices]
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
