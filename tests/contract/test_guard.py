"""``lease.guard(connection)``: no other call takes the lock before the guarded transaction has ended."""

import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from celery_dlock.errors import GuardRefused, StoreBusy
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Identity, Parked, QueueRequest, Renewal
from tests.contract.helpers import NAME, TTL, request_of
from tests.contract.sql_helpers import a_store, connected_user, execute, server_url
from tests.support.mariadb import running_mariadb
from tests.support.polling import eventually
from tests.support.processes import ROOT

pytestmark = [pytest.mark.servers, pytest.mark.invariant("guarded-writes-are-never-late")]


@pytest.fixture
def store(sql_url: str) -> Iterator[EngineStore]:
    with closing(a_store(sql_url)) as made:
        yield made


@pytest.fixture
def user(sql_url: str) -> Iterator[Any]:
    """A connection of the user, which may do everything."""
    with connected_user(server_url(sql_url)) as connection:
        yield connection


def take(store: EngineStore, acquisition: str, ttl_ms: int = TTL) -> Acquired:
    answer = store.acquire(NAME, acquisition, ttl_ms, request_of())
    assert isinstance(answer, Acquired), answer
    return answer


def expire(store: EngineStore) -> None:
    """Let the lease of ``NAME`` end now."""
    pattern = ",[0-9]+[]]"
    execute(store, "UPDATE dlock_name SET rest = REGEXP_REPLACE(rest, %s, ',1]')", pattern)


def refused(store: EngineStore) -> str:
    """Return the kind of holder that refuses the lock."""
    answer = store.acquire(NAME, f"r.{uuid.uuid4().hex}", TTL, request_of())
    assert isinstance(answer, Held), answer
    return answer.holder.kind


def free_soon(store: EngineStore) -> None:
    """Take the lock as ``b.1``. It is free a moment after the transaction has ended."""
    eventually(lambda: isinstance(store.acquire(NAME, "b.1", TTL, request_of()), Acquired))


def test_expired_lease_is_not_taken_over_before_the_guarded_transaction_ends(store: EngineStore, user: Any) -> None:
    take(store, "a.1")
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        expire(store)
        assert refused(store) == "guard"
        assert store.renew([Renewal(NAME, "a.1", TTL)]) == [False]
    free_soon(store)


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_guard_after_the_lease_was_taken_over_says_so(store: EngineStore, user: Any, level: str) -> None:
    take(store, "a.1")
    with user.transaction():
        user.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert store.guard(NAME, "a.1", user)
    expire(store)
    free_soon(store)
    with user.transaction():
        user.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert not store.guard(NAME, "a.1", user)
        assert store.guard(NAME, "b.1", user)


def test_renewals_go_on_during_the_transaction_and_a_release_frees_the_lock_after_it(
    store: EngineStore, user: Any
) -> None:
    take(store, "a.1")
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        assert store.renew([Renewal(NAME, "a.1", TTL)]) == [True]
        assert store.release(NAME, "a.1", ReleaseRequest()).ours
        assert refused(store) == "guard"
    free_soon(store)
    # The guard has ended, so the name is plain again.
    assert store.backend.release_plain(NAME, "b.1", ReleaseRequest()) is not None


def test_waiter_is_granted_when_the_guarded_transaction_has_ended(store: EngineStore, user: Any) -> None:
    store.acquire(NAME, "a.1", TTL, queued("a"))
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        assert isinstance(store.acquire(NAME, "b.1", TTL, queued("b", "entry")), Parked)
        assert store.release(NAME, "a.1", ReleaseRequest(queue=True)).granted is None
        assert store.sweep(NAME, "s.1", TTL, 5).granted is None
        assert store.free(NAME, "guarded@0", force=True)[1] is None
    granted = eventually(lambda: store.sweep(NAME, uuid.uuid4().hex, TTL, 5).granted)
    assert granted is not None
    assert granted.entry == "entry"


def test_sweep_finds_the_lock_of_a_guarded_transaction_again(store: EngineStore, user: Any) -> None:
    """No call and no release come after the transaction: the index of due queues names the lock."""
    store.acquire(NAME, "a.1", TTL, queued("a"))
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        store.acquire(NAME, "b.1", TTL, queued("b", "entry"))
        store.release(NAME, "a.1", ReleaseRequest(queue=True))
    assert eventually(lambda: store.list_due_queues([NAME.bucket], 10)) == [NAME]


