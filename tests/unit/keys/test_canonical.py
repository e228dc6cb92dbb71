"""The canonical form of values: equal forms, different forms, and values without one."""

# ruff: noqa: DTZ001 - naive datetimes are arguments too

from __future__ import annotations

import decimal
import enum
import math
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlock.errors import LockKeyError
from celery_dlock.keys.canonical import form_of, plain
from celery_dlock.keys.equal_values import MAX_DEPTH

pytestmark = pytest.mark.core

AT = "task 't': argument 'a'"
PARIS = timezone(timedelta(hours=2))


class Level(enum.IntEnum):
    HIGH = 3


class Colour(str, enum.Enum):
    RED = "red"


class Size(enum.Enum):
    LARGE = "L"


class Shout(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "not the text"


class Big(int):
    def __str__(self) -> str:
        return "not the number"

    __repr__ = __str__


class Moment(datetime):
    def isoformat(self, *_args: Any, **_kwargs: Any) -> str:
        return "not the moment"


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __json__(self) -> dict[str, int]:
        return {"cents": self.cents}


@dataclass
class Address:
    city: str
    zip: int


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped one is what users have
UNIQUE = UUID("12345678-1234-5678-1234-567812345678")

PINNED = [
    (None, b"N"),
    (True, b"T"),
    (False, b"F"),
    (0, b"i0;"),
    (-42, b"i-2a;"),
    (2**70, b"i400000000000000000;"),
    (1.0, b"r1.0;"),
    (0.1, b"r0.1;"),
    (-0.0, b"r0.0;"),
    (math.nan, b"rnan;"),
    (-math.nan, b"rnan;"),
    (math.inf, b"rinf;"),
    (-math.inf, b"r-inf;"),
    ("", b"s0:"),
    ("é", b"s2:\xc3\xa9"),
    (b"\xff", b"b1:\xff"),
    ([], b"[]"),
    ([1, ["2"]], b"[i1;[s1:2]]"),
    ({}, b"{}"),
    ({"b": 1, "a": None}, b"{s1:aNs1:bi1;}"),
    ({2, 1}, b"<i1;i2;>"),
    (datetime(2026, 3, 1, 12, 0), b"m19:2026-03-01T12:00:00"),
    (datetime(2026, 3, 1, 12, 0, tzinfo=PARIS), b"m25:2026-03-01T10:00:00+00:00"),
    (date(2026, 3, 1), b"d10:2026-03-01"),
    (time(12, 30, 0, 5), b"c15:12:30:00.000005"),
    (timedelta(days=-1, microseconds=3), b"p12:-86399999997"),
    (Decimal("10.50"), b"e4:10.5"),
    (UNIQUE, b"u32:12345678123456781234567812345678"),
]


@pytest.mark.parametrize(("value", "form"), PINNED, ids=lambda pinned: ascii(pinned)[:40])
def test_a_form_is_the_same_bytes_in_every_version_of_the_library(value: object, form: bytes) -> None:
    assert form_of(value, AT) == form


ONE_FORM = [
    ("a tuple is its list", (1, (2, 3)), [1, [2, 3]]),
    ("a namedtuple is its list", Point(1, 2), [1, 2]),
    ("an int key is JSON's string of it", {1: "x"}, {"1": "x"}),
    ("a float key is JSON's string of it", {1.5: "x"}, {"1.5": "x"}),
    ("a NaN key is JSON's string of it", {math.nan: "x"}, {"NaN": "x"}),
    ("a bool key is JSON's string of it", {True: "x"}, {"true": "x"}),
    ("a None key is JSON's string of it", {None: "x"}, {"null": "x"}),
    ("an enum key is JSON's string of it", {Level.HIGH: 1, Colour.RED: 2}, {"3": 1, "red": 2}),
    ("the later of two keys that JSON writes alike counts", {"1": "x", 1: "y"}, {"1": "y"}),
    ("a mapping's order does not matter", {"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ("every mapping is a dict", OrderedDict(a=1), MappingProxyType({"a": 1})),
    ("a Counter is a dict", Counter("aab"), {"a": 2, "b": 1}),
    ("an IntEnum is its int", Level.HIGH, 3),
    ("a str enum is its str", Colour.RED, "red"),
    ("any other enum is its value", Size.LARGE, "L"),
    ("a str subclass is its text, whatever it says", Shout("abc"), "abc"),
    ("an int subclass is its number, whatever it says", Big(7), 7),
    ("an int subclass as a key too", {Big(7): 1}, {"7": 1}),
    ("bytearray is bytes", bytearray(b"ab"), b"ab"),
    ("memoryview is bytes", memoryview(b"xaxbx")[1::2], b"ab"),
    (
        "an aware datetime is its instant",
        datetime(2026, 1, 1, 1, tzinfo=timezone.utc),
        datetime(2026, 1, 1, 3, tzinfo=PARIS),
    ),
    ("a datetime subclass is a datetime", Moment(2026, 1, 1), datetime(2026, 1, 1)),
    ("fold does not survive JSON, so it does not count", datetime(2026, 1, 1, fold=1), datetime(2026, 1, 1)),
    ("Decimals that are equal are one", Decimal("1.0"), Decimal("1.00")),
    ("Decimals that are equal are one, without a point", Decimal("1E+2"), Decimal(100)),
    ("Decimal zeros are one", Decimal("-0.00"), Decimal(0)),
    ("zero has no sign", -0.0, 0.0),
    ("a frozenset is a set", frozenset("abc"), set("cba")),
    ("a set's elements are normal too", {(1, 2), Level.HIGH}, {3, (1, 2)}),
    ("a dataclass is the mapping of its fields", Address("Lyon", 69001), {"zip": 69001, "city": "Lyon"}),
    ("an object is what kombu's __json__ makes of it", Money(5), {"cents": 5}),
    ("two surrogates side by side are one character to JSON", "\ud83d\ude00", "\U0001f600"),
]


@pytest.mark.parametrize(("one", "other"), [row[1:] for row in ONE_FORM], ids=[row[0] for row in ONE_FORM])
def test_one_form(one: object, other: object) -> None:
    assert form_of(one, AT) == form_of(other, AT)
    assert repr(plain(one, AT)) == repr(plain(other, AT))


ALL_DIFFERENT = [
    1, "1", True, "True", "true", 1.0, "1.0", b"1", Decimal(1), [1], ["1"], [[1]], {"1": 1}, {1}, {"1"},
    None, "None", "null", False, 0, "", b"", [], {}, set(), [None], [[]], [[], []], 0.0,
    ["a", "b"], ["a,b"], ["ab"], ["a", ["b"]], [["a"], "b"], {"a": "b"}, {"a": {"b": None}}, [{"a": "b"}], {"a", "b"},
    "s1:1", "i1;", "[]", datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc), date(2026, 1, 1),
    "2026-01-01T00:00:00", time(0), time(0, tzinfo=timezone.utc), timedelta(0), timedelta(1), Decimal("1.01"),
    Decimal("NaN"), Decimal("Infinity"), Decimal("-Infinity"), math.nan, math.inf, "nan", UNIQUE, str(UNIQUE),
    UNIQUE.hex, UNIQUE.bytes, UNIQUE.int, "\ud800", "\udc00", "?", {b"a": "b"}, {(1, 2): 3}, {"[1, 2]": 3},
]  # fmt: skip


def test_what_differs_has_different_forms() -> None:
    assert len({form_of(value, AT) for value in ALL_DIFFERENT}) == len(ALL_DIFFERENT)


def read(form: bytes) -> tuple[Any, bytes]:
    """A value read back from the beginning of some forms, and the rest."""
    kind, rest = form[:1], form[1:]
    if kind in b"NTF":
        return {b"N": None, b"T": True, b"F": False}[kind], rest
    if kind in b"ir":
        digits, _, rest = rest.partition(b";")
        return (int(digits, 16) if kind == b"i" else float(digits)), rest
    if kind == b"s":
        length, _, rest = rest.partition(b":")
        return rest[: int(length)].decode("utf-8", "surrogatepass"), rest[int(length) :]
    items = []
    while rest[:1] not in b"]}":
        item, rest = read(rest)
        items.append(item)
    return (items if kind == b"[" else dict(sorted(zip(items[::2], items[1::2], strict=True)))), rest[1:]


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(values, values)
def test_forms_one_after_the_other_read_back_so_that_joined_parts_never_collide(first: Any, second: Any) -> None:
    one, rest = read(form_of(first, AT) + form_of(second, AT))
    other, nothing = read(rest)
    assert (repr(one), repr(other), nothing) == (repr(plain(first, AT)), repr(plain(second, AT)), b"")


def test_the_decimal_context_does_not_count() -> None:
    value = Decimal("1.234567890123456789012345678901234567890E+90")
    usual = form_of(value, AT)
    with decimal.localcontext() as context:
        context.prec, context.capitals = 3, 0
        assert form_of(value, AT) == usual == b"e44:1.23456789012345678901234567890123456789e+90"


def test_a_lone_surrogate_has_a_form() -> None:
    assert form_of("a\ud800", AT) == b"s4:a\xed\xa0\x80"


def test_an_int_of_any_size_has_a_form() -> None:
    assert form_of(16**5000, AT) == b"i1" + b"0" * 5000 + b";"


class Secretive:
    """Shows its secret whenever it is asked for anything."""

    def __repr__(self) -> str:
        return "hunter2"

    __str__ = __repr__

    def __json__(self) -> str:
        raise RuntimeError("hunter2")


@dataclass
class Unfinished:
    name: str

    def __getattribute__(self, name: str) -> Any:
        raise ValueError("hunter2")


class Endless:
    def __json__(self) -> Endless:
        return self


REFUSED = [
    (object(), "task 't': argument 'a': a value of type object has no stable form"),
    ([0, object()], "argument 'a'[1]: a value of type object has"),
    ({"user": [object()]}, "argument 'a'['user'][0]: a value of type object has"),
    ({"hunter2!": object()}, "argument 'a'[...]: a value of type object has"),
    ({1234567: object()}, "argument 'a'[...]: a value of type object has"),
    ({object(): 1}, "argument 'a'[...]: a value of type object has"),
    ({object}, "argument 'a'[...]: a value of type type has"),
    (Address("Lyon", object()), "argument 'a'['zip']: a value of type object has"),  # type: ignore[arg-type]
    ([Secretive()], "argument 'a'[0]: a value of type"),
    (Unfinished.__new__(Unfinished), "Unfinished has no stable form"),
    (Endless(), "Endless has no stable form"),
    (lambda: 0, "a value of type function has"),
    (iter([1]), "a value of type list_iterator has"),
    (len, "a value of type builtin_function_or_method has"),
    (Address, "a value of type type has"),
    (1j, "a value of type complex has"),
    ({10**5000: 1}, "a value of type int has"),
    (datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), "a value of type datetime.datetime has"),
]


@pytest.mark.invariant("arguments-stay-secret")
@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message[-60:] for _, message in REFUSED])
def test_value_without_stable_form_is_refused_with_place_and_remedy(value: object, message: str) -> None:
    """The error never shows the value."""
    for ask in (form_of, plain):
        with pytest.raises(LockKeyError) as caught:
            ask(value, AT)
        told = str(caught.value)
        assert message in told
        assert told.endswith(
            "give key= the arguments that tell the task's calls apart, or a callable that returns a string"
        )
        assert "hunter2" not in told
        assert "1234567" not in told
        assert caught.value.__suppress_context__


def test_a_value_that_contains_itself_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["left"] = circle["right"] = [circle, circle]
    for ask in (form_of, plain):
        with pytest.raises(LockKeyError, match="'a' is nested deeper than 100 levels, or contains itself"):
            ask(circle, AT)


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: frozenset([v])], ids=["list", "dict", "set"]
)
def test_nesting_has_one_limit_for_every_container(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)
    assert b"i1;" in form_of(value, AT)
    plain(value, AT)
    for ask in (form_of, plain):
        with pytest.raises(LockKeyError, match="nested deeper"):
            ask(wrap(value), AT)


def test_plain_values_are_of_built_in_types_and_show_what_they_are() -> None:
    value = {"k": (Level.HIGH, Colour.RED, Size.LARGE, b"\xffa", {2, 1}), 5: Decimal("10.00"), "t": time(1, fold=1)}
    shown = {"5": Decimal(10), "k": [3, "red", "L", "\\xffa", [1, 2]], "t": time(1)}
    assert repr(plain(value, AT)) == repr(shown)
