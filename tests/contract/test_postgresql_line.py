"""The line of waiting calls in PostgreSQL: a release transfers the lock to the first of them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psycopg
import pytest

from celery_dlock.control.summary import Health
from celery_dlock.errors import ReplyLost, ReplyTimeout
from celery_dlock.reports.checks import store_checks
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Identity, Transferred
from celery_dlock.store.sql.postgresql.backend import PostgreSQLBackend
from celery_dlock.store.sql.postgresql.listener import Listener
from tests.contract.helpers import NAME, TTL, request_of
from tests.support.polling import eventually

pytestmark = pytest.mark.servers


@pytest.fixture(params=["postgresql", "pgbouncer"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@contextmanager
def opened(url: str) -> Iterator[EngineStore]:
    with closing(open_store([StoreLocation.of(url)], timeout=10, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        yield store


class Waiting:
    """A call that waits in line in a thread of its own.

    Args:
        store: Its store.
        acquisition: Its acquisition.
        request: Its request.
        seconds: How long it waits.
    """

    def __init__(self, store: EngineStore, acquisition: str, request: AcquireRequest, seconds: float = 30) -> None:
        self._store, self._acquisition, self._seconds = store, acquisition, seconds
        self._request = request._replace(notify=True, waited=True)
        self.answer: Transferred | bool | None = None
        before = len(line(store))
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()
        eventually(lambda: len(line(store)) > before)

    def _wait(self) -> None:
        listener = self._store.release_listener(NAME)
        assert isinstance(listener, Listener)
        self.answer = listener.wait_in_line(self._acquisition, TTL, self._request, self._seconds)

    def ended(self) -> Transferred | bool | None:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.answer


def line(store: EngineStore) -> list[str]:
    """Return the acquisitions in the line."""
    backend = store.backend
    assert isinstance(backend, PostgreSQLBackend)
    with backend.pool.lent() as connection:
        query = f'SELECT unnest(line) FROM "{backend.pool.schema}".dlock_name WHERE name = %s'
        return [entry.partition("\x1f")[0] for (entry,) in connection.execute(query, (backend.key(NAME),))]


def released(store: EngineStore, acquisition: str) -> bool:
    """Release the lock, and return whether that woke a call."""
    answer = store.release(NAME, acquisition, ReleaseRequest())
    assert answer.ours
    return answer.woke


@pytest.mark.invariant("one-waiter-per-release")
def test_release_transfers_the_lock_to_calls_in_the_order_in_which_they_came(url: str) -> None:
    with opened(url) as store, opened(url) as other:
        first = store.acquire(NAME, "h.1", TTL, request_of("h"))
        assert isinstance(first, Acquired)
        calls = [Waiting(one, f"w{number}.1", request_of(f"w{number}")) for number, one in enumerate((other, store))]
        tokens = [first.token]
        for number, holder in enumerate(("h.1", "w0.1")):
            assert released(store, holder)
            answer = calls[number].ended()
            assert isinstance(answer, Transferred)
            held = store.inspect(NAME)
            assert held is not None
            assert (held.owner, held.task_id, held.token) == (f"w{number}", f"w{number}", answer.acquired.token)
            tokens.append(answer.acquired.token)
        assert tokens == sorted(set(tokens))
        released(store, "w1.1")
        assert store.inspect(NAME) is None


def test_transferred_lock_is_held_for_three_seconds_until_its_first_renewal(url: str) -> None:
    """A call that has died in the line keeps the lock no longer."""
    with opened(url) as store:
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        call = Waiting(store, "w.1", request_of("w"))
        released(store, "h.1")
        held = store.inspect(NAME)
        assert held is not None
        assert 2 < held.expires_in <= 3
        call.ended()


@pytest.mark.invariant("duplicates-do-not-run")
def test_call_whose_message_has_ended_is_woken_and_does_not_get_the_lock(url: str) -> None:
    with opened(url) as store:
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        call, next_call = Waiting(store, "w.1", request_of("w")), Waiting(store, "x.1", request_of("x"))
        store.mark_done(NAME, Identity("w").digest, "earlier", 0)
        assert released(store, "h.1")
        assert call.ended() is True
        assert store.inspect(NAME) is None
        assert line(store) == ["x.1"]
        store.release_listener(NAME).pass_on()
        assert next_call.ended() is True


@pytest.mark.invariant("store-calls-are-idempotent")
def test_abandoned_acquisition_in_the_line_does_not_get_the_lock(url: str) -> None:
    with opened(url) as store:
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        call = Waiting(store, "w.1", request_of("w"))
        store.release(NAME, "w.1", ReleaseRequest(outcome_unknown=True))
        assert released(store, "h.1")
        assert call.ended() is True
        assert store.inspect(NAME) is None


def test_duplicate_of_the_holders_message_does_not_join_the_line(url: str) -> None:
    with opened(url) as store:
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        call = Waiting(store, "w.1", request_of("h"), 0.5)
        assert line(store) != ["w.1"]
        assert call.ended() is False
        answer = store.acquire(NAME, "w.2", TTL, request_of("h", notify=True, waited=True))
        assert isinstance(answer, Held)
        assert answer.same_message


def test_call_whose_time_is_over_leaves_the_line(url: str) -> None:
    with opened(url) as store:
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        assert Waiting(store, "w.1", request_of("w"), 0.5).ended() is False
        assert line(store) == []
        assert released(store, "h.1")
        assert store.inspect(NAME) is None


def test_dead_call_of_the_line_is_passed_over(url: str) -> None:
    with opened(url) as store:
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        dead, alive = Waiting(store, "dead.1", request_of("d"), 5), Waiting(store, "w.1", request_of("w"))
        backend = store.backend
        assert isinstance(backend, PostgreSQLBackend)
        with backend.pool.lent() as connection:
            connection.execute(
                f'UPDATE "{backend.pool.schema}".dlock_name SET line[1] ='
                " regexp_replace(line[1], '\x1f[0-9]{15,}\x1f', '\x1f1\x1f')"
            )
        assert released(store, "h.1")
        assert alive.ended() is True
        assert line(store) == []
        assert dead.ended() is not None


def taken(store: EngineStore, acquisition: str, request: AcquireRequest) -> int | None:
    """Wait in line for the lock, or ask for it after a wake-up. Return the token; None if another call has the lock."""
    listener = store.release_listener(NAME)
    assert isinstance(listener, Listener)
    answer = listener.wait_in_line(acquisition, TTL, request, 5)
    got = store.acquire(NAME, acquisition, TTL, request) if isinstance(answer, bool) else answer.acquired
    return got.token if isinstance(got, Acquired) else None


@pytest.mark.invariant("tokens-never-decrease")
def test_calls_in_line_exclude_one_another(url: str) -> None:
    inside: list[int] = []
    overlaps: list[int] = []
    tokens: list[int] = []
    with opened(url) as store, opened(url) as other:

        def work(number: int) -> None:
            mine, done, asked = (store, other)[number % 2], 0, 0
            while done < 15:
                asked += 1
                acquisition, request = f"o{number}.{asked}", request_of(f"m{number}.{asked}", notify=True, waited=True)
                token = taken(mine, acquisition, request)
                if token is not None:
                    overlaps.extend(inside)
                    inside.append(number)
                    tokens.append(token)
                    inside.remove(number)
                    done += 1
                    # Some releases are not plain: they wake a call, and do not transfer the lock.
                    assert mine.release(NAME, acquisition, ReleaseRequest(queue=done % 4 == 0)).ours

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert overlaps == []
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 8 * 15
        assert store.inspect(NAME) is None


@pytest.mark.invariant("store-calls-are-idempotent")
def test_call_that_cannot_leave_the_line_may_have_the_lock(url: str) -> None:
    """Its acquisition is released then, as that of an acquire whose reply was lost."""
    with opened(url) as other, closing(open_store([StoreLocation.of(url)], timeout=1, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        listener = store.release_listener(NAME)
        assert isinstance(listener, Listener)
        backend = other.backend
        assert isinstance(backend, PostgreSQLBackend)
        with ThreadPoolExecutor(1) as thread, backend.pool.lent() as connection, connection.transaction():
            waiting = thread.submit(listener.wait_in_line, "w.1", TTL, request_of("w", notify=True, waited=True), 1.0)
            eventually(lambda: line(store) == ["w.1"])
            row = f'SELECT FROM "{backend.pool.schema}".dlock_name WHERE name = %s FOR UPDATE'
            connection.execute(row, (backend.key(NAME),))
            assert type(waiting.exception(timeout=20)) in (ReplyLost, ReplyTimeout)
        store.release(NAME, "w.1", ReleaseRequest(outcome_unknown=True))
        released(store, "h.1")
        assert store.inspect(NAME) is None


def test_first_call_of_a_process_notices_the_pooler(pgbouncer_url: str) -> None:
    """Its first statement finds that out, after it has tried to listen."""
    with opened(pgbouncer_url) as other, opened(pgbouncer_url) as store, ThreadPoolExecutor(1) as thread:
        other.acquire(NAME, "h.1", TTL, request_of("h"))
        listener = store.release_listener(NAME)
        assert isinstance(listener, Listener)
        sent = time.monotonic()
        waiting = thread.submit(listener.wait_in_line, "w.1", TTL, request_of("w", notify=True, waited=True), 10.0)
        eventually(lambda: line(other) == ["w.1"])
        assert released(other, "h.1")
        answer = waiting.result(20)
        assert isinstance(answer, Transferred)
        assert sent + answer.left > time.monotonic()


def test_call_looks_itself_if_the_server_refuses_the_connection_that_listens(
    postgresql: str, postgresql_url: str
) -> None:
    with opened(postgresql_url) as store, psycopg.connect(postgresql, autocommit=True) as administrator:
        backend = store.backend
        assert isinstance(backend, PostgreSQLBackend)
        with backend.pool.lent(), backend.pool.lent():
            pass  # two connections, for the call that waits and for the release
        store.acquire(NAME, "h.1", TTL, request_of("h"))
        administrator.execute("ALTER ROLE dlock CONNECTION LIMIT 1")
        try:
            call = Waiting(store, "w.1", request_of("w"))
            assert released(store, "h.1")
            assert isinstance(call.ended(), Transferred)
        finally:
            administrator.execute("ALTER ROLE dlock CONNECTION LIMIT -1")


def test_check_says_that_calls_behind_a_pooler_poll(postgresql_url: str, pgbouncer_url: str) -> None:
    found = []
    for url in (postgresql_url, pgbouncer_url):
        with opened(url) as store:
            health = Health(up=True, stores=[url], polls=store.info().polls)
            found.append([check.found for check in store_checks(health) if check.check == "waiting calls"])
    assert found == [[], ["poll, because a connection pooler keeps releases from waking them"]]
