"""The output of the command line: a table on a terminal, plain lines below their column names in a pipe, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from ..reports.documents import document, row_of
from ..utils.text import printable

__all__ = ["Column", "Output", "note"]

#: A heading, and the text of an item in that column.
Column = tuple[str, Callable[[Any], object]]


class Output:
    """The output of one command.

    Args:
        form: ``"json"``, ``"jsonl"`` or None.
        store: The location of the store, without its password.
        headers: Print the names of the columns.
    """

    def __init__(self, form: str | None, store: str, *, headers: bool = True) -> None:
        self._form = form
        self._store = store
        self._headers = headers

    def show(self, items: Sequence[Any], columns: Sequence[Column], cursor: str = "") -> None:
        """Print items."""
        if self._form == "json":
            click.echo(json.dumps(document(items, self._store, cursor), indent=2))
            return
        if self._form == "jsonl":
            for item in items:
                click.echo(json.dumps(row_of(item)))
        else:
            rows = [[printable(str(text(item))) for _, text in columns] for item in items]
            _table(rows, [name for name, _ in columns], headers=self._headers)
        if cursor:
            note(f"there are more: --cursor {cursor}")

    def grouped(self, items: Sequence[Any], columns: Sequence[Column], rows: Callable[[Any], Iterable[Any]]) -> None:
        """Print items as :meth:`show` does, with several rows of the table for one item."""
        self.show(items if self._form else [row for item in items for row in rows(item)], columns)

    def facts(self, item: Any, facts: Iterable[tuple[str, object]]) -> None:
        """Print one item, as lines of a name and a value."""
        if self._form:
            self.show([item], ())
            return
        for name, value in facts:
            click.echo(printable(f"{name}: {value}"))


def note(text: str) -> None:
    """Print a remark, which is no part of the output."""
    click.echo(printable(text), err=True)


def _table(rows: Sequence[Sequence[str]], names: Sequence[str], *, headers: bool) -> None:
    if not rows:
        return
    shown = [names, *rows] if headers else rows
    if not sys.stdout.isatty():
        for row in shown:
            click.echo("\t".join(row))
        return
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
