"""Facts about the items of a list: their keys, their names, and their values as text and in JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .documents import iso, row_of

__all__ = ["Fact", "Kind", "Table"]

#: How a value is shown. "copy": a text that operators copy. "lock" and "call": a link to the page of that.
Kind = Literal["text", "number", "time", "span", "states", "copy", "lock", "call"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about an item: a column of its list, or a line of its page.

    Args:
        key: Where its value is in the item and in its JSON document, such as ``holder.token``.
        title: Its name for people.
        kind: How it is shown.
        of: Returns its value. Default: what ``key`` names, None if a part of that is None.
        bad: Returns whether the value needs attention.
    """

    key: str
    title: str
    kind: Kind = "text"
    of: Callable[[Any], Any] | None = None
    bad: Callable[[Any], bool] = lambda _: False

    def value(self, item: Any) -> Any:
        """Return the value; None or "" if the item has none."""
        if self.of:
            return self.of(item)
        for part in self.key.split("."):
            item = None if item is None else getattr(item, part)
        return item

    def text(self, item: Any, span: Callable[[float], str] = "{:.0f}".format) -> str:
        """Return the value as text; "" if the item has none.

        Args:
            item: The item.
            span: Formats durations.
        """
        value = self.value(item)
        if self.kind == "states":
            return ", ".join(value) or "free"
        if value is None:
            return ""
        return iso(value) if self.kind == "time" else span(value) if self.kind == "span" else str(value)


class Table(NamedTuple):
    """A list of items of one type.

    Args:
        columns: The facts that the list shows.
        empty: The text in place of an empty list.
        details: The facts that the page of one item shows.
    """

    columns: tuple[Fact, ...]
    empty: str = ""
    details: tuple[Fact, ...] = ()

    def pick(self, *keys: str) -> list[Fact]:
        """Return the columns with these keys, in this order."""
        columns = {fact.key: fact for fact in self.columns}
        return [columns[key] for key in keys]

    def rows(self, items: Any) -> list[Any]:
        """Return the items as JSON shows them: their fields, and their facts that are no fields."""
        return [self._row(item) for item in items]

    def _row(self, item: Any) -> dict[str, Any]:
        row: dict[str, Any] = row_of(item)
        for fact in (*self.columns, *self.details):
            if fact.key.partition(".")[0] not in row:
                value = fact.value(item)
                row[fact.key] = iso(value) or None if fact.kind == "time" else row_of(value)
        return row
