"""Facts of lists: as text, and in JSON."""

from dataclasses import dataclass

import pytest

from celery_dlock.reports import tables
from celery_dlock.reports.facts import Fact, Kind, Table

pytestmark = pytest.mark.core

TABLES = [table for table in vars(tables).values() if isinstance(table, Table)]


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Item:
    name: str
    since: float = 0.0
    states: tuple[str, ...] = ()
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("key", "kind", "item", "text"),
    [
        ("name", "text", Item("n"), "n"),
        ("inner.size", "number", Item("n", inner=Inner(0)), "0"),
        ("inner.size", "number", Item("n"), ""),
        ("since", "time", Item("n", 1767323045.678), "2026-01-02T03:04:05.678+00:00"),
        ("since", "time", Item("n"), ""),
        ("since", "span", Item("n", 90.4), "90"),
        ("states", "states", Item("n", states=("used", "claimed")), "used, claimed"),
        ("states", "states", Item("n"), "free"),
    ],
)
def test_fact_as_text_follows_its_kind(key: str, kind: Kind, item: Item, text: str) -> None:
    assert Fact(key, "Title", kind).text(item) == text


def test_row_has_the_fields_of_an_item_and_the_facts_that_are_no_fields() -> None:
    facts = (
        Fact("name", "Name", of=lambda item: item.name.upper()),
        Fact("inner.size", "Size"),
        Fact("began", "Began", "time", lambda item: item.since),
        Fact("length", "Length", "number", lambda item: len(item.name)),
    )
    (row,) = Table(facts[:2], details=facts[2:]).rows([Item("abc", 1767323045.678, inner=Inner(3))])
    at = "2026-01-02T03:04:05.678+00:00"
    assert row == {"name": "abc", "since": at, "states": [], "inner": {"size": 3}, "began": at, "length": 3}


@pytest.mark.parametrize("table", TABLES)
def test_keys_of_a_table_are_unique(table: Table) -> None:
    for facts in (table.columns, table.details):
        assert len({fact.key for fact in facts}) == len(facts)
        assert len({fact.title for fact in facts}) == len(facts)
