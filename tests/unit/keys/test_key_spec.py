"""Calls that have one lock name, calls that have different ones, and keys that are refused."""

from __future__ import annotations

import enum
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlock.errors import InvalidLockOptions, LockKeyError
from celery_dlock.keys import key_spec
from celery_dlock.keys.bound_arguments import ArgumentBinder
from celery_dlock.keys.key_spec import KeySpec, shared_name
from tests.unit.keys.naming import name_text, without_digest

pytestmark = pytest.mark.core


def spec(function: Callable[..., Any], key: Any = None, scope: Any = "task", task: str = "shop.pay") -> KeySpec:
    return KeySpec(task, inspect.signature(function), key, scope)


def pay(a: Any, b: Any = 2, *, c: Any = None) -> None: ...


def wide(a: Any, /, b: Any = 2, *rest: Any, c: Any = None, **more: Any) -> None: ...


def two(a: Any, b: Any) -> None: ...


def one(a: Any) -> None: ...


class TestSpellings:
    def test_every_spelling_of_one_call_has_one_name(self) -> None:
        whole = spec(pay)
        spellings = {
            name_text(whole, 1),
            name_text(whole, a=1),
            name_text(whole, 1, 2),
            name_text(whole, 1, b=2),
            name_text(whole, b=2, a=1),
            name_text(whole, 1, 2, c=None),
            name_text(whole, c=None, a=1),
        }
        assert len(spellings) == 1

    def test_an_argument_given_differently_is_another_call(self) -> None:
        whole = spec(pay)
        calls = [
            name_text(whole, 1),
            name_text(whole, 2),
            name_text(whole, 1, 1),
            name_text(whole, 1, c=2),
            name_text(whole, 1, 2, c=0),
        ]
        assert len(set(calls)) == len(calls)

    def test_spellings_under_every_kind_of_parameter(self) -> None:
        whole = spec(wide)
        assert name_text(whole, 1, b=2) == name_text(whole, 1) == name_text(whole, 1, 2, c=None)
        assert name_text(whole, 1, 2, x=1, y=2) == name_text(whole, 1, 2, y=2, x=1)
        calls = [
            name_text(whole, 1),
            name_text(whole, 1, 2, 3),
            name_text(whole, 1, 2, 3, 4),
            name_text(whole, 1, x=3),
            name_text(whole, 1, a=3),
        ]
        assert len(set(calls)) == len(calls)

    def test_an_omitted_default_may_be_named_in_the_key(self) -> None:
        chosen = spec(pay, ["b"])
        assert name_text(chosen, 1) == name_text(chosen, 9, b=2)
        assert name_text(spec(pay, "p:{b}"), 1) == name_text(spec(pay, "p:{b}"), 1, 2)

    def test_the_task_is_part_of_the_name(self) -> None:
        for key in (None, ["a"], "p:{a}", lambda a, b, c: "text"):
            names = {name_text(spec(pay, key, task="shop.pay"), 1), name_text(spec(pay, key, task="shop.refund"), 1)}
            assert len(names) == 2

    def test_a_positional_argument_has_no_spelling_by_name(self) -> None:
        def strict(a: Any, /) -> None: ...
        def loose(a: Any, /, **others: Any) -> None: ...

        for function in (strict, loose):
            with pytest.raises(LockKeyError, match="does not fit its signature"):
                name_text(spec(function), a=1)

    @pytest.mark.parametrize(
        ("args", "kwargs", "told"),
        [
            ((), {}, "missing a required argument: 'a'"),
            (("hunter2", 2, 3), {}, "too many positional arguments"),
            (("hunter2",), {"a": "hunter2"}, "multiple values for argument 'a'"),
            (("hunter2",), {"d": "hunter2"}, "unexpected keyword argument 'd'"),
        ],
    )
    def test_a_call_that_does_not_fit_is_an_error_that_shows_no_value(self, args: Any, kwargs: Any, told: str) -> None:
        with pytest.raises(LockKeyError, match=r"task 'shop\.pay': the call does not fit its signature") as caught:
            spec(pay).name_of(args, kwargs)
        assert told in str(caught.value)
        assert "hunter2" not in str(caught.value)

    @given(
        st.lists(st.tuples(st.sampled_from(list(inspect._ParameterKind)), st.booleans()), max_size=5),
        st.lists(st.integers(), max_size=6),
        st.dictionaries(st.sampled_from(["p0", "p1", "p2", "p3", "other"]), st.integers()),
    )
    def test_the_quick_way_binds_as_python_does(self, kinds: Any, args: Any, kwargs: Any) -> None:
        defaulted = sorted(kinds, key=lambda kind: (kind[0], kind[1]))
        parameters = []
        for i, (kind, default) in enumerate(defaulted):
            several = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            extra = {"default": i} if default and not several else {}
            parameters.append(inspect.Parameter(f"p{i}", kind, **extra))
        try:
            signature = inspect.Signature(parameters)
        except ValueError:  # two *args, or a default before none
            return
        binding = ArgumentBinder("t", signature)
        try:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound = bound if len(bound.arguments) == len(parameters) else None  # 3.13.0 binds too few: see `Binding`
        except TypeError:
            bound = None
        if bound is None:
            with pytest.raises(LockKeyError):
                binding.values(args, kwargs)
            return
        assert dict(zip(binding.names, binding.values(args, kwargs), strict=True)) == bound.arguments
        again = binding.bound(binding.values(args, kwargs))
        assert (again.args, again.kwargs) == (bound.args, bound.kwargs)


