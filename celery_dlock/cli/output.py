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
from .terminal import fitted, lines

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

    def show(self, items: Sequence[Any], table: Table, cursor: str = "", *, fit: bool = False) -> None:
        """Print items. The arguments are those of :meth:`show_rows`, and the cursor of the next page."""
        if self.form:
            self.show_json(items, table, cursor)
        else:
            self.show_rows(table.columns, [[fact.text(item) for fact in table.columns] for item in items], fit=fit)
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

    def show_rows(self, columns: Sequence[Fact], rows: Sequence[Sequence[str]], *, fit: bool = False) -> None:
        """Print the rows of a table; "-" where there is no text.

        Args:
            columns: The columns.
            rows: The texts of each row.
            fit: Shorten the table if it is too wide for the terminal.
        """
        if not rows:
            return
        names = [[fact.title.upper() for fact in columns]] if self._headers else []
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
