"""Normal values of arguments: an argument has the same normal value before and after any serialiser.

A normal value has one of a closed set of built-in types. A subclass or an enum member becomes its base value, and an
aware datetime becomes its instant in UTC.

:func:`normalize` does not descend into containers. The caller normalizes the items while it walks the container. The
caller treats a tuple as a list, and replaces each key of a mapping by the string that JSON makes of the key.

If a serialiser turns two values into the same value, they have the same normal value. So have equal values of one
type, such as ``Decimal("1.0")`` and ``Decimal("1.00")``. Calls that differ only in such values exclude each other,
which is safe. ``1``, ``1.0`` and ``True`` are different values here.

An object with kombu's ``__json__`` becomes the plain data that the method returns.
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

__all__ = ["AS_THEY_ARE", "MAX_DEPTH", "UnstableValue", "key_text", "normalize", "too_deep"]

#: The types of which :func:`normalize` returns a value unchanged. JSON keeps them, or the caller walks them (tuple), or
#: kombu keeps them (bytes).
AS_THEY_ARE: Final = frozenset((str, int, bool, type(None), float, bytes, list, tuple, dict))
#: How deep containers may be nested; a value that contains itself meets this limit too.
MAX_DEPTH: Final = 100

_EXPANDED_ZEROS: Final = 40
_SHOWN_KEY_LENGTH: Final = 40
_CURE: Final = "give key= the arguments that tell the task's calls apart, or a callable that returns a string"

_Reducers = tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...]


class UnstableValue(LockKeyError):
    """A value that cannot be part of a lock name, because it may look different in each process.

    The walk through the arguments keeps no path, because an error is rare. While the error propagates, each container
    on its way adds its step to ``steps``. A step is an index (list), ``(key,)`` (mapping) or None (set).
    """

    def __init__(self, problem: str, *, deep: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.deep = deep
        self.steps: list[object] = []

    def located(self, label: str) -> LockKeyError:
        """Return the error to show. It names the path and the type, never the value, which may be a secret."""
        if self.deep:
            return LockKeyError(f"{label} {self.problem}; {_CURE}")
        return LockKeyError(f"{label}{''.join(map(_step, reversed(self.steps)))}: {self.problem}; {_CURE}")


def too_deep() -> UnstableValue:
    """Return the error for containers that are nested deeper than ``MAX_DEPTH``."""
    return UnstableValue(f"is nested deeper than {MAX_DEPTH} levels, or contains itself", deep=True)


def normalize(value: Any) -> Any:
    """Return the normal value; raise :class:`UnstableValue` if there is none."""
    if type(value) in AS_THEY_ARE:
        return value
    try:
        return _reduced(value)
    except Exception:  # noqa: BLE001 - a value's own methods run here and may raise anything, RecursionError too
        raise _unstable(value) from None  # the original message may show the value


def key_text(key: Any) -> str | None:
    """Return the string that JSON makes of a mapping's key, or None if JSON takes no such key."""
    if type(key) is str:
        return key
    reduced = normalize(key)
    if isinstance(reduced, str):
        return reduced
    try:
        return json.dumps(reduced) if reduced is None or isinstance(reduced, int | float) else None
    except ValueError:  # an int of more digits than Python writes
        raise _unstable(key) from None


def _reduced(value: Any) -> Any:
    if type(value) in AS_THEY_ARE:
        return value
    for types, reduce in _NATIVE_TO_JSON:
        if isinstance(value, types):
            return reduce(value)
    if hasattr(type(value), "__json__"):  # kombu tries `__json__` before the types that it knows itself
        return _reduced(value.__json__())
    for types, reduce in _KNOWN:
        if isinstance(value, types):
            return reduce(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError


def _utc(value: datetime) -> datetime:
    # Build a plain datetime from the fields: arithmetic on a subclass (pendulum) returns that subclass. Leave out
    # `fold`, which no serialiser keeps.
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
    # Not Decimal.normalize: it rounds to the context's precision, which differs between processes.
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


#: The base type's methods, as in JSON's encoder: a subclass may define its own ``__str__`` or ``__int__``.
_NATIVE_TO_JSON: Final[_Reducers] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    ((list, tuple), list),
    (dict, lambda value: dict(value.items())),
)
#: The order matters: a datetime is a date, too. A member of ``class Day(date, Enum)`` is serialised as a date by kombu,
#: so Enum comes after date.
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


def _unstable(value: object) -> UnstableValue:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return UnstableValue(f"a value of type {name} has no stable form")


def _step(step: object) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    key = step[0] if isinstance(step, tuple) else None
    # Show only keys that read as a field's name: any other key may be as secret as a value.
    named = type(key) is str and key.isidentifier() and len(key) <= _SHOWN_KEY_LENGTH
    return f"[{key!r}]" if named else "[...]"
