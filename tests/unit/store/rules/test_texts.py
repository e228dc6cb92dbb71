"""The text forms of the data of a lock name."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlock.store.rules.data import Claim, Head, LockRecord, NewestCall, ReplacedCalls, SeatsRecord, Timed, Waiter
from celery_dlock.store.rules.texts import head_from_text, head_text, waiter_from_texts, waiter_text

pytestmark = pytest.mark.core

NUMBERS = st.integers(0, 2**53)


def every_field(kind: type) -> st.SearchStrategy[Any]:
    """Return a strategy of the dataclass that also draws the fields with defaults."""
    return st.builds(kind, **dict.fromkeys((each.name for each in fields(kind)), ...))


def timed(kind: type) -> st.SearchStrategy[Timed[Any]]:
    return st.builds(Timed, every_field(kind), st.none() | NUMBERS)


HEADS = st.builds(
    Head,
    locks=st.dictionaries(st.integers(0, 3), timed(LockRecord), max_size=2),
    seats=st.none() | timed(SeatsRecord),
    claim=st.none() | timed(Claim),
    newest_call=st.none() | timed(NewestCall),
    replaced=st.none() | timed(ReplacedCalls),
    sweeps=st.dictionaries(st.integers(0, 1), NUMBERS),
    **dict.fromkeys(("parked", "waiting", "delayed", "dead"), NUMBERS),
)


@given(HEADS)
def test_text_of_a_head_gives_the_same_head(head: Head) -> None:
    assert head_from_text(head_text(head)) == head


@given(every_field(Waiter))
def test_texts_of_a_waiter_give_the_same_waiter(waiter: Waiter) -> None:
    text = waiter_text(waiter)
    assert waiter_from_texts(waiter.waiting, waiter.delayed, waiter.entry, waiter.dead, text) == waiter


def test_empty_values_have_empty_texts() -> None:
    assert (head_text(Head()), waiter_text(Waiter(1, None, "entry", "dead"))) == ("", "")


def test_text_of_a_plain_lock_has_only_what_differs_from_the_defaults() -> None:
    lock = LockRecord("o.1", "", 7, 7, "t", "id", "n", "1", 60_000)
    found: dict[str, Any] = json.loads(head_text(Head({0: Timed(lock, 8)})))
    fields_of_lock, until = found["locks"]["0"]
    assert (found.keys(), until) == ({"locks"}, 8)
    assert fields_of_lock.keys() < {each.name for each in fields(LockRecord)} - {"count", "releasing", "due"}
