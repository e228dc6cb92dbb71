"""Key templates: their text, the parts that count, and arguments that cannot fill them."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from celery_dlock.errors import InvalidLockOptions, LockKeyError
from celery_dlock.keys.key_spec import KeySpec
from tests.unit.keys.naming import name_text, without_digest

pytestmark = pytest.mark.core


def spec(function: Callable[..., Any], template: str) -> KeySpec:
    return KeySpec("shop.pay", inspect.signature(function), template, "task")


def one(a: Any) -> None: ...


def two(a: Any, b: Any) -> None: ...


def wide(a: Any, /, b: Any = 2, *rest: Any, c: Any = None, **more: Any) -> None: ...


class Level(enum.IntEnum):
    HIGH = 3


class Colour(str, enum.Enum):
    RED = "red"


@dataclass
class User:
    id: int
    tags: Any = None


class Hidden:
    def __format__(self, _spec: str) -> str:
        raise RuntimeError("hunter2")

    @property
    def secret(self) -> int:
        raise RuntimeError("hunter2")


def test_its_text_is_shown_behind_the_task() -> None:
    assert without_digest(name_text(spec(two, "sms:{a}/{b}"), 42, "x")) == "shop.pay:sms:42/x"


def test_fields_never_run_into_one_another() -> None:
    joined = spec(two, "{a}:{b}")
    first, second = name_text(joined, "x:y", "z"), name_text(joined, "x", "y:z")
    assert without_digest(first) == without_digest(second) == "shop.pay:x:y:z"
    assert first != second


def test_types_differ_although_their_text_is_the_same() -> None:
    template = spec(one, "{a}")
    assert len({name_text(template, value) for value in (1, "1", True, "True", None, "None", 1.0, "1.0")}) == 8


def test_a_formatted_field_counts_by_its_text() -> None:
    monthly = spec(one, "{a:%Y-%m}")
    assert without_digest(name_text(monthly, date(2026, 3, 1))) == "shop.pay:2026-03"
    assert name_text(monthly, date(2026, 3, 1)) == name_text(monthly, date(2026, 3, 31))
    assert name_text(monthly, date(2026, 3, 1)) != name_text(monthly, date(2026, 4, 1))


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("{a:05d}", 42, "00042"),
        ("{a!r}", "x", "%27x%27"),
        ("{a!s:>3}", 5, "%20%205"),
        ("{a!a}", "é", "%27%5Cxe9%27"),
        ("{a[id]}", {"id": 7}, "7"),
        ("{a[1]}", {1: "x"}, "x"),
        ("{a[1]}", {"1": "x"}, "x"),
        ("{a[1]}", ("x", "y"), "y"),
        ("{a[0][id]}", [{"id": 7}], "7"),
        ("{a.id}", User(7), "7"),
        ("{a.tags[0]}", User(7, ["x"]), "x"),
        ("{{{a}}}", 1, "%7B1%7D"),
        ("{a}", Level.HIGH, "3"),
        ("{a}", Colour.RED, "red"),
        ("{a:>4}", Colour.RED, "%20red"),
        ("{a}", True, "True"),
        ("{a}", None, "None"),
        ("{a}", -0.0, "0.0"),
        ("{a}", Decimal("10.00"), "10"),
        ("{a}", b"ab", "ab"),
        ("{a}", (1, "x"), "%5B1,%20%27x%27%5D"),
        ("{a}", ["é"], "%5B%27%5Cxe9%27%5D"),
        ("{a}", {2: 1, "1": 2}, "%7B%271%27:%202,%20%272%27:%201%7D"),
        ("{a:%H}", datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=2))), "23"),
        ("fixed", "whatever", "fixed"),
    ],
)
def test_what_a_field_shows(template: str, value: object, text: str) -> None:
    assert without_digest(name_text(spec(one, template), value)) == f"shop.pay:{text}"


def test_a_fixed_text_is_one_lock_whatever_the_arguments() -> None:
    assert name_text(spec(one, "all"), 1) == name_text(spec(one, "all"), 2)


def test_collected_arguments_can_be_fields() -> None:
    assert without_digest(name_text(spec(wide, "{rest[0]}:{more[x]}"), 1, 2, 3, x=4)) == "shop.pay:3:4"


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{a.secret}", Hidden()),
        ("{a[hunter2]}", {}),
        ("{a[9]}", []),
        ("{a.none}", 1),
        ("{a:d}", "hunter2"),
        ("{a:%}", None),
    ],
)
def test_a_field_that_cannot_be_filled_is_an_error_that_shows_no_value(template: str, value: object) -> None:
    with pytest.raises(
        LockKeyError, match=r"task 'shop\.pay': argument 'a' in key field .* cannot be filled"
    ) as caught:
        name_text(spec(one, template), value)
    assert "hunter2" not in str(caught.value).replace(template.partition(":")[0], "")
    assert caught.value.__suppress_context__


def test_a_field_without_a_stable_form_is_an_error_that_names_it() -> None:
    for template in ("{a}", "{a:>5}", "{a.secret}", "{a!r}"):
        with pytest.raises(LockKeyError, match=r"task 'shop.pay': argument 'a' in key field \{a"):
            name_text(spec(one, template), Hidden())


@pytest.mark.parametrize(
    "template",
    [
        "{a.__class__}",
        "{a.__init__.__globals__[os].environ[HOME]}",
        "{a[0]._x}",
        "{a._x}",
        "{a[_x]}",
        "{_b}",
        "{a.b.__c}",
    ],
)
def test_a_name_that_begins_with_an_underscore_is_refused_in_every_template(template: str) -> None:
    def call(a: Any, _b: Any) -> None: ...

    with pytest.raises(InvalidLockOptions, match="no name in a template may begin with '_'"):
        spec(call, template)


@pytest.mark.parametrize(
    "template",
    [
        "{a:>300000000}",
        "{a:0300000000d}",
        "{a:.300000000f}",
        "{a:%300000000Y}",
        "{a:>1001}",
        "{a:>٣٠٠٠٠}",
        "{a!r:9999999}",
    ],
)
def test_a_width_that_would_fill_the_memory_is_refused_in_every_template(template: str) -> None:
    with pytest.raises(InvalidLockOptions, match="has a number above 1000 in its format spec"):
        spec(one, template)
    assert len(without_digest(name_text(spec(one, "{a:>1000}"), 1))) < 200


@pytest.mark.parametrize("value", [Decimal("1e999999999"), Decimal("1e-999999999"), Decimal("-7e1001")])
def test_a_decimal_that_a_format_would_write_out_in_zeros_is_refused(value: Decimal) -> None:
    with pytest.raises(LockKeyError, match="cannot be filled: ValueError"):
        name_text(spec(one, "{a:f}"), value)
    assert name_text(spec(one, "{a}"), value)
    assert without_digest(name_text(spec(one, "{a:.1f}"), Decimal("1.25"))) == "shop.pay:1.2"


class TestCarriedByAMessage:
    @pytest.mark.parametrize("template", ["{a}", "{a[id]}", "{a[0][id]}:{b}", "fixed", "{{{a}}}"])
    def test_arguments_and_items_are_allowed(self, template: str) -> None:
        KeySpec("shop.pay", inspect.signature(two), template, "task", carried=True)

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{a.hex}", "names an attribute"),
            ("{a[0].hex}", "names an attribute"),
            ("{a:d}", "has a format"),
            ("{a!r}", "has a format"),
            ("{a:>999}", "has a format"),
            ("{a}" * 21, "more than 20 fields"),
        ],
    )
    def test_anything_else_is_refused(self, template: str, said: str) -> None:
        spec(two, template)
        with pytest.raises(InvalidLockOptions, match=said):
            KeySpec("shop.pay", inspect.signature(two), template, "task", carried=True)
