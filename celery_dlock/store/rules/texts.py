"""The text forms of the data of a lock name, for backends that store texts. Each text is a JSON object.

A text contains only the fields whose values are not the default ones.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, Final

from .data import Claim, Head, LockRecord, NewestCall, ReplacedCalls, SeatsRecord, Timed, Waiter

__all__ = ["head_from_text", "head_text", "record_fields", "waiter_from_texts", "waiter_text"]

_RECORDS: Final[dict[str, type]] = {
    "seats": SeatsRecord,
    "claim": Claim,
    "newest_call": NewestCall,
    "replaced": ReplacedCalls,
}
_COUNTS: Final = "parked", "waiting", "delayed", "dead"
#: The fields of a waiter that a backend stores as they are: it finds waiters by them, or they are long.
_OWN: Final = {"waiting", "delayed", "entry", "dead"}


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def record_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass whose values are not the default ones."""
    found = {}
    for one in fields(record):
        value = getattr(record, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if default is MISSING or value != default:
            found[one.name] = value
    return found


def _timed(timed: Timed[Any]) -> list[Any]:
    return [record_fields(timed.record), timed.until]


def _timed_from(kind: type, found: list[Any]) -> Timed[Any]:
    return Timed(kind(**found[0]), found[1])


def head_text(head: Head) -> str:
    """Return a head as text; "" if it is empty."""
    found: dict[str, Any] = {name: _timed(timed) for name in _RECORDS if (timed := getattr(head, name)) is not None}
    found |= {name: count for name in _COUNTS if (count := getattr(head, name))}
    if head.locks:
        found["locks"] = {str(seat): _timed(lock) for seat, lock in head.locks.items()}
    if head.guards:
        found["guards"] = {str(seat): token for seat, token in head.guards.items()}
    if head.sweeps:
        found["sweeps"] = {str(seats): when for seats, when in head.sweeps.items()}
    return _dumps(found) if found else ""


def head_from_text(text: str) -> Head:
    """Parse :func:`head_text`."""
    if not text:
        return Head()
    found: dict[str, Any] = json.loads(text)
    for name, kind in _RECORDS.items():
        if name in found:
            found[name] = _timed_from(kind, found[name])
    found["locks"] = {int(seat): _timed_from(LockRecord, lock) for seat, lock in found.get("locks", {}).items()}
    found["guards"] = {int(seat): token for seat, token in found.get("guards", {}).items()}
    found["sweeps"] = {int(seats): when for seats, when in found.get("sweeps", {}).items()}
    return Head(**found)


def waiter_text(waiter: Waiter) -> str:
    """Return the facts about a waiter as text, without its scores, its entry and its dead letter; "" without facts."""
    facts = {name: value for name, value in record_fields(waiter).items() if name not in _OWN}
    return _dumps(facts) if facts else ""


def waiter_from_texts(
    waiting: int | None, delayed: int | None, entry: str | None, dead: str | None, text: str
) -> Waiter:
    """Return the waiter that a backend has stored.

    Args:
        waiting: Its score in this part of the queue.
        delayed: Its score in this part of the queue.
        entry: Its parked message.
        dead: Its dead letter.
        text: Its :func:`waiter_text`.
    """
    facts: dict[str, Any] = json.loads(text) if text else {}
    facts["shown"] = tuple((seats, since) for seats, since in facts.get("shown", ()))
    return Waiter(waiting, delayed, entry, dead, **facts)