class TestDefaultKey:
    def test_types_that_people_mix_up_differ(self) -> None:
        values = [1, "1", True, "True", 1.0, None, "None", "", 0, False, [1], "[1]", {"a": 1}, "{'a': 1}", b"1"]
        assert len({name_text(spec(one), value) for value in values}) == len(values)

    @pytest.mark.invariant("names-agree")
    def test_joined_parts_never_collide(self) -> None:
        whole = spec(two)
        # The calls that celery-once and celery-singleton give one key each.
        calls: list[tuple[Any, Any]] = [
            (1, "2"), ("1_b-2", ""), ("1", 2), ("1", "2"), ("1_b-2", None), ("12", ""), ("", "12"),
            (["1"], "2"), ("1,2", ""),
        ]  # fmt: skip
        assert len({name_text(whole, *call) for call in calls}) == len(calls)

    @pytest.mark.invariant("arguments-stay-secret")
    def test_the_name_shows_the_task_and_no_argument(self) -> None:
        assert re.fullmatch(r"shop\.pay:[0-9a-f]{32}", name_text(spec(pay), "hunter2"))

    def test_moving_an_argument_in_the_signature_keeps_the_names(self) -> None:
        def turned(b: Any, a: Any) -> None: ...

        assert name_text(spec(two), a=1, b=2) == name_text(spec(turned), a=1, b=2)

    def test_a_value_without_a_stable_form_is_an_error_that_names_task_argument_and_path(self) -> None:
        with pytest.raises(
            LockKeyError, match=r"task 'shop.pay': argument 'b'\['to'\]\[1\]: a value of type object has"
        ):
            name_text(spec(pay), 1, {"to": [1, object()]})

    def test_an_argument_outside_the_key_needs_no_stable_form(self) -> None:
        for key in (["a"], "{a}", lambda a, b: "text"):
            assert name_text(spec(two, key), 1, object()) == name_text(spec(two, key), 1, object())

    def test_a_task_without_arguments_has_one_name(self) -> None:
        assert name_text(spec(lambda: None)) == name_text(spec(lambda: None))


