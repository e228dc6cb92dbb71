"""``key="sms:{user_id}"``: a ``str.format`` template over argument names, checked once and filled for every call.

``str.format`` itself is not used, for two reasons. Values are formatted in their normal form, so the text does not
depend on the serialiser. Each field is also hashed on its own, so values that run from one field into the next
(``"{a}:{b}"``) never give two calls one name.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from ..errors import LockKeyError
from ..utils.text import did_you_mean
from .canonical import form_of, plain, text_form
from .equal_values import UnstableValue, key_text

__all__ = ["Template"]

#: The largest number in a format spec: a width or a precision is so many characters of memory.
MAX_WIDTH: Final = 1000
#: Most fields of a template that a message carries: each may show the whole of an argument.
MAX_CARRIED_FIELDS: Final = 20
#: The largest exponent of a formatted decimal: "f" writes it out in zeros.
_MAX_EXPONENT: Final = 1000
_NUMBER: Final = re.compile(r"\d+")
_FIELD: Final = re.compile(r"([^.\[\]]*)((?:\.[^.\[\]]+|\[[^\]]+\])*)")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[([^\]]+)\]")
_CONVERSIONS: Final[dict[str | None, Callable[[Any], Any]]] = {
    None: lambda value: value,
    "s": str,
    "r": repr,
    "a": ascii,
}


@dataclass(frozen=True, slots=True)
class _Field:
    label: str  # begins every error about this field's value
    argument: int
    steps: tuple[tuple[str, str], ...]  # (attribute, "") or ("", index)
    conversion: str | None
    spec: str

    def fill(self, values: Sequence[Any]) -> tuple[str, bytes]:
        value = values[self.argument]
        for attribute, index in self.steps:
            value = self._tried(_attribute, value, attribute) if attribute else self._tried(_item, value, index)
        text: str = self._tried(self._text, plain(value, self.label))
        # The author who formats a value ({d:%Y-%m}) means the text; otherwise 1 and "1" are to differ.
        formatted = self.spec or self.conversion
        return text, text_form(text) if formatted else form_of(value, self.label)

    def _text(self, value: Any) -> str:
        if isinstance(value, list | dict) and not (self.spec or self.conversion):
            return ascii(value)  # which characters repr shows as they are depends on the Python
        shown = _CONVERSIONS[self.conversion](value)
        if self.spec and isinstance(shown, Decimal) and shown.is_finite():
            _refuse_long(shown)
        return format(shown, self.spec)

    def _tried(self, step: Callable[..., Any], *operands: Any) -> Any:
        try:
            return step(*operands)
        except Exception as error:  # noqa: BLE001 - a value's own methods run here and may raise anything
            # Without the cause: its message may show the value.
            raise LockKeyError(f"{self.label} cannot be filled: {type(error).__name__}") from None


class Template:
    """A compiled template.

    Raises ``ValueError`` for a template that ``str.format`` could not fill from the named arguments alone. Names that
    begin with ``_`` are refused too: they lead from a value to the modules of its process.

    Args:
        source: The template as its author wrote it.
        names: The names of the task's arguments, in the order in which :meth:`fill` gets their values.
        task_name: For errors.
        carried: A message brought it, so it may name arguments and their items only.
    """

    __slots__ = ("_parts",)

    def __init__(self, source: str, names: Sequence[str], task_name: str, *, carried: bool = False) -> None:
        self._parts: list[tuple[str, _Field | None]] = []
        for literal, field, spec, conversion in string.Formatter().parse(source):
            compiled = None if field is None else _compiled(field, spec or "", conversion, names, task_name)
            if carried and compiled is not None:
                _refuse_beyond_items(field, compiled)
            self._parts.append((literal, compiled))
        if carried and sum(field is not None for _, field in self._parts) > MAX_CARRIED_FIELDS:
            raise ValueError(f"a key template of a message has more than {MAX_CARRIED_FIELDS} fields")
        if not source:
            raise ValueError("an empty template names nothing")
        if source in names:
            raise ValueError(f"a fixed text, although an argument has this name; write '{{{source}}}' or [{source!r}]")

    def fill(self, values: Sequence[Any]) -> tuple[str, bytes]:
        """The text for these values, and their fields' forms to hash."""
        text, forms = "", b""
        for literal, field in self._parts:
            text += literal
            if field is not None:
                shown, form = field.fill(values)
                text += shown
                forms += form
        return text, forms


def _compiled(field: str, spec: str, conversion: str | None, names: Sequence[str], task_name: str) -> _Field:
    matched = _FIELD.fullmatch(field)
    if matched is None:
        raise ValueError(f"field {{{field}}} is malformed")
    name = matched[1]
    if not name or name.isdigit():
        raise ValueError(f"field {{{field}}} is positional; write an argument's name")
    if name not in names:
        raise ValueError(f"field {{{field}}} names no argument{did_you_mean(name, names)}")
    if conversion not in _CONVERSIONS:
        raise ValueError(f"field {{{field}}} has an unknown conversion !{conversion}")
    _check_spec(field, spec)
    steps = tuple(_STEP.findall(matched[2]))
    if private := next((each for each in (name, *map("".join, steps)) if each.startswith("_")), None):
        raise ValueError(f"field {{{field}}} has the name {private!r}; no name in a template may begin with '_'")
    label = f"task {task_name!r}: argument {name!r} in key field {{{field}}}"
    return _Field(label, names.index(name), steps, conversion, spec)


def _check_spec(field: str, spec: str) -> None:
    if "{" in spec or "}" in spec:
        # A width taken from an argument would let a caller ask for any amount of memory.
        raise ValueError(f"field {{{field}}} has a field in its format spec")
    if any(len(number) > len(str(MAX_WIDTH)) or int(number) > MAX_WIDTH for number in _NUMBER.findall(spec)):
        raise ValueError(f"field {{{field}}} has a number above {MAX_WIDTH} in its format spec")


def _refuse_beyond_items(field: str | None, compiled: _Field) -> None:
    """A publisher must not call attributes of values, nor choose how much a format writes."""
    if compiled.spec or compiled.conversion:
        raise ValueError(f"field {{{field}}} has a format, which a key template of a message may not have")
    if any(attribute for attribute, _ in compiled.steps):
        raise ValueError(f"field {{{field}}} names an attribute; a key template of a message names arguments and items")


def _refuse_long(value: Decimal) -> None:
    exponent = value.as_tuple().exponent
    if max(abs(value.adjusted()), abs(exponent) if isinstance(exponent, int) else 0) > _MAX_EXPONENT:
        raise ValueError(f"an exponent beyond {_MAX_EXPONENT}")


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name)


def _item(value: Any, index: str) -> Any:
    if not isinstance(value, Mapping):
        return value[int(index) if index.isdigit() else index]
    # By the text of the key: 1 before a serialiser is "1" behind it; of two such keys JSON keeps the later.
    try:
        return {key_text(key): item for key, item in value.items()}[index]
    except UnstableValue as error:
        raise error.located("key") from None
