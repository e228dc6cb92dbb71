"""The lock store forgets, or cuts its connections: the holder learns of it, and no other owner's lock is freed."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from celery import Celery

from celery_dlock import Lock, LockLost, signals
from celery_dlock.locking.events import Event
from tests.conftest import OwnServer
from tests.support.polling import eventually
from tests.support.servers import Server

TTL = 1.5
#: For who holds a lock while its store restarts.
LONG = 6.0


def told_within(ttl: float) -> float:
    """The watchdog renews at a third of it, and looks every 0.2 s; the rest is for slow cores."""
    return ttl / 3 + 0.2 + 2


@pytest.fixture
def server(own_server: OwnServer) -> Server:
    return own_server()


@pytest.fixture
def admin(server: Server) -> Iterator[redis.Redis]:
    with server.client() as connected:
        yield connected


@pytest.fixture
def lock_at(server: Server) -> Callable[..., Lock]:
    """Each call is another process's, as far as the store can tell."""

    def make(ttl: float = TTL) -> Lock:
        app = Celery("emptied", broker="memory://", set_as_current=False)
        app.conf.update(dlock_url=server.lock_url())
        return Lock("x", app=app, ttl=ttl)

    return make


@pytest.fixture
def lost() -> Iterator[list[str]]:
    told: list[str] = []

    def note(event: Event, **_: object) -> None:
        told.append(event.reason)

    signals.lock_lost.connect(note, weak=False)
    yield told
    signals.lock_lost.disconnect(note)


def empty(server: Server, admin: redis.Redis) -> None:
    assert server.running
    admin.flushall()


def restart(server: Server, admin: redis.Redis) -> None:
    assert admin.ping()
    server.restart()


EMPTIED = pytest.mark.parametrize("emptied", [empty, restart])


@pytest.mark.invariant("emptied-store-is-reported")
@EMPTIED
def test_emptied_store_reports_the_loss_and_a_late_release_frees_nothing(
    server: Server,
    admin: redis.Redis,
    lock_at: Callable[..., Lock],
    lost: list[str],
    emptied: Callable[[Server, redis.Redis], None],
) -> None:
    first, second = lock_at(LONG), lock_at(LONG)
    assert first.acquire()
    lease = first.lease
    assert lease is not None
    emptied(server, admin)
    began = time.monotonic()
    assert second.acquire(blocking=False)
    eventually(lambda: lease.lost, within=told_within(LONG))
    assert time.monotonic() - began < told_within(LONG)
    eventually(lambda: lost == ["the store no longer knows it"])
    with pytest.raises(LockLost):
        lease.ensure()
    with pytest.raises(LockLost):
        first.release()
    assert second.lease is not None
    second.lease.ensure()
    assert second.locked()
    second.release()
    assert not second.locked()


def test_holder_of_a_forgotten_lock_learns_it_at_ensure(
    server: Server, admin: redis.Redis, lock_at: Callable[[], Lock]
) -> None:
    lock = lock_at()
    assert lock.acquire()
    assert lock.lease is not None
    empty(server, admin)
    with pytest.raises(LockLost):
        lock.lease.ensure()


@pytest.mark.invariant("emptied-store-is-reported")
@EMPTIED
def test_tokens_still_grow_after_all_was_forgotten(
    server: Server, admin: redis.Redis, lock_at: Callable[[], Lock], emptied: Callable[[Server, redis.Redis], None]
) -> None:
    """While the server's clock does not go back: a new token is its time, and the old one was not ahead of that."""
    tokens = []
    for _ in range(2):
        with lock_at() as lock:
            assert lock.lease is not None
            assert lock.lease.token is not None
            tokens.append(lock.lease.token)
        emptied(server, admin)
    assert tokens[0] < tokens[1]


@pytest.mark.invariant("script-flush-costs-nothing")
def test_scripts_that_were_flushed_cost_nothing(
    admin: redis.Redis, lock_at: Callable[[], Lock], lost: list[str]
) -> None:
    lock = lock_at()
    over = threading.Event()

    def flush() -> None:
        while not over.wait(0.05):
            admin.script_flush()

    flushing = threading.Thread(target=flush)
    flushing.start()
    try:
        with lock:
            token, end = lock.lease and lock.lease.token, time.monotonic() + 1.5 * TTL
            while time.monotonic() < end:
                assert lock.lease is not None
                lock.lease.ensure()
                time.sleep(0.01)
            assert lock.lease is not None
            assert lock.lease.token == token
    finally:
        over.set()
        flushing.join(10)
    assert lost == []


@pytest.mark.invariant("script-flush-costs-nothing")
def test_connections_that_are_cut_again_and_again_cost_no_lease(
    admin: redis.Redis, lock_at: Callable[..., Lock], lost: list[str]
) -> None:
    ttl = 2 * TTL  # a loaded machine takes a while to connect, between two cuts
    lock, other = lock_at(ttl), lock_at(ttl)
    with lock:
        end = time.monotonic() + 1.5 * ttl
        while time.monotonic() < end:
            admin.client_kill_filter(_type="normal", skipme=True)
            assert not other.acquire(blocking=False)
            time.sleep(0.1)
        assert lock.lease is not None
        assert lock.lease.held
    assert lost == []
    assert not other.locked()


@pytest.mark.invariant("restart-with-data-keeps-leases")
def test_a_store_that_is_restarted_with_its_data_costs_no_lease(own_server: OwnServer, lost: list[str]) -> None:
    server = own_server(persistent=True)
    app = Celery("emptied", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=server.lock_url())
    with Lock("x", app=app, ttl=10) as lock:
        server.restart()
        assert lock.lease is not None
        lock.lease.ensure()
    assert lost == []