class TestArgumentNames:
    def test_only_the_named_arguments_count(self) -> None:
        chosen = spec(pay, ["a", "c"])
        assert name_text(chosen, 1, 5, c=3) == name_text(chosen, 1, 6, c=3)
        assert name_text(chosen, 1, 5, c=3) != name_text(chosen, 1, 5, c=4)

    def test_values_count_by_name(self) -> None:
        assert name_text(spec(two, ["a", "b"]), 1, 2) != name_text(spec(two, ["a", "b"]), 2, 1)
        assert name_text(spec(two, ["a"]), 1, 0) != name_text(spec(two, ["b"]), 0, 1)

    def test_neither_order_nor_repetition_counts(self) -> None:
        assert name_text(spec(two, ["a", "b"]), 1, 2) == name_text(spec(two, ("b", "a", "b")), 1, 2)

    def test_collected_arguments_can_be_named(self) -> None:
        chosen = spec(wide, ["rest", "more"])
        assert name_text(chosen, 1, 2, 3, x=4) == name_text(chosen, 9, 9, 3, x=4)
        assert name_text(chosen, 1, 2, 3, x=4) != name_text(chosen, 1, 2, 3, x=5)


class Colour(str, enum.Enum):
    RED = "red"


class TestCallable:
    def test_it_is_called_as_the_task_is_with_defaults_applied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(key_spec, "SLOW", 60.0)  # a slow call is timed a second time
        calls: list[Any] = []

        def key(*args: Any, **kwargs: Any) -> str:
            calls.append((args, kwargs))
            return "text"

        name_text(spec(wide, key), 1, x=5)
        name_text(spec(pay, key), b=3, a=1)
        assert calls == [((1, 2), {"c": None, "x": 5}), ((1, 3), {"c": None})]

    def test_its_text_is_shown_and_counts(self) -> None:
        by_hand = spec(one, lambda a: f"user {a}")
        assert without_digest(name_text(by_hand, 1)) == "shop.pay:user%201"
        assert name_text(by_hand, 1) != name_text(by_hand, 2)

    def test_a_str_enum_is_its_text_in_every_python(self) -> None:
        assert name_text(spec(one, lambda a: Colour.RED), 1) == name_text(spec(one, lambda a: "red"), 1)

    @pytest.mark.parametrize(
        ("returned", "told"),
        [
            (None, "a value of type NoneType"),
            (5, "a value of type int"),
            (b"x", "a value of type bytes"),
            ("", "empty text"),
        ],
    )
    def test_only_a_non_empty_str_is_a_key(self, returned: Any, told: str) -> None:
        for scope in ("task", "shared"):
            with pytest.raises(
                LockKeyError, match=f"task 'shop.pay': the key callable returned {told}, not a non-empty"
            ):
                name_text(spec(one, lambda a: returned, scope), 1)

    def test_when_it_fails_the_error_shows_no_value(self) -> None:
        def key(a: Any) -> str:
            raise KeyError(a)

        told = r"^task 'shop\.pay': the key callable raised KeyError at .*test_key_spec\.py:\d+$"
        with pytest.raises(LockKeyError, match=told) as caught:
            name_text(spec(one, key), "hunter2")
        assert caught.value.__suppress_context__

    def test_one_that_does_not_take_the_tasks_arguments_is_refused_at_definition(self) -> None:
        expected = r"task 'shop\.pay': invalid key=.*: it does not take the task's arguments: .*; expected .* names 'a'"
        for key in (lambda: "x", lambda a, b: "x", lambda *, a: "x"):
            with pytest.raises(InvalidLockOptions, match=expected):
                spec(one, key)
        assert name_text(spec(one, lambda b: "x"), 1) == name_text(spec(one, lambda a: "x"), 1)


