"""Validate what a publisher wrote into a message, before the worker's main process acts on it.

An exception in the main process ends the worker, and the broker then delivers the message to the next worker. So
every field that Celery's main process reads is checked once, at the receipt. :mod:`.message` checks the ``dlock``
header of a republished message, and :mod:`.tick_header` the due time. No error shows a value: it may be a secret.

The main process runs these checks for every message. So `check_message` first tries to prove, in a few calls that
iterate in C, that a message is like almost all others. If it cannot, each field is checked by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, compress
from operator import not_
from typing import Any, Final, NamedTuple, TypeGuard

__all__ = [
    "MALFORMED",
    "MAX_COUNT",
    "MAX_DEPTH",
    "check_body",
    "check_headers",
    "check_message",
    "check_origin",
    "is_count",
]

#: The errors of code that meets a value of another type or size than it expects. Not ``MemoryError`` or ``OSError``:
#: these say something about the machine, and the broker must deliver the message again.
MALFORMED: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: How deep the containers of a message may be nested: pickling for the pool child recurses, and so does JSON.
MAX_DEPTH: Final = 250
#: The largest count that a header may carry.
MAX_COUNT: Final = 2**31 - 1
#: The longest time limit, in seconds: 31 years. Timers calculate with floats.
_MAX_LIMIT: Final = 1e9
_MAX_BYTE: Final = 255
#: The fields beside a call's arguments in its body (task protocol 2). In the pool child, Celery copies every other
#: field over the request's own attributes.
_EMBEDDED: Final = {"callbacks": list, "errbacks": list, "chain": list, "chord": dict}
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)

_TEXT_TYPES: Final = frozenset({str, type(None)})
_SCALAR_TYPES: Final = frozenset({str, bytes, int, float, bool, type(None)})
_is_scalar_type: Final = _SCALAR_TYPES.__contains__
_BYTES: Final = frozenset({None, *range(_MAX_BYTE + 1)})
_RAW_TYPES: Final = (bytes, str)
#: The types in a body that Celery's own publishers make.
_CALL_TYPES: Final = (list, dict, dict)
#: Most characters and parts of a description. A larger one is not kept: a publisher chooses names and their number.
_MOST_DESCRIBED: Final = 4096
_NOTHING_EMBEDDED: Final[tuple[dict[str, Any], ...]] = (dict.fromkeys(_EMBEDDED), {})

_TEXTS: Final = ("id", "task", "shadow", "root_id", "parent_id", "group")
_REPRS: Final = ("argsrepr", "kwargsrepr")
_ORIGIN_TEXTS: Final = ("correlation_id", "reply_to")
_DELIVERY_TEXTS: Final = ("exchange", "routing_key")
_BYTE_PROPERTIES: Final = ("priority", "delivery_mode")
_COUNTS: Final = ("retries", "replaced_task_nesting", "group_index")
_EMPTY: Final[dict[str, Any]] = {"timelimit": [None, None], "stamps": {}}

# Roles of the values of a common message, and their types. No types: any.
_OTHER: Final[tuple[str, frozenset[type]]] = ("other", frozenset())
_NUMBER_RULE: Final = ("number", frozenset({int, type(None)}))
_HEADER_RULES: Final = {
    **dict.fromkeys(_TEXTS, ("text", _TEXT_TYPES)),
    **dict.fromkeys(_REPRS, ("repr", _TEXT_TYPES)),
    **dict.fromkeys(_COUNTS, _NUMBER_RULE),
    "timelimit": ("empty", frozenset({list, type(None)})),
    "stamps": ("empty", frozenset({dict, type(None)})),
    "stamped_headers": ("empty", frozenset({type(None)})),
    # Celery puts these beside the headers. They are the body, or are selected as properties and delivery info.
    **dict.fromkeys(("args", "kwargs", "properties", "delivery_info"), ("made", frozenset())),
}
_PROPERTY_RULES: Final = {
    **dict.fromkeys(_ORIGIN_TEXTS, ("text", _TEXT_TYPES)),
    **dict.fromkeys(_BYTE_PROPERTIES, _NUMBER_RULE),
}
_DELIVERY_RULES: Final = dict.fromkeys(_DELIVERY_TEXTS, ("text", _TEXT_TYPES))


def check_message(
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    delivery_info: Mapping[str, Any],
    payload: Any,
    text: bytes | str | None = None,
) -> None:
    """Check a message as Celery made a request of it.

    Args:
        headers: See `check_headers`.
        properties: See `check_origin`.
        delivery_info: See `check_origin`.
        payload: See `check_body`. Celery has unpacked it into three parts.
        text: See `check_body`.

    Raises:
        ValueError: The message is malformed.
    """
    if not _is_common(headers, properties, delivery_info, payload):
        check_headers(headers)
        check_origin(properties, delivery_info)
        _check_call(payload)
    if text is None or len(text) > MAX_DEPTH:  # each nested level of JSON has a bracket
        _check_depth(payload, text)


class _Form(NamedTuple):
    """The checks of messages that have the same names, with values of the same types.

    Selectors have an entry for each value of the headers, the properties and the delivery info.

    Args:
        texts: Selects the texts that must be ASCII.
        numbers: Selects the numbers that must fit into a byte.
        empty: Selects the time limits and the stamps.
        expected: These values if there are no time limits and no stamps.
        containers: Selects the containers whose depth no other check looks at.
    """

    texts: list[bool]
    numbers: list[bool]
    empty: list[bool]
    expected: list[Any]
    containers: list[bool]


class _LargeForm(Exception):
    """The form is too large to be kept. An exception, because the cache keeps every value that is returned."""


@functools.lru_cache(maxsize=64)  # the messages of a task have few forms
def _form_of(described: tuple[Any, ...]) -> _Form | None:
    """Return the form of a message; None if its types differ from those that Celery's own publishers send.

    Args:
        described: Names of the headers, the properties and the delivery info, with None between them and behind them.
            Types of the items of the body, and then of the values of these names.

    Raises:
        _LargeForm: The description is too large, or a name is not text.
    """
    names = [name for name in described if name is not None and not isinstance(name, type)]
    if not all(isinstance(name, str) for name in names) or len("".join(names)) + len(described) > _MOST_DESCRIBED:
        raise _LargeForm
    return _make_form(described)


def _make_form(described: tuple[Any, ...]) -> _Form | None:
    if described.count(None) != 3:  # noqa: PLR2004
        return None  # a header is named None
    end = len(described) - described[::-1].index(None) - 1
    names, types = described[:end], described[end + 4 :]
    if described[end + 1 : end + 4] != _CALL_TYPES or len(types) != len(names) - 2:
        return None
    if ("id", str) not in zip(names, types, strict=False):
        return None
    rules, kinds = iter((_HEADER_RULES, _PROPERTY_RULES, _DELIVERY_RULES)), iter(types)
    current, form = next(rules), _Form([], [], [], [], [])
    for name in names:
        if name is None:
            current = next(rules)
            continue
        kind, (role, allowed) = next(kinds), current.get(name, _OTHER)
        if allowed and kind not in allowed:
            return None
        empty = _EMPTY.get(name) if role == "empty" and kind is not type(None) else None
        form.texts.append(role == "text" and kind is str)
        form.numbers.append(role == "number" and kind is int)
        form.empty.append(empty is not None)
        if empty is not None:
            form.expected.append(empty)
        form.containers.append(role == "other" and kind not in _SCALAR_TYPES)
    return form


def _is_common(
    headers: Mapping[str, Any], properties: Mapping[str, Any], delivery_info: Mapping[str, Any], payload: Any
) -> bool:
    """Tell whether a message is valid, and has the form that Celery's own publishers give it.

    Exact types, ASCII texts, small numbers, no time limits, no stamps and no callbacks. False says nothing about
    validity. The types are checked once for all messages of the same form.
    """
    values = [*headers.values(), *properties.values(), *delivery_info.values()]
    try:
        form = _form_of((*headers, None, *properties, None, *delivery_info, None, *map(type, chain(payload, values))))
    except _LargeForm:
        return False
    if form is None:
        return False
    texts, numbers, empty, expected, containers = form
    nested = [*compress(values, containers)]
    return (
        "".join(compress(values, texts)).isascii()
        and headers["id"]
        and _BYTES.issuperset(compress(values, numbers))
        and [*compress(values, empty)] == expected
        and payload[2] in _NOTHING_EMBEDDED
        # Over Redis, the delivery info is a property, too. Its own values are selected above.
        and (nested == [delivery_info] or not _nested_deeper(nested, MAX_DEPTH - 1))
    )


def check_headers(headers: Mapping[str, Any]) -> None:
    """Check the headers that Celery and this library read.

    Args:
        headers: Of a message of task protocol 2, or what Celery made of a message of protocol 1.

    Raises:
        ValueError: A header is malformed.
    """
    for name, value in headers.items():
        if value is None:
            continue
        known = _HEADERS.get(name)
        if known is not None:
            valid, expected = known
            if not valid(value):
                raise ValueError(f"header {name!r}: expected {expected}")
        elif isinstance(value, _CONTAINERS) and _deeper_than(value, MAX_DEPTH):
            raise ValueError(f"header {_shown(name)}: expected at most {MAX_DEPTH} nested levels")
    if not headers.get("id"):
        raise ValueError("header 'id': expected a non-empty text")


def check_origin(properties: Mapping[str, Any], delivery_info: Mapping[str, Any]) -> None:
    """Check where a message came from; over Redis and the like a publisher writes that too.

    Raises:
        ValueError: A property is malformed.
    """
    for name in _ORIGIN_TEXTS:
        if not _maybe_text(properties.get(name)):
            raise ValueError(f"property {name!r}: expected text")
    for name in _DELIVERY_TEXTS:
        if not _maybe_text(delivery_info.get(name)):
            raise ValueError(f"delivery_info {name!r}: expected text")
    for name in _BYTE_PROPERTIES:
        number = properties.get(name)
        if number is not None and not (type(number) is int and 0 <= number <= _MAX_BYTE):
            raise ValueError(f"property {name!r}: expected a whole number from 0 to {_MAX_BYTE}")


def check_body(payload: Any, text: Any = None) -> None:
    """Check the shape of a message's body. Whether its arguments fit is checked in the pool child.

    Args:
        payload: The decoded body.
        text: The body as it was received, if that is JSON; only its brackets are counted.

    Raises:
        ValueError: The body is not what it has to be.
    """
    _check_call(payload)
    _check_depth(payload, text)


def _check_depth(payload: Any, text: Any) -> None:
    # Each nested level of JSON has a bracket, and to count brackets costs next to nothing.
    shallow = isinstance(text, _RAW_TYPES) and (len(text) <= MAX_DEPTH or _brackets(text) <= MAX_DEPTH)
    if not shallow and _deeper_than(payload, MAX_DEPTH):
        raise ValueError(f"body: expected at most {MAX_DEPTH} nested levels")


def _check_call(payload: Any) -> None:
    if not _is_call(payload):
        raise ValueError("body: expected [list of arguments, mapping of keyword arguments, embed]")
    if payload[2] is not None and not isinstance(payload[2], Mapping):
        raise ValueError("body: expected a mapping of callbacks, errbacks, chain and chord behind the arguments")
    _check_embed(payload[2] or {})


def _is_call(payload: Any) -> bool:
    if not isinstance(payload, list | tuple) or len(payload) != 3:  # noqa: PLR2004
        return False
    return isinstance(payload[0], list | tuple) and isinstance(payload[1], Mapping)


def _check_embed(embed: Mapping[Any, Any]) -> None:
    for name, value in embed.items():
        kind = _EMBEDDED.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"body: expected no {_shown(name)} behind the arguments")
        if value and not _signatures(value, kind):
            raise ValueError(f"body: expected signatures in {name!r}")


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether it is a whole number from 0 to :data:`MAX_COUNT`."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def _text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which no key and no header can carry
        return False
    return True


def _anything(_value: object) -> bool:
    return True


def _any_text(value: object) -> bool:
    return isinstance(value, str)


def _maybe_text(value: object) -> bool:
    return value is None or _text(value)


def _time_limits(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_time_limit, value))  # noqa: PLR2004


def _time_limit(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value <= _MAX_LIMIT  # false of NaN too


def _texts(value: object) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(map(_text, value))


def _mapping(value: object) -> bool:
    return isinstance(value, Mapping) and not _deeper_than(value, MAX_DEPTH)


def _signatures(value: object, kind: type) -> bool:
    if kind is dict:
        return isinstance(value, Mapping)
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


def _brackets(text: bytes | str) -> int:
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{")
    return text.count("[") + text.count("{")


def _deeper_than(value: Any, levels: int) -> bool:
    """Tell whether containers are nested deeper than so many levels, or contain themselves."""
    return _nested_deeper([value], levels)


def _nested_deeper(level: Iterable[Any], levels: int) -> bool:
    """Tell whether any of these values is nested deeper. Each container is looked at once per level."""
    for _ in range(levels):
        items = [*chain.from_iterable(map(_items, level))]
        compound = [*compress(items, map(not_, map(_is_scalar_type, map(type, items))))]
        if not compound:
            return False
        level = dict(zip(map(id, compound), compound, strict=True)).values()
    return any(isinstance(value, _CONTAINERS) for value in level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, _CONTAINERS) else ()


def _shown(name: object) -> str:
    """Return a field's name for an error, but only if it reads as a name: any other may be as secret as a value."""
    return repr(name) if isinstance(name, str) and name.isidentifier() and len(name) <= 40 else "<unknown>"  # noqa: PLR2004


_TEXT: Final = (_text, "text in UTF-8")
_COUNT: Final = (is_count, f"a whole number from 0 to {MAX_COUNT}")

#: The headers that Celery's worker reads beside a task's arguments, and their form. None is always allowed.
_HEADERS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(_TEXTS, _TEXT),
    **dict.fromkeys(_REPRS, (_any_text, "text")),
    **dict.fromkeys(_COUNTS, _COUNT),
    "timelimit": (_time_limits, f"two numbers of seconds from 0 to {_MAX_LIMIT:g}, or None"),
    "stamped_headers": (_texts, "a list of texts"),
    "stamps": (_mapping, "a mapping"),
    # Celery puts them beside the headers; `check_body` has them.
    **dict.fromkeys(("args", "kwargs"), (_anything, "")),
}
