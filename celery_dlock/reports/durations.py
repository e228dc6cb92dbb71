"""Durations as people write them."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_duration", "shown_duration"]

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration: seconds, or a number with the unit s, m, h or d.

    Raises:
        ValueError: The text is no duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no duration: expected seconds, or a number with s, m, h or d, as 90, 10m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def shown_duration(seconds: float) -> str:
    """Return a duration in its two largest units, as ``3 h 20 min``."""
    rest = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, size)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"