class TestShared:
    def test_a_lock_and_every_task_that_gives_the_same_text_have_one_name(self) -> None:
        names = {
            shared_name("account:42").text,
            name_text(spec(one, "account:{a}", "shared"), 42),
            name_text(spec(one, "account:{a}", "shared", task="other"), "42"),
            name_text(spec(two, "{a}:{b}", "shared"), "account", 42),
            name_text(spec(one, lambda a: f"account:{a}", "shared"), 42),
        }
        assert names == {shared_name("account:42").text}
        assert without_digest(shared_name("account:42").text) == "account:42"

    def test_argument_names_are_shared_by_name_and_value(self) -> None:
        mine, theirs = spec(pay, ["a", "b"], "shared"), spec(two, ["b", "a"], "shared", task="other")
        assert name_text(mine, 1, 5) == name_text(theirs, b=5, a=1)
        assert name_text(mine, 1, 5) != name_text(theirs, 5, 1)
        assert name_text(mine, 1, 5) != name_text(theirs, "1", 5)
        assert without_digest(name_text(mine, 1, 5)) == "a,b"

    def test_scopes_never_meet(self) -> None:
        names = {
            shared_name("shop.pay:x").text,
            name_text(spec(one, "x"), 1),
            name_text(spec(one, "shop.pay:x", "shared"), 1),
            name_text(spec(one, lambda a: "x"), 1),
            name_text(spec(one, ["a"]), "x"),
            name_text(spec(one, ["a"], "shared"), "x"),
        }
        assert len(names) == 5  # only the first and the third are one

    def test_empty_text_is_no_name(self) -> None:
        with pytest.raises(LockKeyError, match=r"task 'shop\.pay': its key is empty text"):
            name_text(spec(one, "{a}", "shared"), "")
        for wrong in ("", None, 5, b"x"):
            with pytest.raises(LockKeyError, match="the name of a shared lock is a non-empty str, not "):
                shared_name(wrong)  # type: ignore[arg-type]


async def coroutine_key(**_arguments: Any) -> str:
    return "x"


class TestRefusedAtDefinition:
    @pytest.mark.parametrize(
        ("key", "why"),
        [
            (
                "sms:{user}",
                "key='sms:{user}': field {user} names no argument; expected only the argument names 'a', 'b'",
            ),
            ("{}", "field {} is positional; write an argument's name"),
            ("{0}", "field {0} is positional"),
            ("{0.x}", "field {0.x} is positional"),
            ("{.x}", "field {.x} is positional"),
            ("{[x]}", "field {[x]} is positional"),
            ("{ a }", "field { a } names no argument"),
            ("{a", "expected '}' before end of string"),
            ("a}", "Single '}' encountered in format string"),
            ("{a!x}", "field {a} has an unknown conversion !x"),
            ("{a[}", ""),
            ("{a.}", "field {a.} is malformed"),
            ("{a[]}", "field {a[]} is malformed"),
            ("{a[x]y}", "field {a[x]y} is malformed"),
            ("{a:{b}}", "field {a} has a field in its format spec"),
            ("", "an empty template names nothing"),
            ("a", "a fixed text, although an argument has this name; write '{a}' or ['a']"),
            (["a", "user"], "key=['a', 'user']: 'user' names no argument; expected only the argument names 'a', 'b'"),
            ([1], "1 names no argument"),
            (["a.id"], "'a.id' names no argument"),
            ([], "it names no argument"),
            ((), "it names no argument"),
            (b"a", "bytes cannot be a key"),
            (5, "int cannot be a key; expected None, a template"),
            ({"a"}, "set cannot be a key"),
            ({"a": 1}, "dict cannot be a key"),
            (coroutine_key, "function cannot be a key"),
        ],
    )
    def test_a_wrong_key_is_refused_with_task_option_value_and_what_is_allowed(self, key: Any, why: str) -> None:
        for scope in ("task", "shared"):
            with pytest.raises(InvalidLockOptions) as caught:
                spec(two, key, scope)
            told = str(caught.value)
            assert told.startswith(f"task 'shop.pay': invalid key={key!r}: ")
            assert why in told
            assert "; expected " in told

    def test_self_is_no_argument(self) -> None:
        with pytest.raises(InvalidLockOptions, match=r"field \{self\} names no argument"):
            spec(two, "{self}")

    def test_a_task_without_arguments_has_none_to_name(self) -> None:
        with pytest.raises(InvalidLockOptions, match="names no argument; expected no argument names"):
            spec(lambda: None, "{a}")

    @pytest.mark.parametrize("scope", ["global", None, 5, ["task"]])
    def test_an_unknown_scope_is_refused(self, scope: Any) -> None:
        with pytest.raises(
            InvalidLockOptions, match=r"task 'shop\.pay': invalid scope=.*; expected 'task', or 'shared'"
        ):
            spec(two, ["a"], scope)

    def test_the_default_key_cannot_be_shared(self) -> None:
        with pytest.raises(InvalidLockOptions, match="scope='shared': without a key there is no name that another"):
            spec(two, None, "shared")


