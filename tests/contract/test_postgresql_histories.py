"""The backends in PostgreSQL and in memory under one engine: equal answers and equal data in random histories."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from celery_dlock.store.location import StoreLocation
from celery_dlock.store.sql.postgresql.backend import PostgreSQLBackend
from tests.contract.histories import History, Step, steps
from tests.contract.two_backends import MOST_HISTORIES, TwoBackends

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]


class PostgreSQLAndMemory(TwoBackends):
    def __init__(self, backend: PostgreSQLBackend, *, fast: bool) -> None:
        self._pool = backend.pool
        super().__init__(backend, fast=fast)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with self._pool.lent() as connection:
            cursor = connection.execute(statement.replace("dlock_", f"{self._pool.schema}.dlock_"))
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def backend(postgresql_url: str) -> Iterator[PostgreSQLBackend]:
    location = StoreLocation.of(postgresql_url)
    clock = TwoBackends.clock.replace("dlock_", f"{location.options['schema']}.dlock_")
    with closing(PostgreSQLBackend(location, 10, "dlock", clock)) as made:
        yield made


@pytest.mark.invariant("stores-agree")
@pytest.mark.parametrize("fast", [False, True], ids=["rules", "plain paths"])
@pytest.mark.parametrize("histories", [40, pytest.param(MOST_HISTORIES, marks=pytest.mark.slow)])
def test_postgresql_and_memory_agree_on_random_histories(
    backend: PostgreSQLBackend, histories: int, *, fast: bool
) -> None:
    @settings(max_examples=histories, phases=[Phase.generate])
    @given(steps(80))
    def agree(history: list[Step]) -> None:
        both = History(stores := PostgreSQLAndMemory(backend, fast=fast))  # type: ignore[arg-type]  # it has what is used
        for step in history:
            both.take(step)
            stores.check()

    agree()
