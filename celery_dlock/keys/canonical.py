"""The canonical form of a value: the same bytes on both sides of a serialiser, in every process and Python.

``form_of`` gives the bytes to hash, ``plain`` the value to show, both from the normal value.

Two forms are equal only if the normal values are. Each begins with a byte that tells its kind, and its end can be
told from its own bytes: a constant has no more, a number ends at its first ``;``, text is preceded by its length, and
a container is closed by a bracket with which no form begins. No form is thus the beginning of another, and forms put
one after the other read back in one way only. ``-0.0`` is ``0.0`` and all NaN are one; of two keys that JSON writes
alike, the later one counts, as it does when JSON is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from .normalize import ValuePath, deeper, key_text, normalize

__all__ = ["form_of", "plain", "text_form", "utf8"]


def form_of(value: Any, at: ValuePath) -> bytes:
    """The bytes that stand for a value; equal for what serialisers make equal, else different.

    Raises ``LockKeyError`` for a value without a stable form; it tells the place and the type, never the value.
    """
    fast = _AS_THEY_ARE.get(type(value))
    if fast is not None:
        return fast(value, at)
    reduced = normalize(value, at)
    return _FORMS[type(reduced)](reduced, at)


def plain(value: Any, at: ValuePath) -> Any:
    """The value to show and to format: built-in types only, equal wherever the forms are equal.

    Raises ``LockKeyError`` like :func:`form_of`.
    """
    reduced = normalize(value, at)
    show = _SHOWN.get(type(reduced))
    return reduced if show is None else show(reduced, at)


def text_form(text: str) -> bytes:
    """The form of a string."""
    raw = utf8(text)
    return b"s%d:%b" % (len(raw), raw)


def utf8(text: str) -> bytes:
    """The text in UTF-8; lone surrogates, which JSON carries, are kept."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        # By way of UTF-16, because JSON too reads two surrogates that stand side by side as one character.
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "surrogatepass")


def _list_form(value: Iterable[Any], at: ValuePath) -> bytes:
    depth = deeper(at)
    return b"[%b]" % b"".join([form_of(item, (at, index, depth)) for index, item in enumerate(value)])


def _dict_form(value: dict[Any, Any], at: ValuePath) -> bytes:
    depth = deeper(at)
    forms = {_key_form(key, (at, (key,), depth)): form_of(item, (at, (key,), depth)) for key, item in value.items()}
    return b"{%b}" % b"".join([key + item for key, item in sorted(forms.items())])


def _key_form(key: Any, at: ValuePath) -> bytes:
    text = key_text(key, at)
    return form_of(key, at) if text is None else text_form(text)


def _set_form(value: frozenset[Any], at: ValuePath) -> bytes:
    return b"<%b>" % b"".join([form for form, _ in _in_order(value, at)])


def _in_order(value: frozenset[Any], at: ValuePath) -> list[tuple[bytes, Any]]:
    here = (at, None, deeper(at))
    return sorted({form_of(item, here): item for item in value}.items(), key=lambda pair: pair[0])


def _tagged(tag: bytes, write: Callable[[Any], str]) -> Callable[[Any, ValuePath], bytes]:
    def form(value: Any, _at: ValuePath) -> bytes:
        raw = write(value).encode()
        return b"%b%d:%b" % (tag, len(raw), raw)

    return form


#: The types that JSON keeps as they are, or kombu keeps beside them, and that need no bringing to a normal value.
_AS_THEY_ARE: Final[dict[type, Callable[[Any, ValuePath], bytes]]] = {
    str: lambda value, _at: text_form(value),
    int: lambda value, _at: b"i%x;" % value,
    bool: lambda value, _at: b"T" if value else b"F",
    type(None): lambda _value, _at: b"N",
    float: lambda value, _at: b"r%b;" % repr(value + 0.0).encode(),
    bytes: lambda value, _at: b"b%d:%b" % (len(value), value),
    list: _list_form,
    tuple: _list_form,
    dict: _dict_form,
}
_FORMS: Final[dict[type, Callable[[Any, ValuePath], bytes]]] = {
    **_AS_THEY_ARE,
    datetime: _tagged(b"m", datetime.isoformat),
    date: _tagged(b"d", date.isoformat),
    time: _tagged(b"c", time.isoformat),
    timedelta: _tagged(b"p", lambda value: str(value // timedelta(microseconds=1))),
    Decimal: _tagged(b"e", lambda value: str(value).lower()),  # lower: the context chooses between E and e
    UUID: _tagged(b"u", lambda value: value.hex),
    frozenset: _set_form,
}


def _plain_list(value: Iterable[Any], at: ValuePath) -> list[Any]:
    depth = deeper(at)
    return [plain(item, (at, index, depth)) for index, item in enumerate(value)]


def _plain_dict(value: dict[Any, Any], at: ValuePath) -> dict[str, Any]:
    depth = deeper(at)
    shown = {_plain_key(key, (at, (key,), depth)): plain(item, (at, (key,), depth)) for key, item in value.items()}
    return dict(sorted(shown.items()))


def _plain_key(key: Any, at: ValuePath) -> str:
    text = key_text(key, at)
    return ascii(plain(key, at)) if text is None else text


_SHOWN: Final[dict[type, Callable[[Any, ValuePath], Any]]] = {
    str: lambda value, _at: value if value.isascii() else utf8(value).decode("utf-8", "surrogatepass"),
    float: lambda value, _at: value + 0.0,
    bytes: lambda value, _at: value.decode("utf-8", "backslashreplace"),
    list: _plain_list,
    tuple: _plain_list,
    dict: _plain_dict,
    frozenset: lambda value, at: [plain(item, (at, None, at[2] + 1)) for _, item in _in_order(value, at)],
}