def test_retry_that_a_lock_is_reserved_for_waits_for_the_guarded_transaction(
    store: EngineStore, user: Any, sql_url: str
) -> None:
    retry = Identity("a", 1)
    store.acquire(NAME, "a.1", TTL, request_of("a"))
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        store.release(NAME, "a.1", ReleaseRequest(reserved_for=retry.digest, reserved_ms=TTL))
        with closing(a_store(sql_url, timeout=0.3)) as impatient, pytest.raises(StoreBusy, match="guards"):
            impatient.acquire(NAME, "a.2", TTL, request_of("a")._replace(identity=retry))
    assert isinstance(store.acquire(NAME, "a.2", TTL, request_of("a")._replace(identity=retry)), Acquired)


def queued(task_id: str, entry: str = "") -> AcquireRequest:
    return request_of(task_id)._replace(queue=QueueRequest(entry))


def test_rolled_back_savepoint_ends_its_guard_and_an_outer_guard_stays(store: EngineStore, user: Any) -> None:
    take(store, "a.1")
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        with user.transaction():
            user.execute("SELECT 1")
            raise psycopg.Rollback
        expire(store)
        assert refused(store) == "guard"


def test_lock_is_read_as_free_after_its_guarded_transaction(store: EngineStore, user: Any) -> None:
    """Reading ends the guard in its own copy only: it may not write."""
    take(store, "a.1")
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
    store.release(NAME, "a.1", ReleaseRequest())
    assert store.inspect(NAME) is None
    assert store.describe(NAME).holder is None


def test_two_transactions_of_one_lease_are_both_waited_for(store: EngineStore, user: Any, sql_url: str) -> None:
    take(store, "a.1")
    with connected_user(server_url(sql_url)) as second, second.transaction():
        with user.transaction():
            assert store.guard(NAME, "a.1", user)
            assert store.guard(NAME, "a.1", user)
            second.execute("SELECT 1")
            assert store.guard(NAME, "a.1", second)
        store.release(NAME, "a.1", ReleaseRequest())
        assert refused(store) == "guard"
    free_soon(store)


def test_guard_of_one_seat_keeps_that_seat(store: EngineStore, user: Any) -> None:
    seated = NAME._replace(seats=2)
    for owner in ("a.1", "b.1"):
        assert isinstance(store.acquire(seated, owner, TTL, request_of()), Acquired)
    with user.transaction():
        assert store.guard(seated, "a.1", user)
        store.release(seated, "a.1", ReleaseRequest())
        store.release(seated, "b.1", ReleaseRequest())
        taken = store.acquire(seated, "c.1", TTL, request_of())
        assert isinstance(taken, Acquired)
        assert taken.seat == 1
        assert isinstance(store.acquire(seated, "d.1", TTL, request_of()), Held)
    eventually(lambda: isinstance(store.acquire(seated, "d.1", TTL, request_of()), Acquired))


def test_guard_is_refused_outside_of_a_transaction(store: EngineStore, user: Any) -> None:
    take(store, "a.1")
    with pytest.raises(GuardRefused, match="no transaction is open"):
        store.guard(NAME, "a.1", user)
    with pytest.raises(GuardRefused, match="no connection that can be guarded"):
        store.guard(NAME, "a.1", object())


def test_connection_whose_rows_are_mappings_is_guarded(postgresql_url: str) -> None:
    url = server_url(postgresql_url)
    with closing(a_store(postgresql_url)) as store, psycopg.connect(url, row_factory=dict_row) as user:
        take(store, "a.1")
        assert store.guard(NAME, "a.1", user)


def test_guard_is_refused_if_the_transaction_reads_an_older_state(store: EngineStore, user: Any) -> None:
    """So what the body has read may be older than the last writes of the holder before it."""
    user.execute("CREATE TABLE IF NOT EXISTS users_table (id int)")
    take(store, "a.1")
    with user.transaction():
        user.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        user.execute("SELECT * FROM users_table")
        with pytest.raises(GuardRefused, match="before any other statement"):
            store.guard(NAME, "a.1", user)


def test_guard_is_refused_in_another_database(postgresql: str, postgresql_url: str, mariadb_url: str) -> None:
    with connected_user(server_url(postgresql_url)) as user:
        user.execute("CREATE DATABASE elsewhere")
    with closing(a_store(postgresql_url)) as store:
        take(store, "a.1")
        elsewhere = postgresql.rpartition("/")[0] + "/elsewhere"
        with psycopg.connect(elsewhere) as connection, pytest.raises(GuardRefused, match="not in the database"):
            store.guard(NAME, "a.1", connection)
    with closing(a_store(mariadb_url)) as store, running_mariadb() as other:
        take(store, "a.1")
        with connected_user(f"{other.url}/") as user, user.transaction():
            with pytest.raises(GuardRefused, match="not in the database"):
                store.guard(NAME, "a.1", user)
            copy_tables(store, user, store_id=1)
            with pytest.raises(GuardRefused, match="not in the database"):
                store.guard(NAME, "a.1", user)


