"""The effect of a fork of the main process on the lease tables of its children."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_dlock.locking import other_tables
from celery_dlock.runtime import Runtime
from celery_dlock.worker import pool_children
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.pool_children import PoolChildren
from tests.unit.fakes import FakeClock


@pytest.fixture
def runtime() -> Runtime:
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.dlock_url = "redis://127.0.0.1:1"
    runtime = Runtime.of(app)
    runtime.clock = FakeClock()
    return runtime


@pytest.fixture
def children(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> PoolChildren:
    # This process stays no pool child for the tests behind this one: a child leaves other apps' leases to its worker.
    monkeypatch.setattr(other_tables, "_tables", {})
    return PoolChildren(DeliveryRegistry(runtime))


def test_child_counts_the_time_without_a_watchdog_from_its_fork(runtime: Runtime, children: PoolChildren) -> None:
    """Also where the watchdog never starts: its acquires notice that."""
    children._before()
    children._in_child()
    assert runtime.lease_table.scanned_at == runtime.clock.monotonic()


def test_fork_without_memory_for_records_gives_no_child_those_of_another(
    runtime: Runtime, children: PoolChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two children that write into the same records would free each other's locks."""

    def fail() -> None:
        raise OSError(12, "Cannot allocate memory")

    children._before()
    first = children._forking.table
    monkeypatch.setattr(pool_children, "SharedLeaseTable", fail)
    with pytest.raises(OSError, match="allocate"):  # Python prints what a fork's hook raises, and forks
        children._before()
    children._in_child()
    assert runtime.lease_table is not first
    assert first.pid == 0
