"""The lease tables for the stores of other apps, in a process that is pool child and main process at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock.locking import other_tables
from celery_dlock.locking.lease_table import LocalLeaseTable
from celery_dlock.locking.other_tables import NoOtherTable, OtherTables, other_table
from celery_dlock.locking.shared_lease_table import SharedLeaseTable
from celery_dlock.locking.watchdog import Watchdog
from celery_dlock.runtime import Runtime
from celery_dlock.worker.other_stores import OtherStores
from celery_dlock.worker.pool_children import PoolChild


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherTables]:
    monkeypatch.setattr(other_tables, "_tables", {})
    monkeypatch.setattr(Watchdog, "wake", lambda self: True)  # no threads
    made = OtherTables()
    made.adopt()
    yield made
    for table in made.tables:
        table.close()


def an_app(url: str = "redis://127.0.0.1:1", **conf: Any) -> Celery:
    app = Celery("other", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=url, **conf)
    return app


def table_of(app: Celery) -> object:
    return Runtime.of(app).lease_table


def test_apps_of_one_store_share_a_table_and_others_have_their_own(tables: OtherTables) -> None:
    """A body that makes an app at each run must not use up the tables."""
    first, second, other = (table_of(an_app(url)) for url in ("redis://h", "redis://h", "redis://h/1"))
    prefixed = table_of(an_app("redis://h", dlock_prefix="mine"))
    assert first is second is tables.tables[0]
    assert [other, prefixed] == list(tables.tables[1:3])


def test_process_that_a_pool_child_forks_gets_no_table_of_its_parent(
    tables: OtherTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that write into one table would free each other's locks."""
    monkeypatch.setattr(other_tables, "_tables", {os.getpid() + 1: tables})
    assert isinstance(table_of(an_app()), LocalLeaseTable)


class Provider(redis.CredentialProvider):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.usefixtures("tables")
def test_store_that_cannot_be_described_is_renewed_by_the_child_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = an_app(dlock_transport_options={"credential_provider": Provider()})
    assert isinstance(table_of(app), LocalLeaseTable)
    (line,) = caplog.messages
    assert line.startswith("this pool child renews the locks of app 'other' itself, and if it dies, they are held")


@pytest.mark.usefixtures("tables")
def test_memory_store_stays_in_its_process_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It ends with its process, and the main process has another one."""
    assert isinstance(table_of(an_app("memory://")), LocalLeaseTable)
    assert not caplog.messages


@pytest.mark.parametrize("size", [0, 1])
def test_description_that_does_not_fit_leaves_the_table_free(tables: OtherTables, size: int) -> None:
    room = 4096 - 24
    text = b"x" * (room + size)
    if size:
        with pytest.raises(NoOtherTable, match="too long"):
            other_table(lambda: text)
        assert not tables.tables[0].store
    else:
        assert other_table(lambda: text) is tables.tables[0]
        assert tables.tables[0].store == text


class Harness:
    """The main process's side, without its thread."""

    def __init__(self) -> None:
        self.stores = OtherStores(Runtime.of(an_app()), "node", lambda: True, None)
        self.child = PoolChild(SharedLeaseTable())

    def watched(self) -> int:
        self.stores._run_round()
        return len(self.stores._stores)


def test_table_that_a_child_has_used_is_watched_once(tables: OtherTables, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.stores.add(harness.child, tables)
    assert harness.watched() == 0
    table_of(an_app("redis://127.0.0.1:1/2"))
    assert harness.watched() == harness.watched() == 1
    monkeypatch.setattr(harness.child, "ended", lambda: True)
    table_of(an_app("redis://127.0.0.1:1/3"))
    assert harness.watched() == 2  # a child may take its first lock just before its death
    assert harness.stores._children == []


def test_store_that_cannot_be_opened_is_logged_and_the_others_are_watched(
    tables: OtherTables, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness()
    harness.stores.add(harness.child, tables)
    assert other_table(lambda: b"no description") is tables.tables[0]
    table_of(an_app())
    assert harness.watched() == harness.watched() == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line == (
        f"the leases of pool child {os.getpid()} in the store of another app are not renewed, and end with their ttl"
    )


def test_children_that_use_a_store_one_after_the_other_have_one_watchdog(tables: OtherTables) -> None:
    """Otherwise a worker with one task per child would have a thread for each child of the last 10 s."""
    harness = Harness()
    harness.stores.add(harness.child, tables)
    table_of(an_app())
    assert harness.watched() == 1
    (store,) = harness.stores._stores.values()
    store.watchdog._sources.clear()  # as after the child's death
    again = OtherTables()
    again.tables[0].describe_store(tables.tables[0].store)
    harness.stores.add(PoolChild(SharedLeaseTable()), again)
    assert harness.watched() == 1
    assert list(harness.stores._stores.values()) == [store]
    assert store.watchdog.has_sources
