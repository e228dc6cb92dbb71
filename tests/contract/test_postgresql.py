"""The tables and the connections of a store in PostgreSQL, and its errors with their cures."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner, Result

from celery_dlock import InvalidLockOptions
from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.engine.backend import Changes, Wanted
from celery_dlock.store.engine.pool import MOST_CONNECTIONS
from celery_dlock.store.factory import open_migrator
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import AcquireRequest, Requester
from celery_dlock.store.rules.data import Mark
from celery_dlock.store.sql.migrations import VERSION
from celery_dlock.store.sql.postgresql.backend import PostgreSQLBackend
from celery_dlock.store.sql.postgresql.connection import ConnectionPool
from tests.support.polling import eventually
from tests.support.postgresql_stores import administrator, own_schema, url_of
from tests.support.proxy import Proxy

pytestmark = pytest.mark.servers

MODULE = """
from celery import Celery


app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.dlock_url = {url!r}
"""


def pool_at(url: str, timeout: float = 5.0) -> ConnectionPool:
    return ConnectionPool(StoreLocation.of(url), timeout)


def ask(pool: ConnectionPool, statement: str = "SELECT 1", within: float | None = None) -> object:
    with pool.lent(within) as connection:
        return connection.execute(statement).fetchall()[0][0]


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def through(proxy: Proxy, url: str) -> str:
    return url.replace(f":{port_of(url)}/", f":{proxy.port}/")


# -- migrations


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(url: str, *words: str) -> Result:
        module = f"shop_{time.monotonic_ns()}"
        (tmp_path / f"{module}.py").write_text(MODULE.format(url=url))
        monkeypatch.syspath_prepend(tmp_path)
        return CliRunner().invoke(celery_command, ["-A", module, "dlock", "migrate", *words])

    return call


def test_migrate_makes_the_tables_once(postgresql: str, run: Run) -> None:
    with own_schema(postgresql) as schema:
        url = url_of(postgresql, schema, user="postgres")
        missing = run(url, "--check")
        assert missing.exit_code == 1
        assert "dlock migrate" in missing.stderr
        assert "0001_tables.sql" in run(url).stderr
        assert "already" in run(url).stderr
        assert run(url, "--check").exit_code == 0


def test_migrate_at_the_same_time_makes_the_tables_once(postgresql: str) -> None:
    with own_schema(postgresql) as schema:
        location = StoreLocation.of(url_of(postgresql, schema, user="postgres"))
        done: list[list[str]] = []
        threads = [
            threading.Thread(target=lambda: done.append(open_migrator([location], timeout=5).migrate()))
            for _ in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(done) == [[], [], [], ["0001_tables.sql"]]


def test_migrate_prints_statements_that_make_the_tables(postgresql: str, run: Run) -> None:
    with own_schema(postgresql) as schema:
        url = url_of(postgresql, schema, user="postgres")
        printed = run(url, "--sql").stdout
        subprocess.run(["psql", "-X", "-v", "ON_ERROR_STOP=1", postgresql], input=printed, text=True, check=True)
        assert run(url, "--check").exit_code == 0


@pytest.mark.parametrize(("version", "cure"), [(VERSION - 1, "dlock migrate"), (VERSION + 1, "install")])
def test_store_with_tables_of_another_version_is_refused_by_name(
    postgresql: str, schema: str, version: int, cure: str, postgresql_url: str
) -> None:
    with administrator(postgresql) as admin:
        admin.execute(f"UPDATE {schema}.dlock_meta SET v = {version} WHERE k = 'schema_version'")
    with closing(pool_at(postgresql_url)) as pool, pytest.raises(StoreRefused, match=cure) as raised:
        ask(pool)
    assert f"version {version}" in str(raised.value)


def test_store_without_tables_cannot_be_migrated() -> None:
    with pytest.raises(InvalidLockOptions, match="no tables"):
        open_migrator([StoreLocation.of("redis://h")], timeout=1)


# -- errors and their cures


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_store_without_its_tables_names_the_command(postgresql: str) -> None:
    with (
        own_schema(postgresql) as schema,
        closing(pool_at(url_of(postgresql, schema))) as pool,
        pytest.raises(StoreRefused, match="run `celery -A <app> dlock migrate`"),
    ):
        ask(pool)


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_user_without_a_right_is_told_which_rights_to_grant(postgresql: str, schema: str, postgresql_url: str) -> None:
    with administrator(postgresql) as admin:
        admin.execute(f"REVOKE UPDATE ON {schema}.dlock_name FROM dlock")
    with (
        closing(pool_at(postgresql_url)) as pool,
        pytest.raises(StoreRefused, match="grant SELECT, INSERT"),
    ):
        ask(pool, f"UPDATE {schema}.dlock_name SET token = 1")


@pytest.mark.invariant("store-errors-name-the-remedy")
@pytest.mark.parametrize(
    ("change", "cure"),
    [(("dlock@", "nobody@"), "correct dlock_url"), (("/postgres", "/nothing"), "correct the end of dlock_url")],
)
def test_wrong_user_or_database_is_refused(change: tuple[str, str], cure: str, postgresql_url: str) -> None:
    url = postgresql_url.replace(*change)
    with closing(pool_at(url)) as pool, pytest.raises(StoreRefused, match=cure):
        ask(pool)


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_read_only_server_is_not_ready_and_names_the_option_for_several_hosts(postgresql: str, schema: str) -> None:
    """As a replica is, until it is promoted."""
    url = url_of(postgresql, schema, options="-c default_transaction_read_only=on")
    with closing(pool_at(url)) as pool, pytest.raises(StoreNotReady, match="target_session_attrs=read-write"):
        ask(pool)


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_server_that_does_not_exist_is_unreachable() -> None:
    with closing(pool_at("postgresql://127.0.0.1:1/x")) as pool, pytest.raises(StoreUnavailable) as raised:
        ask(pool)
    assert type(raised.value) is StoreUnavailable


@pytest.mark.parametrize("query", ["sslmod=require", "sslmode=perhaps"])
def test_option_that_libpq_refuses_is_refused_when_the_store_is_opened(query: str) -> None:
    location = StoreLocation.of(f"postgresql://u:s3cret@127.0.0.1:1/x?{query}")
    with pytest.raises((InvalidLockOptions, StoreUnavailable)) as raised:
        open_migrator([location], timeout=1).check()
    assert "sslmod" in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "celery_dlock.store.sql.postgresql.migrate", None)
    with pytest.raises(InvalidLockOptions, match=r"pip install 'celery-dlock\[postgresql\]'"):
        open_migrator([StoreLocation.of("postgresql://h/x")], timeout=1)


# -- connections


def test_row_that_another_transaction_has_locked_is_an_error_within_the_timeout(
    postgresql: str, schema: str, postgresql_url: str
) -> None:
    statement = f"UPDATE {schema}.dlock_meta SET v = v WHERE k = 'token_floor' RETURNING v"
    with (
        administrator(postgresql) as admin,
        admin.transaction(),
        closing(pool_at(postgresql_url, 1.0)) as pool,
    ):
        admin.execute(statement)
        began = time.monotonic()
        with pytest.raises(StoreNotReady, match="another transaction has locked"):
            ask(pool, statement)
        assert time.monotonic() - began < 2


def test_idle_connection_that_the_server_closed_is_replaced(postgresql: str, postgresql_url: str) -> None:
    with closing(pool_at(postgresql_url)) as pool, administrator(postgresql) as admin:
        first = ask(pool, "SELECT pg_backend_pid()")
        assert ask(pool, "SELECT pg_backend_pid()") == first
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (first,))
        assert ask(pool, "SELECT pg_backend_pid()") != first


def test_reply_that_is_cut_is_lost_and_the_next_call_succeeds(postgresql_url: str) -> None:
    with Proxy(port_of(postgresql_url)) as proxy, closing(pool_at(through(proxy, postgresql_url))) as pool:
        ask(pool)
        proxy.set_mode("cut_reply", times=1)
        with pytest.raises(ReplyLost):
            ask(pool)
        assert ask(pool) == 1


def test_silent_server_is_given_up_after_the_timeout(postgresql_url: str) -> None:
    with Proxy(port_of(postgresql_url)) as proxy, closing(pool_at(through(proxy, postgresql_url))) as pool:
        ask(pool)
        proxy.set_mode("blackhole")
        began = time.monotonic()
        with pytest.raises(ReplyTimeout):
            ask(pool, within=0.3)
        assert 0.3 <= time.monotonic() - began < 1
        proxy.set_mode("pass")
        assert ask(pool) == 1


def test_statement_that_takes_too_long_ends_in_the_server(postgresql: str, postgresql_url: str) -> None:
    with closing(pool_at(postgresql_url, 0.5)) as pool, administrator(postgresql) as admin:
        with pytest.raises(ReplyTimeout):
            ask(pool, "SELECT pg_sleep(30)")
        running = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%sleep(30)'"
        eventually(lambda: admin.execute(running).fetchall() == [(0,)])


def test_threads_share_a_bounded_number_of_connections(postgresql_url: str) -> None:
    with closing(pool_at(postgresql_url)) as pool:
        seen: set[object] = set()

        def work() -> None:
            for _ in range(5):
                seen.add(ask(pool, "SELECT pg_backend_pid() FROM pg_sleep(0.01)"))

        threads = [threading.Thread(target=work) for _ in range(3 * MOST_CONNECTIONS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(seen) == MOST_CONNECTIONS


def test_forked_child_opens_its_own_connection(postgresql_url: str) -> None:
    with closing(pool_at(postgresql_url)) as pool:
        mine = ask(pool, "SELECT pg_backend_pid()")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, str(ask(pool, "SELECT pg_backend_pid()")).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        theirs = os.read(reader, 100).decode()
        assert theirs.isdecimal()
        assert theirs != str(mine)
        assert ask(pool, "SELECT pg_backend_pid()") == mine


@pytest.mark.parametrize("asked", ["off", "remote_write"])
def test_url_chooses_the_durability_of_the_session(postgresql: str, schema: str, asked: str) -> None:
    with closing(pool_at(url_of(postgresql, schema, synchronous_commit=asked))) as pool:
        assert ask(pool, "SHOW synchronous_commit") == asked


def test_idle_limit_of_a_session_is_set_so_that_idle_children_hold_no_connection(postgresql_url: str) -> None:
    with closing(pool_at(postgresql_url)) as pool:
        assert ask(pool, "SHOW idle_session_timeout") == "1min"


# -- transactions


@pytest.mark.parametrize("kind", ["tombstone", "done"])
@pytest.mark.parametrize("known", [True, False], ids=["used name", "new name"])
def test_plain_acquire_that_waits_for_a_mark_does_not_take_the_lock(
    postgresql: str, postgresql_url: str, kind: Any, *, known: bool
) -> None:
    """The acquire has read the marks, and then waits for the row: the transaction before it adds the mark."""
    name, request = LockName(f"n:{'1' * 32}", 7), AcquireRequest(Requester.of("t", "id", "n", 1))
    with closing(PostgreSQLBackend(StoreLocation.of(postgresql_url), 5, "dlock")) as backend:
        if known:
            with backend.open(name, Wanted()) as session:
                session.commit(Changes(marks={("run", ""): Mark("x", session.now + 60_000_000)}))
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(backend.acquire_plain(name, "o.1", 10_000, request)))
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with administrator(postgresql) as admin, backend.open(name, Wanted()) as session:
            thread.start()
            eventually(lambda: admin.execute(waiting).fetchall(), message="the acquire does not wait")
            key = "o.1" if kind == "tombstone" else ""
            session.commit(Changes(marks={(kind, key): Mark("x", session.now + 60_000_000)}))
        thread.join()
        assert answers == [None]


# -- behind a pooler


def test_pooler_that_refuses_session_options_is_used_without_them(pgbouncer: str, schema: str) -> None:
    with closing(pool_at(url_of(pgbouncer, schema))) as pool:
        with pool.lent() as connection:
            assert connection.execute("SELECT 1").fetchall() == [(1,)]
            assert connection.prepare_threshold is None
        assert pool.pooled


def test_durability_that_a_pooler_drops_is_refused(pgbouncer: str, schema: str) -> None:
    with (
        closing(pool_at(url_of(pgbouncer, schema, synchronous_commit="off"))) as pool,
        pytest.raises(StoreRefused, match="ALTER ROLE"),
    ):
        ask(pool)
