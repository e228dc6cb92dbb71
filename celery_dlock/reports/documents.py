"""The JSON documents of ``celery dlock --json`` and of the dashboard's API."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..store.holder_model import shown_time

__all__ = ["TIMES", "VERSION", "document", "iso", "row_of"]

#: The version of the JSON documents.
VERSION: Final = 1
#: Fields that are times. All other numbers with a fraction are seconds.
TIMES: Final = frozenset({"since", "at", "due"})


def iso(seconds: float) -> str:
    """Return a time as ISO 8601 in UTC; "" for none."""
    return shown_time(seconds) if seconds else ""


def row_of(item: Any) -> Any:
    """Return an item as JSON shows it: times as ISO 8601, durations in seconds."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        facts = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        return {name: iso(value) or None if name in TIMES else row_of(value) for name, value in facts.items()}
    if isinstance(item, Mapping):
        return {key: row_of(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [row_of(one) for one in item]
    return round(item, 3) if isinstance(item, float) else item


def document(rows: Sequence[Any], store: str, cursor: str = "") -> dict[str, Any]:
    """Return the document of a list.

    Args:
        rows: Its items, as JSON shows them.
        store: The location of the store, without its password.
        cursor: The cursor of the next page; "" after the last one.
    """
    return {"version": VERSION, "at": iso(time.time()), "store": store, "items": rows, "cursor": cursor or None}
