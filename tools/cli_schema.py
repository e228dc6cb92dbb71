"""The JSON schema of `celery dlock --json`, from the types of the items and the facts of their tables."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery_dlock import control
from celery_dlock.reports import documents, tables
from celery_dlock.reports.checks import Check
from celery_dlock.reports.facts import Fact, Table

__all__ = ["schema"]

#: The type of the items of each table.
ITEMS: Final = {
    control.LockView: tables.LOCKS,
    control.ClaimView: tables.CLAIMS,
    control.RunView: tables.UNKNOWN_OUTCOMES,
    control.Waiter: tables.WAITERS,
    control.DeadLetter: tables.DEAD_LETTERS,
    Check: tables.CHECKS,
    control.AuditRecord: tables.AUDIT,
    control.WorkerView: tables.WORKERS,
    control.Explanation: Table(()),
}
_PLAIN: Final = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_KINDS: Final = {"number": "integer", "span": "number"}


def schema() -> str:
    """Return the schema as a JSON document."""
    found: dict[str, Any] = {}
    items = [_item(kind, table, found) for kind, table in ITEMS.items()]
    document = _object(
        {
            "version": {"const": documents.VERSION},
            "at": {"type": "string"},
            "store": {"type": "string"},
            "items": {"type": "array", "items": {"anyOf": items}},
            "cursor": {"type": ["string", "null"]},
        }
    )
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The output of celery dlock with --json",
    }
    return json.dumps({**head, **document, "$defs": found}, indent=2) + "\n"


def _item(kind: Any, table: Table, found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an item of a list: its fields, and the facts of its table that are no fields."""
    fields = _fields(kind, found)
    facts = (fact for fact in (*table.columns, *table.details) if fact.key.partition(".")[0] not in fields)
    return _object({**fields, **{fact.key: _fact(fact) for fact in facts}})


def _fact(fact: Fact) -> dict[str, Any]:
    return {"type": [_KINDS.get(fact.kind, "string"), "null"]}


def _fields(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: {"type": ["string", "null"]} if field.name in documents.TIMES else _type(hints[field.name], found)
        for field in dataclasses.fields(kind)
    }


def _type(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if dataclasses.is_dataclass(hint):
        name = str(getattr(hint, "__name__", ""))
        if name not in found:
            found[name] = {}  # an item may contain itself
            found[name] = _object(_fields(hint, found))
        return {"$ref": f"#/$defs/{name}"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, Sequence):
        return {"type": "array", "items": _type(arguments[0], found)}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _type(arguments[1], found)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(one, found) for one in arguments]}
    raise TypeError(f"no schema for {hint!r}")


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }
