"""The normal value of a value: what is left when it is of no account which serialiser it went through.

Normal values have one of a closed set of built-in types. A tuple is its list, a subclass or an enum member its base
value, a mapping's keys the strings that JSON makes of them, an aware datetime its instant in UTC. Containers are
normal on the outside only: their items are brought to normal values by whoever walks them.

Where serialisers or equality make two values one, they are one here too, because a lock that excludes too much is
safe: ``Decimal("1.0")`` is ``Decimal("1.00")``, a dataclass is the mapping of its fields, and an object that kombu's
``__json__`` turns into plain data is that data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

from ..errors import LockKeyError

__all__ = ["AS_THEY_ARE", "MAX_DEPTH", "ValuePath", "deeper", "key_text", "normalize", "root_path"]

#: The types that JSON keeps as they are (bytes: that kombu keeps beside them). A tuple is walked as its list is.
AS_THEY_ARE: Final = frozenset((str, int, bool, type(None), float, bytes, list, tuple, dict))
#: How deep containers may be nested; a value that contains itself meets this limit too.
MAX_DEPTH: Final = 100

_EXPANDED_ZEROS: Final = 40
_SHOWN_KEY_LENGTH: Final = 40
_CURE: Final = "give key= the arguments that tell the task's calls apart, or a callable that returns a string"

#: Where a value stands, for errors only: what it is in, the step from there, and how deep. A step is a list's index,
#: a mapping's key in a tuple, or None in a set. Plain tuples, since one is made for every item of a container.
ValuePath = tuple["ValuePath | None", object, int]
_Reducers = tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...]


def root_path(label: str) -> ValuePath:
    """The outermost place of a value; errors about it or anything in it begin with this label."""
    return (None, label, 0)


def deeper(at: ValuePath) -> int:
    """The depth of what is in the container that stands here; ``LockKeyError`` where that is too deep."""
    if at[2] >= MAX_DEPTH:
        raise LockKeyError(f"{_root(at)} is nested deeper than {MAX_DEPTH} levels, or contains itself; {_CURE}")
    return at[2] + 1


def normalize(value: Any, at: ValuePath) -> Any:
    """The normal value; ``LockKeyError`` with the place and the type, never the value, where there is none."""
    if type(value) in AS_THEY_ARE:
        return value
    try:
        return _reduced(value)
    except Exception:  # noqa: BLE001 - a value's own methods run here and may raise anything, RecursionError too
        raise _unstable(value, at) from None  # their message may show the value


def key_text(key: Any, at: ValuePath) -> str | None:
    """The string that JSON makes of a mapping's key, or None where JSON takes no such key."""
    if type(key) is str:
        return key
    reduced = normalize(key, at)
    if isinstance(reduced, str):
        return reduced
    try:
        return json.dumps(reduced) if reduced is None or isinstance(reduced, int | float) else None
    except ValueError:  # an int of more digits than Python writes
        raise _unstable(key, at) from None


def _reduced(value: Any) -> Any:
    if type(value) in AS_THEY_ARE:
        return value
    for types, reduce in _NATIVE_TO_JSON:
        if isinstance(value, types):
            return reduce(value)
    if hasattr(type(value), "__json__"):  # kombu asks for it before it looks at any type of its own
        return _reduced(value.__json__())
    for types, reduce in _KNOWN:
        if isinstance(value, types):
            return reduce(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError


def _utc(value: datetime) -> datetime:
    # From its fields: subclasses give values of their own class, and `fold` does not survive a serialiser.
    wall = datetime(  # noqa: DTZ001 - naive on purpose, the offset is taken off below
        value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond
    )
    offset = value.utcoffset()
    return wall if offset is None else (wall - offset).replace(tzinfo=timezone.utc)


def _clock_time(value: time) -> time:
    offset = value.utcoffset()
    zone = None if offset is None else timezone(offset)
    return time(value.hour, value.minute, value.second, value.microsecond, tzinfo=zone)


def _decimal(value: Decimal) -> Decimal:
    # By hand: Decimal.normalize rounds to the context's precision, which differs between processes.
    sign, digits, exponent = Decimal.as_tuple(value)
    if not isinstance(exponent, int):
        return Decimal(("-" * sign + "Infinity") if exponent == "F" else "NaN")
    text = "".join(map(str, digits))
    kept = text.rstrip("0")
    if not kept:
        return Decimal(0)
    exponent += len(text) - len(kept)
    if 0 < exponent <= _EXPANDED_ZEROS:  # shown as 100, not as 1E+2
        kept, exponent = kept + "0" * exponent, 0
    return Decimal((sign, tuple(map(int, kept)), exponent))


#: The methods of the base type, as in JSON's encoder: a subclass may have its own ``__str__`` or ``__int__``.
_NATIVE_TO_JSON: Final[_Reducers] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    ((list, tuple), list),
    (dict, lambda value: dict(value.items())),
)
#: In this order: a datetime is a date, and a member of an enum of dates is a date to kombu.
_KNOWN: Final[_Reducers] = (
    ((bytes, bytearray, memoryview), lambda value: memoryview(value).tobytes()),
    (datetime, _utc),
    (date, lambda value: date(value.year, value.month, value.day)),
    (time, _clock_time),
    (timedelta, lambda value: timedelta.__add__(timedelta(), value)),
    (Decimal, _decimal),
    (UUID, lambda value: UUID(int=value.int)),
    ((set, frozenset), frozenset),
    (Enum, lambda value: _reduced(value.value)),
    (Mapping, lambda value: dict(value.items())),
)


def _unstable(value: object, at: ValuePath) -> LockKeyError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return LockKeyError(f"{_root(at)}{_path(at)}: a value of type {name} has no stable form; {_CURE}")


def _root(at: ValuePath) -> object:
    while at[0] is not None:
        at = at[0]
    return at[1]


def _path(at: ValuePath) -> str:
    return "" if at[0] is None else _path(at[0]) + _step(at[1])


def _step(step: object) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    key = step[0] if isinstance(step, tuple) else None
    # Only what reads as a field's name: any other key may be as secret as a value.
    named = type(key) is str and key.isidentifier() and len(key) <= _SHOWN_KEY_LENGTH
    return f"[{key!r}]" if named else "[...]"
