"""Connections die between two calls: a restart, an idle limit, a proxy that was moved. The store itself answers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock import Lease, Lock
from celery_dlock.locking.waiting import POLL
from celery_dlock.runtime import Runtime
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.redis.connection import RespConnection
from celery_dlock.store.redis.endpoint import ServerEndpoint
from celery_dlock.store.redis.pool import ConnectionPool
from tests.support.polling import eventually
from tests.support.servers import Server

IDLE = 8

Break = Callable[[Server], None]


def kill_all(server: Server) -> None:
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]


def restart(server: Server) -> None:
    server.restart()


BROKEN = pytest.mark.parametrize("broken", [kill_all, restart])


@pytest.fixture
def server(own_server: Any) -> Server:
    made: Server = own_server(persistent=True)
    return made


@pytest.fixture
def app(server: Server, make_app: Callable[..., Celery]) -> Celery:
    return make_app(server.url())


def at_once(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Return the answers to so many threads that called at the same moment; an error counts as an answer."""
    got: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait(10)
        try:
            got[number] = call(number)
        except Exception as error:  # noqa: BLE001 - the error is what the test looks at
            got[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return got


class MovingDoor(ServerEndpoint):
    """To a server whose place changes while a first connection to it is made, as another thread finds out first."""

    place, others_turn = "old", False
    wires: ConnectionPool

    def address(self) -> object:
        return self.place

    def connection(self, seconds: float) -> Any:
        made = super().connection(seconds)
        if self.others_turn:
            self.others_turn, self.place = False, "new"
            self.wires.call("", RespConnection.ask, b"PING\r\n")
        return made


def test_a_connection_that_was_begun_before_a_failover_is_not_used_behind_it(lock_url: str) -> None:
    place = StoreLocation.of(lock_url)
    door = MovingDoor(place.options_at(place.addresses[0]))
    door.wires = ConnectionPool(door, timeout=5)
    door.others_turn = True
    with door.wires.lent() as begun_before:
        pass
    for _ in range(3):
        with door.wires.lent() as later:
            assert later is not begun_before
    door.wires.close()


@pytest.fixture
def idle(app: Celery) -> Any:
    """The store of this process, with as many idle connections as threads talked at once."""
    store: Any = Runtime.of(app).lock_client._store
    wires = store._topology
    for wire in [wires.opened(RespConnection) for _ in range(IDLE)]:
        wires._idle.append(wire)
    return wires._idle


def use(app: Celery, name: str) -> int:
    with Lock(name, app=app) as lock:
        assert isinstance(lock.lease, Lease)
        assert lock.lease.token is not None
        return lock.lease.token


@pytest.mark.core
@BROKEN
@pytest.mark.parametrize("verb", ["use", "inspect", "renew", "release"])
def test_many_stale_connections_show_no_error(server: Server, app: Celery, idle: Any, broken: Break, verb: str) -> None:
    """Whatever comes first meets a stale one, and is answered all the same."""
    held = Lock("held", app=app)
    assert held.acquire()
    lease = held.lease
    assert lease is not None
    assert len(idle) >= IDLE
    broken(server)
    if verb == "use":
        assert use(app, "x") > 0
    elif verb == "inspect":
        holder = held.holder()
        assert holder is not None
        assert holder.token == lease.token
    elif verb == "renew":
        lease.ensure()
    held.release()
    assert not held.locked()
    assert not lease.lost


@pytest.mark.core
@BROKEN
def test_nor_to_many_threads_at_once(server: Server, app: Celery, idle: Any, broken: Break) -> None:
    assert len(idle) >= IDLE
    broken(server)
    tokens = at_once(IDLE, lambda number: use(app, f"x{number}"))
    assert [token for token in tokens if not isinstance(token, int)] == []


def test_none_of_them_is_left_after_the_first_that_was_stale(server: Server, app: Celery, idle: Any) -> None:
    """Else each call would find out anew, and one that needs two would fail."""
    kill_all(server)
    use(app, "x")
    assert len(idle) == 1
    with server.client() as client:
        ours = [row for row in client.client_list() if row["cmd"] != "client|list"]
    assert len(ours) <= 2  # this process and its watchdog


def blocked(client: redis.Redis) -> list[Any]:
    """Return the connections that wait for a release."""
    return [row for row in client.client_list() if row["cmd"] == "blpop"]


class Waiter:
    """A thread that waits for the lock `held`."""

    def __init__(self, app: Celery, server: Server) -> None:
        self.server = server
        self.got: list[Any] = []
        self.done = threading.Event()
        self._app = app
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        lock = Lock("held", app=self._app)
        try:
            self.got.append(lock.acquire(timeout=20))
        except Exception as error:  # noqa: BLE001 - the error is what the test looks at
            self.got.append(error)
        self.done.set()
        if self.got == [True]:
            lock.release()  # else its watchdog reports the loss in a later test

    def listening(self, but: int = 0) -> int:
        """The id of the connection that waits, once there is one other than `but`."""
        with self.server.client() as client:

            def find() -> int:
                if self.done.is_set():
                    return -1
                rows = blocked(client)
                return next((int(row["id"]) for row in rows if int(row["id"]) != but), 0)

            return eventually(find, 10, message="nobody waits")


@pytest.mark.core
def test_a_waiter_whose_subscription_is_cut_goes_on_and_is_woken(server: Server, app: Celery) -> None:
    """By the release, three times sooner than by its own next look."""
    held = Lock("held", app=app)
    assert held.acquire()
    waiter = Waiter(app, server)
    first = waiter.listening()
    with server.client() as client:
        assert client.client_kill_filter(_id=first) == 1  # type: ignore[no-untyped-call]
    assert waiter.listening(but=first) > 0, waiter.got
    held.release()
    assert waiter.done.wait(POLL / 3), "it was not woken"
    assert waiter.got == [True]


def test_a_waiter_goes_on_however_often_it_is_cut(server: Server, app: Celery) -> None:
    held = Lock("held", app=app)
    assert held.acquire()
    waiter = Waiter(app, server)
    seen = waiter.listening()
    with server.client() as client:
        for _ in range(5):
            client.execute_command("CLIENT", "KILL", "ID", seen)  # type: ignore[no-untyped-call]
            seen = waiter.listening(but=seen)
            assert seen > 0, waiter.got
    assert not waiter.done.is_set()
    held.release()
    assert waiter.done.wait(POLL / 3), "it was not woken"
    assert waiter.got == [True]


def test_a_waiter_whose_every_connection_is_cut_does_not_take_what_is_held(server: Server, app: Celery) -> None:
    held = Lock("held", app=app)
    assert held.acquire()
    waiter = Waiter(app, server)
    first = waiter.listening()
    kill_all(server)
    assert waiter.listening(but=first) > 0, waiter.got
    assert held.lease is not None
    held.lease.ensure()
    assert not waiter.done.is_set()
    held.release()
    assert waiter.done.wait(POLL / 3), "it was not woken"
    assert waiter.got == [True]
