"""A table on a terminal: columns of equal width, that fit into a line if they can be shortened, and colours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from typing import Final

import click

from ..reports.facts import Fact

__all__ = ["fitted", "lines"]

#: The columns of a terminal that does not tell how many it has.
COLUMNS: Final = 100
#: The characters that a shortened text keeps at least.
SHORTEST: Final = 7
#: Columns that a narrow terminal does not show: the lock name tells the task, and the token is for the resource.
_LEFT_OUT: Final = frozenset({"task", "holder.token"})
#: The kinds of facts whose texts can be shortened.
_LONG: Final = frozenset({"text", "lock", "call", "copy"})
_COLOURS: Final = {"held": "green", "granted": "yellow", "kept": "yellow", "unknown": "red"}

Rows = Sequence[Sequence[str]]


def fitted(columns: Sequence[Fact], rows: Rows) -> tuple[Sequence[Fact], Rows]:
    """Return a table that fits into the lines of the terminal, or nearly so if the terminal is very narrow.

    If it does not fit, it loses some columns, the year and the fractions of times, and the middle of long texts.

    Args:
        columns: The columns.
        rows: The texts of each row.
    """
    room = shutil.get_terminal_size((COLUMNS, 24)).columns
    if sum(_widths(rows)) + 2 * (len(columns) - 1) <= room:
        return columns, rows
    kept = [index for index, fact in enumerate(columns) if fact.key not in _LEFT_OUT]
    columns = [columns[index] for index in kept]
    rows = [[_brief(columns[at], row[index]) for at, index in enumerate(kept)] for row in rows]
    widths = _widths(rows)
    long = [index for index, fact in enumerate(columns) if fact.kind in _LONG]
    while sum(widths) + 2 * (len(widths) - 1) > room and (can := [at for at in long if widths[at] > SHORTEST]):
        # A lock name keeps twice as much as other texts.
        widths[max(can, key=lambda at: widths[at] / (1 + (columns[at].kind == "lock")))] -= 1
    return columns, [[_shortened(text, width) for text, width in zip(row, widths, strict=True)] for row in rows]


def lines(columns: Sequence[Fact], rows: Rows) -> Iterator[str]:
    """Yield the lines of a table. States have colours, unless the environment variable ``NO_COLOR`` is set."""
    widths = _widths(rows)
    for row in rows:
        texts = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        for index, fact in enumerate(columns) if not os.environ.get("NO_COLOR") else ():
            colour = next((_COLOURS[state] for state in row[index].split(", ") if state in _COLOURS), None)
            if fact.kind == "states" and colour:
                texts[index] = click.style(texts[index], fg=colour)
        yield "  ".join(texts).rstrip()


def _widths(rows: Rows) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _brief(fact: Fact, text: str) -> str:
    """Return the month, the day and the seconds of a time in ISO 8601; any other text is not changed."""
    return text[5:19].replace("T", " ") if fact.kind == "time" and len(text) > len("0000-00-00T00:00:00") else text


def _shortened(text: str, width: int) -> str:
    """Return a text without its middle, if it is too long."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[-end:]}"
