"""The backend in PostgreSQL and the memory backend under one engine: equal answers and equal data in random histories.

Both have a clock that the test moves. That of PostgreSQL is a row.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from celery_dlock.store.engine.backend import Backend, Wanted
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.rules.data import Head
from tests.contract.histories import NAMES, History, Step, steps
from tests.contract.two_stores import START_US, same

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]

pytest.importorskip("psycopg", reason="installed in the main lane only")
from celery_dlock.store.sql.postgresql.backend import PostgreSQLBackend  # noqa: E402  # needs psycopg
from celery_dlock.store.sql.postgresql.statements import Statements  # noqa: E402  # also

TABLES = "dlock_name", "dlock_waiter", "dlock_mark", "dlock_call"


class TwoBackends:
    """The two stores, as :class:`~tests.contract.histories.History` uses them.

    Args:
        backend: The backend in PostgreSQL, with a fresh schema.
        fast: Whether its plain paths are used.
    """

    def __init__(self, backend: PostgreSQLBackend, *, fast: bool) -> None:
        self.now_us = START_US
        self.memory = MemoryBackend(MemoryClock(lambda: self.now_us))
        self.local = EngineStore(self.memory)
        self.other = EngineStore(backend)
        self.backend, self.schema = backend, backend.pool.schema
        backend.sql = Statements(self.schema, f"(SELECT v FROM {self.schema}.dlock_meta WHERE k = 'clock')")
        if not fast:
            for verb in ("acquire_plain", "release_plain", "renew_plain"):
                setattr(backend, verb, getattr(Backend, verb).__get__(backend))
        with backend.pool.lent() as connection:
            for table in TABLES:
                connection.execute(f"DELETE FROM {self.schema}.{table}")
            # Removed names have raised it to a time of an earlier history.
            connection.execute(f"UPDATE {self.schema}.dlock_meta SET v = 0 WHERE k = 'token_floor'")
        self.travel(1)

    def travel(self, microseconds: int) -> None:
        self.now_us += microseconds
        with self.backend.pool.lent() as connection:
            connection.execute(
                f"INSERT INTO {self.schema}.dlock_meta VALUES ('clock', %s::bigint)"
                " ON CONFLICT (k) DO UPDATE SET v = excluded.v",
                (self.now_us,),
            )

    def do(self, command: Callable[[Any], Any]) -> Any:
        seen, expected = command(self.other), command(self.local)
        same(seen, expected, "reply")
        return expected

    def check(self) -> None:
        for name in NAMES:
            data = self.memory.data(name)
            with self.backend.open(name, Wanted(write=False)) as session:
                assert alive(session.head, self.now_us) == alive(data.head, self.now_us)
                assert session.entries() == {
                    one: waiter.entry for one, waiter in data.waiters.items() if waiter.entry is not None
                }
                for identity, waiter in data.waiters.items():
                    assert session.waiter(identity) == waiter
                for (kind, key), mark in data.marks.items():
                    if mark.until > self.now_us:
                        same(getattr(session.mark(kind, key), "text", None), mark.text, f"{kind} {key}")
        counted = len([one for name in NAMES for one in self.memory.data(name).waiters])
        with self.backend.pool.lent() as connection:
            assert connection.execute(f"SELECT count(*) FROM {self.schema}.dlock_waiter").fetchall() == [(counted,)]


def alive(head: Head, now: int) -> dict[str, Any]:
    """Return what of a head exists, with its expiry to the millisecond."""

    def shown(timed: Any) -> Any:
        if timed is None or (timed.until is not None and timed.until <= now):
            return None
        return timed.record, timed.until and -(-timed.until // 1000)

    found = {name: shown(getattr(head, name)) for name in ("seats", "claim", "newest_call", "replaced")}
    found["locks"] = {seat: shown(lock) for seat, lock in head.locks.items() if shown(lock) is not None}
    return found | {name: getattr(head, name) for name in ("sweeps", "parked", "waiting", "delayed", "dead")}


@pytest.fixture
def backend(postgresql_url: str) -> Iterator[PostgreSQLBackend]:
    with closing(PostgreSQLBackend(StoreLocation.of(postgresql_url), 10, "dlock")) as made:
        yield made


@pytest.mark.invariant("stores-agree")
@pytest.mark.parametrize("fast", [False, True], ids=["rules", "plain paths"])
@pytest.mark.parametrize("histories", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_postgresql_and_memory_agree_on_random_histories(
    backend: PostgreSQLBackend, histories: int, *, fast: bool
) -> None:
    @settings(max_examples=histories, phases=[Phase.generate, Phase.shrink])
    @given(steps(80))
    def agree(history: list[Step]) -> None:
        both = History(stores := TwoBackends(backend, fast=fast))  # type: ignore[arg-type]  # it has what is used
        for step in history:
            both.take(step)
            stores.check()

    agree()
