"""The backends in SQL and in memory under one engine: equal answers and equal data in random histories."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from celery_dlock.store.location import StoreLocation
from celery_dlock.store.sql.backend import SQLBackend
from celery_dlock.store.sql.mysql.backend import MySQLBackend
from celery_dlock.store.sql.postgresql.backend import PostgreSQLBackend
from tests.contract.histories import History, Step, steps
from tests.contract.sql_helpers import execute
from tests.contract.two_backends import MOST_HISTORIES, TwoBackends

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]


class SQLAndMemory(TwoBackends):
    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        return execute(self.other, statement)


@pytest.fixture
def backend(sql_url: str) -> Iterator[SQLBackend]:
    location = StoreLocation.of(sql_url)
    made: Any
    if sql_url.startswith("postgresql"):
        clock = TwoBackends.clock.replace("dlock_", f"{location.options['schema']}.dlock_")
        made = PostgreSQLBackend(location, 10, "dlock", clock)
    else:
        made = MySQLBackend(location, 10, "dlock", TwoBackends.clock)
    with closing(made):
        yield made


@pytest.mark.invariant("stores-agree")
@pytest.mark.parametrize("fast", [False, True], ids=["rules", "plain paths"])
@pytest.mark.parametrize("histories", [40, pytest.param(MOST_HISTORIES, marks=pytest.mark.slow)])
def test_sql_and_memory_agree_on_random_histories(backend: SQLBackend, histories: int, *, fast: bool) -> None:
    @settings(max_examples=histories, phases=[Phase.generate])
    @given(steps(80))
    def agree(history: list[Step]) -> None:
        both = History(stores := SQLAndMemory(backend, fast=fast))  # type: ignore[arg-type]  # it has what is used
        for step in history:
            both.take(step)
            stores.check()

    agree()
