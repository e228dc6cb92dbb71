"""The canonical form of a value: the same bytes on both sides of a serialiser, in every process and Python version.

:func:`form_of` returns the bytes to hash: the form of a value. :func:`plain` returns the value to show. Both start from
the normal value, which :func:`.equal_values.normalize` returns.

Two forms are equal only if the normal values are equal. A form begins with a byte for its kind, and shows where it
ends. A constant has one byte. A number ends at the first ``;``. Text is preceded by its length. A container ends with
a closing bracket, and no form begins with one. So no form is the beginning of another, and a sequence of forms can be
read in one way only. ``-0.0`` has the form of ``0.0``, and all NaN have one form. If JSON writes two keys of a mapping
alike, the later one wins, as when JSON is read.

If arguments are large, computing the lock name is the slowest part of taking a lock. So the walk carries only the
depth, not the path to the value. It caches the forms of short mapping keys, which rows of a table repeat. An error
collects the path on its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from .equal_values import MAX_DEPTH, UnstableValue, key_text, normalize, too_deep

__all__ = ["form_of", "plain", "text_form", "utf8"]


def form_of(value: Any, label: str) -> bytes:
    """Return the bytes that stand for a value: equal for what serialisers make equal, else different.

    Args:
        value: One argument of a call.
        label: What an error calls the value, for example ``task 't': argument 'a'``.

    Raises:
        LockKeyError: The value has no stable form. The message names the path and the type, never the value.
    """
    try:
        write = _AS_THEY_ARE.get(type(value), _reduced_form)
        return write(value, 0)
    except UnstableValue as error:
        raise error.located(label) from None


def plain(value: Any, label: str) -> Any:
    """Return the value to show and to format: built-in types only, equal wherever the forms are equal.

    Raises:
        LockKeyError: The value has no stable form, as for :func:`form_of`.
    """
    try:
        return _plain(value, 0)
    except UnstableValue as error:
        raise error.located(label) from None


def text_form(text: str, _depth: int = 0) -> bytes:
    """Return the form of a string."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raw = utf8(text)
    return b"s%d:%b" % (len(raw), raw)


#: Maximum length of a key whose form is cached: a message with large keys must not fill the cache with them.
_SHORT: Final = 64
_short_key_form = lru_cache(1024)(text_form)


def utf8(text: str) -> bytes:
    """Return the text in UTF-8. Lone surrogates, which JSON carries, are kept."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        # Through UTF-16, because JSON reads two adjacent surrogates as one character, too.
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "surrogatepass")


def _form(value: Any, depth: int) -> bytes:
    write = _AS_THEY_ARE.get(type(value), _reduced_form)
    return write(value, depth)


def _reduced_form(value: Any, depth: int) -> bytes:
    reduced = normalize(value)
    return _FORMS[type(reduced)](reduced, depth)


def _list_form(value: Iterable[Any], depth: int) -> bytes:
    if depth >= MAX_DEPTH:
        raise too_deep()
    depth += 1
    forms: list[bytes] = []
    try:
        for item in value:
            write = _AS_THEY_ARE.get(type(item), _reduced_form)
            forms.append(write(item, depth))
    except UnstableValue as error:
        error.steps.append(len(forms))
        raise
    return b"[%b]" % b"".join(forms)


def _dict_form(value: dict[Any, Any], depth: int) -> bytes:
    if depth >= MAX_DEPTH:
        raise too_deep()
    depth += 1
    forms = {}
    key = None
    try:
        for key, item in value.items():
            write = _AS_THEY_ARE.get(type(item), _reduced_form)
            short = type(key) is str and len(key) <= _SHORT
            forms[_short_key_form(key) if short else _key_form(key, depth)] = write(item, depth)
    except UnstableValue as error:
        error.steps.append((key,))
        raise
    return b"{%b}" % b"".join([key + item for key, item in sorted(forms.items())])


def _key_form(key: Any, depth: int) -> bytes:
    text = key_text(key)
    return _form(key, depth) if text is None else text_form(text)


def _set_form(value: frozenset[Any], depth: int) -> bytes:
    return b"<%b>" % b"".join([form for form, _ in _in_order(value, depth)])


def _in_order(value: frozenset[Any], depth: int) -> list[tuple[bytes, Any]]:
    if depth >= MAX_DEPTH:
        raise too_deep()
    try:
        forms = {_form(item, depth + 1): item for item in value}
    except UnstableValue as error:
        error.steps.append(None)
        raise
    return sorted(forms.items(), key=lambda pair: pair[0])


def _tagged(tag: bytes, write: Callable[[Any], str]) -> Callable[[Any, int], bytes]:
    def form(value: Any, _depth: int) -> bytes:
        raw = write(value).encode()
        return b"%b%d:%b" % (tag, len(raw), raw)

    return form


#: The types of which ``normalize`` returns a value unchanged, so :func:`form_of` does not call it for them. A tuple has
#: the form of a list.
_AS_THEY_ARE: Final[dict[type, Callable[[Any, int], bytes]]] = {
    str: text_form,
    int: lambda value, _depth: b"i%x;" % value,
    bool: lambda value, _depth: b"T" if value else b"F",
    type(None): lambda _value, _depth: b"N",
    float: lambda value, _depth: b"r%b;" % repr(value + 0.0).encode(),
    bytes: lambda value, _depth: b"b%d:%b" % (len(value), value),
    list: _list_form,
    tuple: _list_form,
    dict: _dict_form,
}
_FORMS: Final[dict[type, Callable[[Any, int], bytes]]] = {
    **_AS_THEY_ARE,
    datetime: _tagged(b"m", datetime.isoformat),
    date: _tagged(b"d", date.isoformat),
    time: _tagged(b"c", time.isoformat),
    timedelta: _tagged(b"p", lambda value: str(value // timedelta(microseconds=1))),
    Decimal: _tagged(b"e", lambda value: str(value).lower()),  # lower: the context chooses between E and e
    UUID: _tagged(b"u", lambda value: value.hex),
    frozenset: _set_form,
}


def _plain(value: Any, depth: int) -> Any:
    reduced = normalize(value)
    show = _SHOWN.get(type(reduced))
    return reduced if show is None else show(reduced, depth)


def _plain_list(value: Iterable[Any], depth: int) -> list[Any]:
    if depth >= MAX_DEPTH:
        raise too_deep()
    shown: list[Any] = []
    try:
        for item in value:
            shown.append(_plain(item, depth + 1))  # noqa: PERF401 - its length is the failed item's index
    except UnstableValue as error:
        error.steps.append(len(shown))
        raise
    return shown


def _plain_dict(value: dict[Any, Any], depth: int) -> dict[str, Any]:
    if depth >= MAX_DEPTH:
        raise too_deep()
    shown = {}
    key = None
    try:
        for key, item in value.items():
            shown[_plain_key(key, depth + 1)] = _plain(item, depth + 1)
    except UnstableValue as error:
        error.steps.append((key,))
        raise
    return dict(sorted(shown.items()))


def _plain_key(key: Any, depth: int) -> str:
    text = key_text(key)
    return ascii(_plain(key, depth)) if text is None else text


_SHOWN: Final[dict[type, Callable[[Any, int], Any]]] = {
    str: lambda value, _depth: value if value.isascii() else utf8(value).decode("utf-8", "surrogatepass"),
    float: lambda value, _depth: value + 0.0,
    bytes: lambda value, _depth: value.decode("utf-8", "backslashreplace"),
    list: _plain_list,
    tuple: _plain_list,
    dict: _plain_dict,
    frozenset: lambda value, depth: [_plain(item, depth + 1) for _, item in _in_order(value, depth)],
}