PROGRAM = """
import enum, inspect
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID
from celery_dlock.keys.key_spec import KeySpec, shared_name

class Colour(str, enum.Enum):
    RED = "red"

@dataclass
class User:
    id: int

def call(a, b=2, *rest, **more): ...

args = ({"x", "y", Colour.RED, (2, 3)}, {3: None, "k": 1.5, "é": b"\\xff"}, User(7), datetime(2026, 1, 1),
    datetime(2026, 1, 1, 5, tzinfo=timezone(timedelta(hours=-3))), date(2026, 1, 1), time(1, 2), timedelta(3),
    Decimal("1.50"), UUID(int=5), float("nan"), True)
keys = [(None, "task"), (["more"], "task"), ("{rest[1]:%d}:{b[k]:.2f}", "task"), ("{rest[0].id}/{a}", "shared"),
    (["a", "more"], "shared"), (lambda a, b, *rest, **more: "x y", "task")]
for key, scope in keys:
    spec = KeySpec("shop.tasks.send_sms", inspect.signature(call), key, scope)
    name = spec.name_of(args, {"q": frozenset("abc"), "p": 1})
    print(name, name.bucket)
print(shared_name("account:42"), shared_name("account:42").bucket)
"""

PINNED = """\
shop.tasks.send_sms:06e96d9b985bf2bffcba5878ee2cb432 27
shop.tasks.send_sms:e8b41a29b0c9ce6c8efe88afa876eb48 930
shop.tasks.send_sms:01:1.50:405e5abbb2a5c0d141479af91248cd62 257
7/%5B%5B2,%203%5D,%20%27x%27,%20%27y%27,%20%27red%27%5D:4825924212df4f0fdf19039105bf65be 288
a,more:fe2cc6b085d2e42d0298a0119bb3613a 1016
shop.tasks.send_sms:x%20y:3c3bb2c4fa494a96aa51fd29636e8f6a 240
account:42:8875b0947529f13ad1808015d1b1290c 545
"""


@pytest.mark.invariant("names-agree")
@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_names_are_the_same_in_every_process_hash_seed_and_python(seed: str) -> None:
    """Part of the wire format: a digest that changes here unlocks every lock held during an upgrade."""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root, "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-bb", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == PINNED


@pytest.mark.parametrize("rows", [20_000, 1])
def test_slow_naming_warns_once_per_task_and_names_key(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    """The limit is 10 ms. 20,000 rows take about 100 ms, one row takes microseconds."""
    named = spec(lambda table: None, task=f"shop.report{rows}")
    table = [{"id": number, "email": f"user{number}@example.com", "total": number / 7} for number in range(rows)]
    with caplog.at_level("WARNING", "celery_dlock"):
        first, second = name_text(named, table), name_text(named, table)
    assert first == second
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rows > 1)
    assert all(text.startswith(f"Task shop.report{rows}: computing the lock name took ") for text in told)
    assert all(text.endswith("; set key= to the arguments that identify a call") for text in told)
    assert "user1@" not in "".join(told)


@pytest.mark.parametrize("key", ["sms:{custmer}", ["custmer"]])
def test_misspelt_argument_of_a_key_is_answered_with_the_nearest_one(key: Any) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        KeySpec("shop.pay", inspect.signature(lambda customer, amount: None), key, "task")
    assert "names no argument (did you mean 'customer'?); expected only the argument names 'customer', 'amount'" in str(
        refused.value
    )
