"""The name that a worker computes is the one that the publisher computed, whichever serialiser stood between."""

from __future__ import annotations

import enum
import inspect
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads

from celery_dlock.errors import LockKeyError
from celery_dlock.keys.key_spec import KeySpec

Values = st.SearchStrategy[Any]


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Colour(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.Enum):
    SMALL = ("S", 1)
    LARGE = ("L", 2)


class Tag(str):
    __slots__ = ()


class Cents(int):
    pass


@dataclass(frozen=True)
class Address:
    city: Any
    zip: Any


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __json__(self) -> dict[str, Any]:
        return {"cents": self.cents, "at": (1, 2)}


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the untyped one is what users have

whole_minutes: Values = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
# No microseconds: datetime.fromisoformat loses an offset of nothing else, and no zone has one.
whole_seconds: Values = st.integers(-23 * 3600, 23 * 3600).map(lambda seconds: timezone(timedelta(seconds=seconds)))
# Further out an instant may have no date in UTC.
years: dict[str, Any] = {"min_value": datetime(2, 1, 1), "max_value": datetime(9998, 1, 1)}  # noqa: DTZ001 - bounds of naive ones too
zones: Values = st.timezones()
moments = st.datetimes(**years, timezones=st.none() | whole_seconds) | st.datetimes(**years, timezones=zones)
minute_moments = st.datetimes(**years, timezones=st.none() | whole_minutes)

texts = st.text()
with_surrogates = st.text(st.characters())
numbers = st.integers() | st.floats()
enums = st.sampled_from([*Level, *Colour])
subclasses = texts.map(Tag) | st.integers().map(Cents) | enums
constants = st.none() | st.booleans()
plain = constants | numbers | with_surrogates
kombu_types = moments | st.dates() | st.times(timezones=st.none() | whole_minutes) | st.decimals() | st.uuids()
view: Callable[[bytes], Any] = memoryview
money = st.builds(Money, st.integers())
json_values = plain | subclasses | kombu_types | st.binary() | money
python_values = json_values | st.timedeltas() | st.sampled_from(Size) | st.binary().map(bytearray)
yaml_values = constants | numbers | texts | st.binary() | st.dates() | minute_moments
msgpack_integers = st.integers(-(2**63), 2**64 - 1)
msgpack_bytes: Values = st.binary() | st.binary().map(bytearray) | st.binary().map(view)
msgpack_values = constants | msgpack_integers | st.floats() | texts | texts.map(Tag) | enums | msgpack_bytes

json_keys = plain | subclasses
python_keys = (
    json_keys | st.binary() | st.dates() | st.uuids() | st.tuples(st.integers(), texts) | st.sampled_from(Size)
)


def nested(leaves: Values, keys: Values, *more: Callable[[Values], Values]) -> Values:
    def inside(items: Values) -> Values:
        lists = st.lists(items, max_size=4)
        return st.one_of(
            lists, lists.map(tuple), st.dictionaries(keys, items, max_size=4), *(build(items) for build in more)
        )

    return st.recursive(leaves, inside, max_leaves=12)


def points(items: Values) -> Values:
    return st.builds(Point, items, items)


def addresses(items: Values) -> Values:
    return st.builds(Address, items, items)


def sets(_items: Values) -> Values:
    elements = plain | st.tuples(st.integers(), texts) | subclasses | st.dates() | st.binary()
    return st.sets(elements, max_size=4) | st.frozensets(elements, max_size=4)


CARRIED: dict[str, Values] = {
    "json": nested(json_values, json_keys, points),
    "pickle": nested(python_values, python_keys, points, addresses, sets),
    # PyYAML reads an offset of minutes only, and knows no subclasses.
    "yaml": nested(yaml_values, constants | numbers | texts, lambda _items: st.sets(st.integers() | texts, max_size=4)),
    # Its reader takes keys of text and bytes only, its writer 64 bits.
    "msgpack": nested(msgpack_values, texts | st.binary() | st.sampled_from(Colour), points),
}


def call(a: Any, b: Any = None, *rest: Any, **more: Any) -> None: ...


KEYS: list[tuple[Any, Any]] = [
    (None, "task"),
    (["a", "more"], "task"),
    ("{a}:{b}", "task"),
    ("{a}/{rest}/{more}", "shared"),
    ("{a!s:.50}", "task"),
    (["a", "rest"], "shared"),
]
SPECS = [KeySpec("shop.pay", inspect.signature(call), key, scope) for key, scope in KEYS]


def carried(serializer: str, message: Any) -> Any:
    """The arguments that a worker reads are those that a publisher wrote."""
    content_type, encoding, payload = dumps(message, serializer=serializer)
    return loads(payload, content_type, encoding, accept={content_type})


@pytest.mark.invariant("names-agree")
@pytest.mark.parametrize("serializer", sorted(CARRIED))
@given(data=st.data())
def test_publisher_and_worker_give_a_call_one_name(serializer: str, data: st.DataObject) -> None:
    values = CARRIED[serializer]
    args = tuple(data.draw(st.lists(values, min_size=1, max_size=4), label="args"))
    kwargs = data.draw(st.dictionaries(st.sampled_from(["x", "y"]), values), label="kwargs")
    try:
        read_args, read_kwargs = carried(serializer, (args, kwargs))
    except EncodeError:
        assume(False)  # the serialiser refuses some text
    for spec in SPECS:
        assert spec.name_of(args, kwargs) == spec.name_of(read_args, read_kwargs)


#: What the peers leak or crash on, and what each serialiser makes another value of.
KNOWN = [
    ("json", (1, (2, 3))),
    ("json", {2: "a", 2.5: "b", None: "c", True: "d"}),
    ("json", {1: "a", "1": "b"}),
    ("json", {"1": "a", 1: "b"}),
    ("json", {Level.HIGH: Level.LOW, Colour.RED: Colour.BLUE}),
    ("json", Point(1, [Point(2, 3)])),
    ("json", float("nan")),
    ("json", {float("inf"): -0.0}),
    ("json", b"\xff\x00"),
    ("json", b"text"),
    ("json", Decimal("1.10")),
    ("json", UUID(int=1)),
    ("json", Money(5)),
    ("json", "\ud83d\ude00 \ud800"),
    ("yaml", {(1): ("a", "b")}),
    ("yaml", {1, 2, 3}),
    ("msgpack", (1, (2, 3))),
    ("msgpack", bytearray(b"ab")),
    ("pickle", {(1, 2): {Size.LARGE: Address("x", (1, 2))}}),
]


@pytest.mark.parametrize(
    ("serializer", "value"), KNOWN, ids=[f"{serializer}-{value!a:.30}" for serializer, value in KNOWN]
)
def test_a_value_that_a_serializer_changes_keeps_its_name(serializer: str, value: Any) -> None:
    (read,), _ = carried(serializer, ((value,), {}))
    for spec in SPECS:
        assert spec.name_of((value,), {}) == spec.name_of((read,), {})


def test_an_object_that_only_pickle_carries_is_refused_on_both_sides() -> None:
    (read,), _ = carried("pickle", ((object(),), {}))
    for value in (object(), read):
        with pytest.raises(LockKeyError, match="argument 'a': a value of type object has no stable form"):
            SPECS[0].name_of((value,), {})