def copy_tables(store: EngineStore, user: Any, store_id: int) -> None:
    """Make the table of another MariaDB that tells it from the store's."""
    ((database,),) = execute(store, "SELECT DATABASE()")
    user.execute(f"CREATE DATABASE IF NOT EXISTS {database}")
    user.execute(f"CREATE TABLE {database}.dlock_meta (k varbinary(40) PRIMARY KEY, v bigint NOT NULL)")
    user.execute(f"INSERT INTO {database}.dlock_meta VALUES ('store_id', {store_id})")


def test_guard_is_refused_on_a_replica_and_in_a_read_only_transaction(postgresql_url: str, mariadb_url: str) -> None:
    with closing(a_store(postgresql_url)) as store, connected_user(server_url(postgresql_url)) as user:
        take(store, "a.1")
        with user.transaction():
            user.execute("SET TRANSACTION READ ONLY")
            with pytest.raises(GuardRefused, match="read-only"):
                store.guard(NAME, "a.1", user)
    with closing(a_store(mariadb_url)) as store, running_mariadb() as replica:
        take(store, "a.1")
        ((store_id,),) = execute(store, "SELECT v FROM dlock_meta WHERE k = 'store_id'")
        with connected_user(f"{replica.url}/") as user:
            copy_tables(store, user, store_id)
            with user.transaction(), pytest.raises(GuardRefused, match="on a replica"):
                store.guard(NAME, "a.1", user)


class Autocommitting:
    """Looks like an open transaction, as a connection of SQLAlchemy with the isolation level AUTOCOMMIT does."""

    in_atomic_block = True

    def __init__(self, connection: Any) -> None:
        self.cursor = connection.cursor


def test_guard_notices_that_each_statement_is_a_transaction(store: EngineStore, user: Any) -> None:
    take(store, "a.1")
    with pytest.raises(GuardRefused, match="no transaction is open"):
        store.guard(NAME, "a.1", Autocommitting(user))


DJANGO = """
import sys
from urllib.parse import urlsplit
import django
import pymysql
pymysql.version_info = (2, 2, 7, "final", 0)
pymysql.install_as_MySQLdb()
from django.conf import settings
from django.db import connection, transaction
from tests.contract.test_guard import NAME, GuardRefused, ReleaseRequest, a_store, free_soon, refused, take

place = urlsplit(sys.argv[1])
database = {"ENGINE": f"django.db.backends.{place.scheme}", "NAME": place.path[1:], "USER": place.username}
settings.configure(DATABASES={"default": {**database, "HOST": place.hostname, "PORT": place.port}})
django.setup()
store = a_store(sys.argv[2], timeout=0.3)
take(store, "a.1")
try:
    store.guard(NAME, "a.1", connection)
except GuardRefused:
    print("refused")
with transaction.atomic():
    print(store.guard(NAME, "a.1", connection))
    store.release(NAME, "a.1", ReleaseRequest())
    print(refused(store))
free_soon(store)
print("taken")
"""


def test_transaction_of_django_is_guarded(sql_url: str) -> None:
    run = [sys.executable, "-c", DJANGO, server_url(sql_url), sql_url]
    output = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=180).stdout
    assert output.split() == ["refused", "True", "guard", "taken"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_no_write_of_a_paused_body_is_late(sql_url: str, guarded: bool) -> None:
    """Bodies write in a transaction and are stopped for longer than their ttl. Without the guard, some write late."""
    with connected_user(server_url(sql_url)) as connection:
        connection.execute("DROP TABLE IF EXISTS guard_writes")
        connection.execute("CREATE TABLE guard_writes (name varchar(200), token bigint)")
    command = [sys.executable, "-m", "tests.contract.guard_body", sql_url, str(int(guarded))]
    bodies = [subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(8)]
    chance = random.Random(1)
    try:
        while any(body.poll() is None for body in bodies):
            running = [body for body in bodies if body.poll() is None]
            stopped = chance.sample(running, min(3, len(running)))
            for body in stopped:
                body.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.1, 0.6))
            for body in stopped:
                body.send_signal(signal.SIGCONT)
            time.sleep(chance.uniform(0.02, 0.3))
        found = [json.loads(line) for body in bodies for line in body.communicate()[0].splitlines()]
    finally:
        for body in bodies:
            body.kill()
    written = {(run["name"], run["token"]) for run in found if run["committed"]}
    late = {
        (name, token)
        for run in found
        for name, token in written
        if name == run["name"] and token < run["token"] and token not in run["seen"]
    }
    assert len(found) >= 300
    assert len(written) > 100
    assert (late == set()) is guarded, f"{len(late)} of {len(written)} writes were late"
