"""The tables and the connections of a store in MariaDB, and its errors with their cures."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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
from celery_dlock.store.model import Acquired, AcquireRequest, Requester
from celery_dlock.store.rules.data import Mark
from celery_dlock.store.sql.migrations import VERSION
from celery_dlock.store.sql.mysql.backend import MySQLBackend
from celery_dlock.store.sql.mysql.connection import ConnectionPool
from tests.support.mariadb import ADMINISTRATOR, MariaDB, running_mariadb
from tests.support.mysql_stores import administrator, migrated_database, own_database, url_of
from tests.support.polling import eventually
from tests.support.proxy import Proxy

pytestmark = pytest.mark.servers

MODULE = """
from celery import Celery


app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.dlock_url = {url!r}
"""
NAME = LockName(f"n:{'1' * 32}", 7)
OTHER = LockName(f"n:{'2' * 32}", 7)
REQUEST = AcquireRequest(Requester.of("t", "id", "n", 1))


@pytest.fixture(scope="module")
def server(mariadb: MariaDB) -> MariaDB:
    return mariadb


@pytest.fixture
def database(server: MariaDB) -> Iterator[str]:
    with migrated_database(server) as made:
        yield made


def pool_at(url: str, timeout: float = 5.0) -> ConnectionPool:
    return ConnectionPool(StoreLocation.of(url), timeout)


@pytest.fixture
def backend(server: MariaDB, database: str) -> Iterator[MySQLBackend]:
    with closing(MySQLBackend(StoreLocation.of(url_of(server, database)), 5, "dlock")) as made:
        yield made


def ask(pool: ConnectionPool, statement: str = "SELECT 1", within: float | None = None) -> Any:
    with pool.lent(within) as connection:
        rows = connection.ask(statement).rows
        return rows[0][0] if rows else None


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


def test_migrate_makes_the_tables_once(server: MariaDB, run: Run) -> None:
    with own_database(server) as database:
        url = url_of(server, database, user=ADMINISTRATOR)
        missing = run(url, "--check")
        assert missing.exit_code == 1
        assert "dlock migrate" in missing.stderr
        assert "0001_tables.sql" in run(url).stderr
        assert "already" in run(url).stderr
        assert run(url, "--check").exit_code == 0


def test_migrate_at_the_same_time_makes_the_tables_once(server: MariaDB) -> None:
    with own_database(server) as database:
        location = StoreLocation.of(url_of(server, database, user=ADMINISTRATOR))
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


def test_migrate_completes_a_migration_that_failed_in_the_middle(server: MariaDB, database: str) -> None:
    location = StoreLocation.of(url_of(server, database, user=ADMINISTRATOR))
    with administrator(server) as admin:
        admin.execute(f"DELETE FROM {database}.dlock_meta WHERE k = 'schema_version'")
        admin.execute(f"DROP TABLE {database}.dlock_call")
    assert open_migrator([location], timeout=5).migrate() == ["0001_tables.sql"]
    with closing(pool_at(url_of(server, database))) as pool:
        assert ask(pool, "SELECT COUNT(*) FROM dlock_call") == 0


def test_migrate_prints_statements_that_make_the_tables(server: MariaDB, run: Run) -> None:
    with own_database(server) as database:
        url = url_of(server, database, user=ADMINISTRATOR)
        printed = run(url, "--sql").stdout
        with closing(pool_at(url)) as pool, pool.bare() as connection:
            connection.ask(printed)
        assert run(url, "--check").exit_code == 0


@pytest.mark.parametrize(("version", "cure"), [(VERSION - 1, "dlock migrate"), (VERSION + 1, "install")])
def test_store_with_tables_of_another_version_is_refused_by_name(
    server: MariaDB, database: str, version: int, cure: str
) -> None:
    with administrator(server) as admin:
        admin.execute(f"UPDATE {database}.dlock_meta SET v = {version} WHERE k = 'schema_version'")
    with closing(pool_at(url_of(server, database))) as pool, pytest.raises(StoreRefused, match=cure) as raised:
        ask(pool)
    assert f"version {version}" in str(raised.value)


# -- errors and their cures


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_store_without_its_tables_names_the_command(server: MariaDB) -> None:
    with own_database(server) as database:
        url = url_of(server, database, user=ADMINISTRATOR)
        with closing(pool_at(url)) as pool, pytest.raises(StoreRefused, match="run `celery -A <app> dlock migrate`"):
            ask(pool)


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_user_without_a_right_is_told_which_rights_to_grant(server: MariaDB, database: str) -> None:
    with administrator(server) as admin:
        admin.execute(f"REVOKE ALL ON {database}.* FROM dlock@'127.0.0.1'")
        admin.execute(f"GRANT SELECT ON {database}.* TO dlock@'127.0.0.1'")
    with closing(pool_at(url_of(server, database))) as pool, pytest.raises(StoreRefused, match="grant SELECT, INSERT"):
        ask(pool, "UPDATE dlock_name SET token = 1")


@pytest.mark.invariant("store-errors-name-the-remedy")
@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (("dlock@", "nobody@"), "correct dlock_url"),
        (("dlock@", "dlock:wrong@"), "correct dlock_url"),
        (("/d", "/nothing"), "correct the end of dlock_url"),
    ],
)
def test_wrong_user_or_database_is_refused(server: MariaDB, database: str, change: tuple[str, str], cure: str) -> None:
    url = url_of(server, database)
    start, _, rest = url.partition(change[0]) if change[0] != "/d" else url.rpartition(change[0])
    with closing(pool_at(start + change[1] + rest)) as pool, pytest.raises(StoreRefused, match=cure):
        ask(pool)


@pytest.fixture
def read_only(server: MariaDB) -> Iterator[None]:
    with administrator(server) as admin:
        admin.execute("SET GLOBAL read_only = ON")
        yield
        admin.execute("SET GLOBAL read_only = OFF")


@pytest.mark.invariant("store-errors-name-the-remedy")
@pytest.mark.usefixtures("read_only")
def test_read_only_server_is_not_ready_and_names_the_cure(server: MariaDB, database: str) -> None:
    """As a replica is, until it is promoted."""
    with closing(pool_at(url_of(server, database))) as pool, pytest.raises(StoreNotReady, match="name the primary"):
        ask(pool)


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_server_that_becomes_read_only_refuses_and_writes_nothing(
    backend: MySQLBackend, request: pytest.FixtureRequest
) -> None:
    backend.now()
    request.getfixturevalue("read_only")
    with pytest.raises(StoreNotReady, match="name the primary"):
        backend.acquire_plain(NAME, "o.1", 10_000, REQUEST)


def test_url_with_several_servers_takes_the_one_that_can_be_written_to(
    server: MariaDB, database: str, request: pytest.FixtureRequest
) -> None:
    with running_mariadb() as second, migrated_database(second) as theirs:
        with administrator(second) as admin, administrator(server) as other:
            admin.execute(f"CREATE DATABASE {database}")
            for table in ("meta", "name", "waiter", "mark", "call"):
                admin.execute(f"CREATE TABLE {database}.dlock_{table} LIKE {theirs}.dlock_{table}")
            admin.execute(f"INSERT INTO {database}.dlock_meta SELECT * FROM {theirs}.dlock_meta")
            admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO dlock@'127.0.0.1'")
            other.execute("SELECT 1")
        request.getfixturevalue("read_only")
        url = url_of(server, database).replace(str(server.port), f"1,127.0.0.1:{server.port},127.0.0.1:{second.port}")
        with closing(pool_at(url)) as pool:
            assert ask(pool, "SELECT @@port") == second.port


@pytest.mark.invariant("store-errors-name-the-remedy")
def test_server_that_does_not_exist_is_unreachable() -> None:
    with closing(pool_at("mysql://127.0.0.1:1/x")) as pool, pytest.raises(StoreUnavailable) as raised:
        ask(pool)
    assert type(raised.value) is StoreUnavailable


@pytest.mark.parametrize("query", ["ssl_cert_mode=x", "ssl_verify_cert=perhaps"])
def test_option_that_is_unknown_is_refused_when_the_store_is_opened(query: str) -> None:
    location = StoreLocation.of(f"mysql://u:s3cret@127.0.0.1:1/x?{query}")
    with pytest.raises(InvalidLockOptions, match="ssl_") as raised:
        open_migrator([location], timeout=1)
    assert "s3cret" not in str(raised.value)


def test_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "celery_dlock.store.sql.mysql.migrate", None)
    with pytest.raises(InvalidLockOptions, match=r"pip install 'celery-dlock\[mysql\]'"):
        open_migrator([StoreLocation.of("mysql://h/x")], timeout=1)


# -- connections


def test_row_that_another_transaction_has_locked_is_an_error_within_the_timeout(server: MariaDB, database: str) -> None:
    with closing(pool_at(url_of(server, database), 2.0)) as pool, administrator(server) as admin:
        ask(pool)
        admin.execute("START TRANSACTION")
        admin.execute(f"SELECT * FROM {database}.dlock_meta FOR UPDATE")
        began = time.monotonic()
        with pytest.raises(StoreNotReady, match="another transaction has locked"):
            ask(pool, "UPDATE dlock_meta SET v = v + 1 WHERE k = 'token_floor'")
        assert time.monotonic() - began < 2


def test_idle_connection_that_the_server_closed_is_replaced(server: MariaDB, database: str) -> None:
    with closing(pool_at(url_of(server, database))) as pool, administrator(server) as admin:
        first = ask(pool, "SELECT CONNECTION_ID()")
        assert ask(pool, "SELECT CONNECTION_ID()") == first
        admin.execute(f"KILL {first}")
        eventually(
            lambda: not admin.execute(f"SELECT 1 FROM information_schema.processlist WHERE id = {first}"),
            message="the connection lives",
        )
        assert ask(pool, "SELECT CONNECTION_ID()") != first


def test_reply_that_is_cut_is_lost_and_the_next_call_succeeds(server: MariaDB, database: str) -> None:
    with Proxy(server.port) as proxy, closing(pool_at(url_of(server, database, port=proxy.port))) as pool:
        ask(pool)
        proxy.set_mode("cut_reply", times=1)
        with pytest.raises(ReplyLost):
            ask(pool)
        assert ask(pool) == 1


def test_silent_server_is_given_up_after_the_timeout(server: MariaDB, database: str) -> None:
    with Proxy(server.port) as proxy, closing(pool_at(url_of(server, database, port=proxy.port))) as pool:
        ask(pool)
        proxy.set_mode("blackhole")
        began = time.monotonic()
        with pytest.raises(ReplyTimeout):
            ask(pool, within=0.3)
        assert 0.3 <= time.monotonic() - began < 1
        proxy.set_mode("pass")
        assert ask(pool) == 1


def test_statement_that_takes_too_long_ends_in_the_server(server: MariaDB, database: str) -> None:
    with closing(pool_at(url_of(server, database), 0.5)) as pool, administrator(server) as admin:
        with pytest.raises(ReplyTimeout):
            ask(pool, "SELECT SLEEP(30), 'long'")
        running = "SELECT 1 FROM information_schema.processlist WHERE info LIKE '%SLEEP(30), _long%' AND id <> "
        eventually(lambda: not admin.execute(f"{running} CONNECTION_ID()"), within=5, message="it runs")


def test_threads_share_a_bounded_number_of_connections(server: MariaDB, database: str) -> None:
    with closing(pool_at(url_of(server, database))) as pool:
        seen: set[object] = set()

        def work() -> None:
            for _ in range(5):
                seen.add(ask(pool, "SELECT CONNECTION_ID(), SLEEP(0.01)"))

        threads = [threading.Thread(target=work) for _ in range(3 * MOST_CONNECTIONS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(seen) == MOST_CONNECTIONS


def test_forked_child_opens_its_own_connection(server: MariaDB, database: str) -> None:
    with closing(pool_at(url_of(server, database))) as pool:
        mine = ask(pool, "SELECT CONNECTION_ID()")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, str(ask(pool, "SELECT CONNECTION_ID()")).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        theirs = os.read(reader, 100).decode()
        assert theirs.isdecimal()
        assert theirs != str(mine)
        assert ask(pool, "SELECT CONNECTION_ID()") == mine


def test_settings_of_a_session_do_not_depend_on_the_server(server: MariaDB, database: str) -> None:
    """An hour that a time zone has twice, a text that is cut, a gap that is locked: each would break locks."""
    with administrator(server) as admin, closing(pool_at(url_of(server, database))) as pool:
        admin.execute("SET GLOBAL time_zone = '+05:30', GLOBAL sql_mode = ''")
        try:
            found = ask(pool, "SELECT CONCAT_WS(' ', @@time_zone, @@sql_mode, @@tx_isolation, @@wait_timeout)")
        finally:
            admin.execute("SET GLOBAL time_zone = SYSTEM, GLOBAL sql_mode = DEFAULT")
        assert found == "+00:00 STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION READ-COMMITTED 60"


# -- transactions


def test_names_that_a_collation_makes_equal_are_different_locks(backend: MySQLBackend) -> None:
    upper, lower = (LockName(f"{text}:{'1' * 32}", 7) for text in ("N", "n"))
    assert isinstance(backend.acquire_plain(upper, "o.1", 10_000, REQUEST), Acquired)
    assert isinstance(backend.acquire_plain(lower, "o.2", 10_000, REQUEST), Acquired)


@pytest.mark.parametrize("kind", ["tombstone", "done"])
@pytest.mark.parametrize("known", [True, False], ids=["used name", "new name"])
def test_plain_acquire_that_waits_for_a_mark_does_not_take_the_lock(
    server: MariaDB, backend: MySQLBackend, kind: Any, *, known: bool
) -> None:
    """The acquire has read the marks, and then waits for the row: the transaction before it adds the mark."""
    if known:
        with backend.open(NAME, Wanted()) as session:
            session.commit(Changes(marks={("run", ""): Mark("x", session.now + 60_000_000)}))
    answers: list[object] = []
    key = "o.1" if kind == "tombstone" else ""
    thread = threading.Thread(target=lambda: answers.append(backend.acquire_plain(NAME, "o.1", 10_000, REQUEST)))
    waiting = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    with administrator(server) as admin, backend.open(NAME, Wanted()) as session:
        thread.start()
        # The server refreshes this table at most every 100 ms, and not while it is read more often.
        eventually(lambda: admin.execute(waiting), every=0.2, message="the acquire does not wait")
        session.commit(Changes(marks={(kind, key): Mark("x", session.now + 60_000_000)}))
    thread.join()
    assert answers == [None]


def test_write_session_without_a_commit_leaves_no_row(server: MariaDB, database: str, backend: MySQLBackend) -> None:
    with backend.open(NAME, Wanted()):
        pass
    with administrator(server) as admin:
        assert admin.execute(f"SELECT * FROM {database}.dlock_name") == 0
