"""Values as text in errors."""

from __future__ import annotations

from typing import Final

__all__ = ["cut", "written"]

#: Characters of a value that an error shows.
_WRITTEN: Final = 300


def written(value: object) -> str:
    """A value's ``repr`` for an error, cut if it is long; a message may have brought the value."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # an int of more digits than Python writes, nested too deep, a method of its own
        return f"<{type(value).__name__}>"
    return cut(text)


def cut(text: str) -> str:
    """A text for an error, cut if it is long."""
    return text if len(text) <= _WRITTEN else f"{text[:_WRITTEN]}..."
