"""The output of the command line: a table on a terminal, and plain lines below their column names in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from ..reports.facts import Fact
from ..utils.text import printable
from .options import NO_HEADERS
from .terminal import fitted, lines

__all__ = ["note", "show_rows"]


def show_rows(columns: Sequence[Fact], rows: Sequence[Sequence[str]], *, fit: bool = False) -> None:
    """Print the rows of a table; "-" where there is no text.

    Args:
        columns: The columns.
        rows: The texts of each row.
        fit: Shorten the table if it is too wide for the terminal.
    """
    if not rows:
        return
    headers = not click.get_current_context().meta.get(NO_HEADERS)
    names = [[fact.title.upper() for fact in columns]] if headers else []
    shown = [*names, *([printable(text) or "-" for text in row] for row in rows)]
    if not sys.stdout.isatty():
        for row in shown:
            click.echo("\t".join(row))
        return
    brief = fitted(columns, shown) if fit else (columns, shown)
    for line in lines(*brief):
        click.echo(line)
    if brief[1] is not shown:
        note("this is shortened: --wide shows all columns and whole texts")


def note(text: str) -> None:
    """Print a remark, which is no part of the output."""
    click.echo(printable(text), err=True)
