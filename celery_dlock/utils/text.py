"""Values and suggestions as text in errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

__all__ = ["cut", "did_you_mean", "printable", "written"]

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


def printable(text: str) -> str:
    """Return a text of unknown origin for a terminal, with escapes in place of control and format characters.

    Otherwise a task id or a reason could colour, move or hide what the terminal shows.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def did_you_mean(name: object, known: Iterable[str], prefix: str = "") -> str:
    """Return the suggestion for an unknown name in an error; "" if no known name is similar.

    Args:
        name: The unknown name.
        known: The known names.
        prefix: The beginning that all known names share. It counts for no similarity.
    """
    found = {each.removeprefix(prefix): each for each in known}
    alike = difflib.get_close_matches(str(name).removeprefix(prefix), found, 1)
    return f" (did you mean {found[alike[0]]!r}?)" if alike else ""
