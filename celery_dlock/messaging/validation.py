"""Validate what a publisher wrote into a message, before the worker's main process acts on it.

An exception in the main process ends the worker, and the broker then delivers the message to the next worker. So
every field that the main process, or the library in a pool child, reads is checked once, at the receipt.
No error shows a value: it may be a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeGuard

__all__ = ["MALFORMED", "MAX_COUNT", "MAX_DEPTH", "check_body", "check_headers", "check_origin", "is_count"]

#: What code raises that meets a value of another type or size than it expects. Not ``MemoryError`` or ``OSError``:
#: they say something about the machine, and the message is to be delivered again.
MALFORMED: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: How deep the containers of a message may be nested: pickling for the pool child recurses, and so does JSON.
MAX_DEPTH: Final = 250
#: The largest count that a header may carry.
MAX_COUNT: Final = 2**31 - 1
#: The longest time limit, in seconds: 31 years. Timers calculate with floats.
_MAX_LIMIT: Final = 1e9
#: What stands beside a call's arguments in its body (task protocol 2). Celery copies every further key over the
#: request's own fields in the pool child.
_EMBEDDED: Final = {"callbacks": list, "errbacks": list, "chain": list, "chord": dict}
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_PRIORITIES: Final = 255


def check_headers(headers: Mapping[str, Any]) -> None:
    """Check the headers that Celery and this library read.

    Args:
        headers: Of a message of task protocol 2, or what Celery made of a message of protocol 1.

    Raises:
        ValueError: A header is not what it has to be.
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
        ValueError: A property is not what it has to be.
    """
    for name in ("correlation_id", "reply_to"):
        if not _maybe_text(properties.get(name)):
            raise ValueError(f"property {name!r}: expected text")
    for name in ("exchange", "routing_key"):
        if not _maybe_text(delivery_info.get(name)):
            raise ValueError(f"delivery_info {name!r}: expected text")
    for name in ("priority", "delivery_mode"):
        number = properties.get(name)
        if number is not None and not (type(number) is int and 0 <= number <= _PRIORITIES):
            raise ValueError(f"property {name!r}: expected a whole number from 0 to {_PRIORITIES}")


def check_body(payload: Any, text: Any = None) -> None:
    """Check the shape of a message's body. Whether its arguments fit is checked in the pool child.

    Args:
        payload: The decoded body.
        text: The body as it was received, if that is JSON; only its brackets are counted.

    Raises:
        ValueError: The body is not what it has to be.
    """
    if not _is_call(payload):
        raise ValueError("body: expected [list of arguments, mapping of keyword arguments, embed]")
    embed = payload[2]
    if embed is not None and not isinstance(embed, Mapping):
        raise ValueError("body: expected a mapping of callbacks, errbacks, chain and chord behind the arguments")
    for name, value in (embed or {}).items():
        kind = _EMBEDDED.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"body: expected no {_shown(name)} behind the arguments")
        if value and not _signatures(value, kind):
            raise ValueError(f"body: expected signatures in {name!r}")
    # Each nested level of JSON has a bracket, and to count brackets costs next to nothing.
    shallow = isinstance(text, bytes | str) and _brackets(text) <= MAX_DEPTH
    if not shallow and _deeper_than(payload, MAX_DEPTH):
        raise ValueError(f"body: expected at most {MAX_DEPTH} nested levels")


def _is_call(payload: Any) -> bool:
    if not isinstance(payload, list | tuple) or len(payload) != 3:  # noqa: PLR2004  # args, kwargs, embed
        return False
    return isinstance(payload[0], list | tuple) and isinstance(payload[1], Mapping)


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
    """Tell whether containers are nested deeper, or contain themselves. Each container is looked at once per level."""
    level = {id(value): value}
    for _ in range(levels):
        level = {id(item): item for each in level.values() for item in _items(each) if isinstance(item, _CONTAINERS)}
        if not level:
            return False
    return True


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _shown(name: object) -> str:
    """A field's name for an error; only what reads as a name, because any other may be as secret as a value."""
    return repr(name) if isinstance(name, str) and name.isidentifier() and len(name) <= 40 else "<unknown>"  # noqa: PLR2004


_TEXT: Final = (_text, "text in UTF-8")
_COUNT: Final = (is_count, f"a whole number from 0 to {MAX_COUNT}")

#: What Celery's worker reads of a message beside its arguments, and how it has to look. None is always allowed.
_HEADERS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(("id", "task", "shadow", "root_id", "parent_id", "group"), _TEXT),
    **dict.fromkeys(("argsrepr", "kwargsrepr"), (_any_text, "text")),
    **dict.fromkeys(("retries", "replaced_task_nesting", "group_index"), _COUNT),
    "timelimit": (_time_limits, f"two numbers of seconds from 0 to {_MAX_LIMIT:g}, or None"),
    "stamped_headers": (_texts, "a list of texts"),
    "stamps": (_mapping, "a mapping"),
    # Celery puts them beside the headers; `check_body` has them.
    **dict.fromkeys(("args", "kwargs"), (_anything, "")),
}
