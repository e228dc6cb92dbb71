"""The output of the command line: a table on a terminal, plain lines below their column names in a pipe, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from ..reports.documents import document
from ..reports.facts import Fact, Table
from ..utils.text import printable

__all__ = ["Output", "note"]


class Output:
    """The output of one command.

    Args:
        form: ``"json"``, ``"jsonl"`` or None.
        store: The location of the store, without its password.
        headers: Print the names of the columns.
    """

    def __init__(self, form: str | None, store: str, *, headers: bool = True) -> None:
        self.form = form
        self._store = store
        self._headers = headers

    def show(self, items: Sequence[Any], table: Table, cursor: str = "") -> None:
        """Print items."""
        if self.form:
            self.show_json(items, table, cursor)
        else:
            self.show_rows(table.columns, [[fact.text(item) for fact in table.columns] for item in items])
        if cursor and self.form != "json":
            note(f"there are more: --cursor {cursor}")

    def show_json(self, items: Iterable[Any], table: Table, cursor: str = "") -> None:
        """Print items as one document, or as one document each."""
        rows = table.rows(items)
        if self.form == "json":
            click.echo(json.dumps(document(rows, self._store, cursor), indent=2))
        else:
            for row in rows:
                click.echo(json.dumps(row))

    def show_rows(self, columns: Sequence[Fact], rows: Sequence[Sequence[str]]) -> None:
        """Print the rows of a table; "-" where there is no text."""
        if not rows:
            return
        names = [[fact.title.upper() for fact in columns]] if self._headers else []
        shown = [*names, *([printable(text) or "-" for text in row] for row in rows)]
        if not sys.stdout.isatty():
            for row in shown:
                click.echo("\t".join(row))
            return
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def note(text: str) -> None:
    """Print a remark, which is no part of the output."""
    click.echo(printable(text), err=True)
