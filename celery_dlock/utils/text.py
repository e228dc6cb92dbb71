"""Values as text in errors."""

from __future__ import annotations

from typing import Final

__all__ = ["cut", "written"]

#: Characters of a value that an error shows.
_WRITTEN: Final = 300


def written(value: object) -> str:
    """Return the ``repr`` of a value for an error, cut if it is long. A message may have brought the value."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # an int with too many digits, deep nesting, or an error in a custom __repr__
        return f"<{type(value).__name__}>"
    return cut(text)


def cut(text: str) -> str:
    """Return a text for an error, cut if it is long."""
    return text if len(text) <= _WRITTEN else f"{text[:_WRITTEN]}..."
