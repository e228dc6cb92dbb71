"""``lease.guard(connection)``: no other call takes the lock before the guarded transaction has ended."""

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from celery_dlock.errors import GuardRefused, StoreBusy
from celery_dlock.keys.lock_name import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Acquired, Renewal
from tests.contract.helpers import NAME, TTL, request_of
from tests.support.processes import ROOT

pytestmark = [pytest.mark.servers, pytest.mark.invariant("guarded-writes-are-never-late")]

psycopg: Any = pytest.importorskip("psycopg", reason="installed in the main lane only")


def a_store(url: str, timeout: float = 5.0) -> EngineStore:
    made = open_store((StoreLocation.of(url),), timeout=timeout, prefix="dlock")
    assert isinstance(made, EngineStore)
    return made


@pytest.fixture
def store(postgresql_url: str) -> Iterator[EngineStore]:
    with closing(a_store(postgresql_url)) as made:
        yield made


@pytest.fixture
def user(postgresql: str) -> Iterator[Any]:
    """A connection of the user, which may do everything."""
    with psycopg.connect(postgresql, autocommit=True) as connection:
        yield connection


def take(store: EngineStore, acquisition: str, ttl_ms: int = TTL) -> Acquired:
    answer = store.acquire(NAME, acquisition, ttl_ms, request_of())
    assert isinstance(answer, Acquired), answer
    return answer


def expire(store: EngineStore) -> None:
    """Let the lease of ``NAME`` end now."""
    backend: Any = store.backend
    with backend.pool.lent() as connection:
        connection.execute(
            f"UPDATE \"{backend.pool.schema}\".dlock_name SET rest = regexp_replace(rest, ',[0-9]+\\]', ',1]')"
        )


def test_taker_of_an_expired_lease_waits_for_the_guarded_transaction(store: EngineStore, user: Any) -> None:
    take(store, "a.1")
    taken: list[Acquired] = []
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        expire(store)
        taker = threading.Thread(target=lambda: taken.append(take(store, "b.1")))
        taker.start()
        taker.join(0.5)
        assert not taken
    taker.join(10)
    assert len(taken) == 1


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_guard_after_the_lease_was_taken_over_says_so(store: EngineStore, user: Any, level: str) -> None:
    take(store, "a.1")
    with user.transaction():
        user.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert store.guard(NAME, "a.1", user)
    expire(store)
    take(store, "b.1")
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
        with closing(a_store(_url(store), timeout=0.3)) as impatient, pytest.raises(StoreBusy, match="guards"):
            take(impatient, "b.1")
    take(store, "b.1")
    # The guard has ended, so the name is plain again.
    assert store.backend.release_plain(NAME, "b.1", ReleaseRequest()) is not None


def test_rolled_back_savepoint_ends_its_guard_and_an_outer_guard_stays(store: EngineStore, user: Any) -> None:
    take(store, "a.1")
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
        with user.transaction():
            user.execute("SELECT 1")
            raise psycopg.Rollback
        expire(store)
        with closing(a_store(_url(store), timeout=0.3)) as impatient, pytest.raises(StoreBusy):
            take(impatient, "b.1")


def test_two_transactions_of_one_lease_are_both_waited_for(store: EngineStore, user: Any, postgresql: str) -> None:
    take(store, "a.1")
    with psycopg.connect(postgresql) as second:
        with user.transaction():
            assert store.guard(NAME, "a.1", user)
            assert store.guard(NAME, "a.1", user)
            second.execute("SELECT 1")
            assert store.guard(NAME, "a.1", second)
        store.release(NAME, "a.1", ReleaseRequest())
        with closing(a_store(_url(store), timeout=0.3)) as impatient, pytest.raises(StoreBusy):
            take(impatient, "b.1")
    take(store, "b.1")


def test_guard_is_refused_where_it_would_prove_nothing(store: EngineStore, user: Any, postgresql: str) -> None:
    take(store, "a.1")
    with pytest.raises(GuardRefused, match="no transaction is open"):
        store.guard(NAME, "a.1", user)
    with user.transaction():
        user.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(GuardRefused, match="read-only"):
            store.guard(NAME, "a.1", user)
    other = shared_name("other")
    store.acquire(other, "c.1", TTL, request_of())
    with user.transaction():
        user.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        user.execute("SELECT 1")
        with pytest.raises(GuardRefused, match="before any other statement"):
            store.guard(other, "c.1", user)
    with pytest.raises(GuardRefused, match="no connection that can be guarded"):
        store.guard(NAME, "a.1", object())
    user.execute("CREATE DATABASE elsewhere")
    elsewhere = postgresql.rpartition("/")[0] + "/elsewhere"
    with psycopg.connect(elsewhere) as connection, pytest.raises(GuardRefused, match="not in the database"):
        store.guard(NAME, "a.1", connection)


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
from django.conf import settings
from django.db import connection, transaction
from tests.contract.test_guard import NAME, GuardRefused, ReleaseRequest, StoreBusy, a_store, take

place = urlsplit(sys.argv[1])
database = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres"}
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
    try:
        take(store, "b.1")
    except StoreBusy:
        print("busy")
take(store, "b.1")
print("taken")
"""


def test_transaction_of_django_is_guarded(postgresql: str, postgresql_url: str) -> None:
    run = [sys.executable, "-c", DJANGO, postgresql, postgresql_url]
    output = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.split() == ["refused", "True", "busy", "taken"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
def test_no_write_of_a_paused_body_is_late(postgresql: str, postgresql_url: str, guarded: bool) -> None:
    """Bodies write in a transaction and are stopped for longer than their ttl. Without the guard, some write late."""
    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS guard_writes")
        connection.execute("CREATE TABLE guard_writes (name text, token bigint)")
    command = [sys.executable, "-m", "tests.contract.guard_body", postgresql, postgresql_url, str(int(guarded))]
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


def _url(store: EngineStore) -> str:
    backend: Any = store.backend
    with backend.pool.lent() as connection:
        info = connection.info
        return f"postgresql://{info.user}@{info.host}:{info.port}/{info.dbname}?schema={backend.pool.schema}"
