"""The tables and the connections of a store in PostgreSQL, and its errors with their cures."""

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner, Result

from celery_dlock import InvalidLockOptions
from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_migrator, open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, Renewal
from celery_dlock.store.sql.migrations import VERSION
from tests.contract.helpers import NAME, TTL, request_of
from tests.support.polling import eventually
from tests.support.proxy import Proxy

pytestmark = pytest.mark.servers

pytest.importorskip("psycopg", reason="installed in the main lane only")
from celery_dlock.store.sql.postgresql.connection import MOST_CONNECTIONS, ConnectionPool  # noqa: E402  # needs psycopg
from tests.support.postgresql_stores import administrator, own_schema, url_of  # noqa: E402  # also

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


# -- several transactions at once


@pytest.mark.invariant("state-change-is-atomic")
def test_acquires_of_many_connections_exclude_one_another(postgresql_url: str) -> None:
    """Plain statements and transactions, for names that exist and for names that do not."""
    names = [LockName(f"n{number}:{number:032x}", number) for number in range(30)]
    stolen: list[str] = []
    tokens: dict[LockName, list[int]] = {name: [] for name in names}

    def work(number: int) -> None:
        chance = random.Random(number)
        with closing(open_store([StoreLocation.of(postgresql_url)], timeout=10, prefix="dlock")) as store:
            for step in range(60):
                name, acquisition = names[step // 2], f"o{number}.{step}"
                # A copy that may be one of a finished message is not plain: the rules decide.
                request = request_of(f"t{number}", redelivered=chance.random() < 0.5)
                got = store.acquire(name, acquisition, 60_000, request)
                if isinstance(got, Acquired):
                    tokens[name].append(got.token)
                    released = store.release(name, acquisition, ReleaseRequest(queue=chance.random() < 0.5))
                    stolen.extend([] if released.ours else [acquisition])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert stolen == []
    assert all(of_name == sorted(set(of_name)) for of_name in tokens.values())
    assert all(tokens.values())


# -- plain paths


def test_plain_paths_leave_to_the_rules_what_is_not_plain(postgresql_url: str) -> None:
    """A done mark, a tombstone, a holder, an expired lease, or an option. Then nothing is written."""
    with closing(open_store([StoreLocation.of(postgresql_url)], timeout=10, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        backend = store.backend

        def refuses(acquisition: str, request: AcquireRequest) -> bool:
            return backend.acquire_plain(NAME, acquisition, TTL, request) is None and store.inspect(NAME) == holder

        holder = None
        store.mark_done(NAME, Identity("finished").digest, "o", 0)
        assert refuses("o.1", request_of("finished"))
        store.release(NAME, "o.2", ReleaseRequest(outcome_unknown=True))
        assert refuses("o.2", request_of("other"))
        assert refuses("o.3", request_of("other", min_hold_ms=1))
        assert refuses("o.3", request_of("other", once=True))
        assert isinstance(backend.acquire_plain(NAME, "o.3", 300, request_of("other")), Acquired)
        assert backend.acquire_plain(NAME, "o.4", TTL, request_of("finished")) is None
        assert backend.release_plain(NAME, "o.4", ReleaseRequest()) is None
        assert backend.release_plain(NAME, "o.3", ReleaseRequest(queue=True)) is None
        assert list(backend.renew_plain([Renewal(NAME, "o.4", TTL), Renewal(NAME, "o.3", 300)], None)) == [None, True]
        eventually(lambda: store.inspect(NAME) is None)
        assert refuses("o.5", request_of("other"))
        assert backend.release_plain(NAME, "o.3", ReleaseRequest()) is None
        assert list(backend.renew_plain([Renewal(NAME, "o.3", TTL)], None)) == [None]
