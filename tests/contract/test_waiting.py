"""Callers that wait in their thread: one is woken per release, in order, and no wake-up is lost."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock import Lock
from celery_dlock.errors import StoreUnavailable
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.waiting import POLL
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Duplicate, Held, Identity
from celery_dlock.store.redis import wakeups
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import NAME, TTL, Party, commands_seen, keys_of, load_scripts, request_of, take
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.stores import store_at

KEYS = keys_of()
BLPOP = b"*3\r\n$5\r\nBLPOP"
#: The reply to a BLPOP that was woken.
REPLY = f"*2\r\n${len(KEYS.wake)}\r\n{KEYS.wake}\r\n$1\r\n1\r\n"


@contextlib.contextmanager
def line_of(store: RedisStore, number: int, clients: list[redis.Redis]) -> Iterator[list[int]]:
    """Let callers wait, each after the earlier one. Yield the list of those that were woken."""
    woken: list[int] = []
    threads = []
    for index in range(number):
        threads.append(threading.Thread(target=lambda index=index: wait(store, index, woken)))  # type: ignore[misc]
        threads[-1].start()
        eventually(lambda index=index: blocked(clients) > index)  # type: ignore[misc]
    yield woken
    for thread in threads:
        thread.join(30)


def wait(store: RedisStore, index: int, woken: list[int]) -> None:
    if store.release_listener(NAME).wait(20):
        woken.append(index)


def blocked(clients: list[redis.Redis]) -> int:
    return sum(int(client.info("clients")["blocked_clients"]) for client in clients)


# One server


@pytest.mark.invariant("one-waiter-per-release")
@pytest.mark.core
def test_each_release_wakes_the_first_of_the_line_and_no_other(lock_url: str, client: redis.Redis) -> None:
    store: Any = store_at(lock_url, timeout=5)
    take(store, "o.1")
    request = request_of(notify=True)
    assert isinstance(store.acquire(NAME, "w.1", TTL, request), Held)
    with line_of(store, 3, [client]) as woken:
        store.release(NAME, "o.1", ReleaseRequest())
        for number in range(1, 4):
            eventually(lambda number=number: len(woken) == number)  # type: ignore[misc]
            # As the caller does that was woken. Its own release wakes the next one.
            take(store, f"w.{number + 1}", request_of(notify=True, waited=True))
            time.sleep(0.05)
            assert woken == list(range(number))
            assert store.release(NAME, f"w.{number + 1}", ReleaseRequest()).woke
    assert woken == [0, 1, 2]
    store.close()


# The client


@pytest.fixture
def app(clean_server: Server, make_app: Callable[..., Celery]) -> Celery:
    return make_app(clean_server.lock_url())


@pytest.mark.invariant("one-waiter-per-release")
@pytest.mark.core
def test_plain_blocking_lock_sends_what_it_sends_without_waiters(app: Celery, client: redis.Redis) -> None:
    def cycle() -> None:
        with Lock("x", app=app):
            pass

    cycle()
    with commands_seen(client) as seen:
        cycle()
    assert [words[0] for _, words in seen] == [
        "EVALSHA", "HGET", "MGET", "TIME", "SET", "HSET", "PEXPIRE", "EVALSHA", "HMGET", "DEL",
    ]  # fmt: skip


@pytest.mark.invariant("one-waiter-per-release")
@pytest.mark.core
def test_loop_after_the_last_waiter_has_left_sends_what_it_sends_without_waiters(
    app: Celery, client: redis.Redis
) -> None:
    def turns(count: int) -> None:
        for _ in range(count):
            with Lock("x", app=app):
                time.sleep(0.002)

    with ThreadPoolExecutor() as threads:
        list(threads.map(turns, [20, 20]))

    def sent_by_two_turns() -> list[str]:
        with commands_seen(client) as seen:
            turns(2)
        return [words[0] for kind, words in seen if kind != "lua"]

    # Not at once on a busy machine: a wake-up of its own that comes late looks like one of another caller.
    eventually(lambda: sent_by_two_turns() == ["EVALSHA"] * 4, within=20)
    assert sent_by_two_turns() == ["EVALSHA"] * 4


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
def test_woken_thread_enters_its_own_lock_again_at_once(app: Celery, client: redis.Redis) -> None:
    """Its process has just woken a waiter: this thread, which must not join the line behind itself."""

    def enter_twice() -> float:
        with Lock("x", app=app):
            began = time.monotonic()
            with Lock("x", app=app):
                return time.monotonic() - began

    held = Lock("x", app=app)
    assert held.acquire()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(enter_twice)
        eventually(lambda: blocked([client]) == 1)
        held.release()
        assert waiting.result() < POLL / 4


@pytest.mark.invariant("one-waiter-per-release")
def test_threads_that_release_and_take_again_get_equal_turns(app: Celery) -> None:
    """Each has a turn before another has its second one, give or take the first turns."""
    turns = [0] * 8
    over = threading.Event()

    def loop(index: int) -> None:
        while not over.is_set():
            with Lock("x", app=app):
                turns[index] += 1
                time.sleep(0.001)

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(loop, index) for index in range(8)]
        eventually(lambda: sum(turns) >= 400, within=60)
        over.set()
        for one in running:
            one.result()
    assert max(turns) <= 1.5 * min(turns), turns


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiter_that_gives_up_leaves_the_others_in_line(app: Celery, client: redis.Redis) -> None:
    held = Lock("x", app=app)
    assert held.acquire()
    with ThreadPoolExecutor() as threads:
        impatient = threads.submit(lambda: Lock("x", app=app).acquire(timeout=0.2))
        eventually(lambda: blocked([client]) == 1)
        patient = threads.submit(lambda: Lock("x", app=app).acquire(timeout=20))
        eventually(lambda: blocked([client]) == 2)
        assert impatient.result() is False
        began = time.monotonic()
        held.release()
        assert patient.result() is True
    assert time.monotonic() - began < POLL / 2


class Interrupted(BaseException):
    """As the kill of a greenlet or a soft time limit."""


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize("moment", ["in BLPOP", "before it asks"])
def test_waiter_that_is_interrupted_when_it_was_woken_wakes_the_next_one(
    clean_server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    holder, unlucky, next_one = (Party(clean_server.lock_url(), timeout=5) for _ in range(3))
    lease = holder.acquire(NAME)
    popped = wakeups._pop

    def interrupted(*args: Any) -> Any:
        popped(*args)
        raise Interrupted

    def acquire_after_it(party: Party) -> object:
        return party.lock_client.acquire_within(NAME, party.context, 30.0, AcquireRequest(party.context.requester), 20)

    with ThreadPoolExecutor() as threads:
        if moment == "in BLPOP":
            monkeypatch.setattr(wakeups, "_pop", interrupted)
        else:
            refused = unlucky.lock_client.acquire(
                NAME, unlucky.context, 30.0, AcquireRequest(unlucky.context.requester, notify=True)
            )
            assert isinstance(refused, Held)
            monkeypatch.setattr(unlucky.lock_client, "acquire", raise_interrupted)
        first = threads.submit(
            unlucky.lock_client.acquire_within,
            NAME, unlucky.context, 30.0, AcquireRequest(unlucky.context.requester), 20,
            refused=None if moment == "in BLPOP" else refused,
        )  # fmt: skip
        eventually(lambda: blocked([client]) == 1)
        monkeypatch.setattr(wakeups, "_pop", popped)
        second = threads.submit(acquire_after_it, next_one)
        eventually(lambda: blocked([client]) == 2)
        began = time.monotonic()
        holder.release(lease)
        assert isinstance(first.exception(), Interrupted)
        assert isinstance(second.result(), Lease)
    assert time.monotonic() - began < POLL / 2


def raise_interrupted(*_: object) -> None:
    raise Interrupted


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiter_whose_message_was_done_meanwhile_wakes_the_next_one(clean_server: Server, client: redis.Redis) -> None:
    """Its acquire ends without the lock, although the lock is free."""
    holder, copy, next_one = (Party(clean_server.lock_url(), timeout=5) for _ in range(3))
    identity = Identity("id1")
    lease = holder.acquire(NAME)
    with ThreadPoolExecutor() as threads:
        request = AcquireRequest(copy.context.requester, identity, redelivered=True)
        first = threads.submit(copy.lock_client.acquire_within, NAME, copy.context, 30.0, request, 20)
        eventually(lambda: blocked([client]) == 1)
        second = threads.submit(
            next_one.lock_client.acquire_within,
            NAME,
            next_one.context,
            30.0,
            AcquireRequest(next_one.context.requester),
            20,
        )
        eventually(lambda: blocked([client]) == 2)
        client.set(KEYS.done(identity.digest), str(2**52))
        began = time.monotonic()
        holder.release(lease)
        assert isinstance(first.result(), Duplicate)
        assert isinstance(second.result(), Lease)
    assert time.monotonic() - began < POLL / 2


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiters_of_a_kept_lock_follow_one_another_without_polls(app: Celery, clean_server: Server) -> None:
    """Only one of them learns until when the lock is kept. The others are woken by the releases that follow."""
    store: Any = store_at(clean_server.lock_url(), timeout=5)
    take(store, "o.1", request_of(min_hold_ms=300), name=Lock("x", app=app)._name)

    def turn(_: int) -> float:
        with Lock("x", app=app):
            return time.monotonic()

    with ThreadPoolExecutor(6) as threads, clean_server.client() as client:
        turns = [threads.submit(turn, index) for index in range(6)]
        eventually(lambda: blocked([client]) == 6)
        began = time.monotonic()
        store.release(Lock("x", app=app)._name, "o.1", ReleaseRequest())
        ends = sorted(one.result() - began for one in turns)
    assert ends[-1] < POLL / 2, ends
    store.close()


def test_more_waiters_than_connections_may_block_all_get_the_lock(
    app: Celery, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ones wait for a place in their process, in order."""
    monkeypatch.setattr(wakeups, "MAX_BLOCKED", 3)
    held, order = Lock("x", app=app), []
    assert held.acquire()

    def turn(index: int) -> None:
        with Lock("x", app=app):
            order.append(index)

    with ThreadPoolExecutor(9) as threads:
        turns = [threads.submit(turn, index) for index in range(9)]
        eventually(lambda: blocked([client]) == 3)
        time.sleep(0.2)
        assert blocked([client]) == 3
        held.release()
        for one in turns:
            one.result(30)
    assert sorted(order) == list(range(9))


# A connection that is cut


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize("received", range(len(REPLY)))
def test_waiter_whose_connection_is_cut_within_the_reply_takes_the_lock(
    clean_server: Server, start_proxy: Callable[[Server], Proxy], client: redis.Redis, received: int
) -> None:
    """After each byte of the reply, from none of them. No connection is used again with a part of a reply unread."""
    load_scripts(client)
    proxy = start_proxy(clean_server)
    holder, waiter = Party(clean_server.lock_url(), timeout=5), Party(proxy.url(), timeout=5)
    lease = holder.acquire(NAME)
    proxy.cut_after(BLPOP, received)
    with ThreadPoolExecutor() as threads:
        request = AcquireRequest(waiter.context.requester)
        waiting = threads.submit(waiter.lock_client.acquire_within, NAME, waiter.context, 30.0, request, 20)
        eventually(lambda: blocked([client]) == 1)
        began = time.monotonic()
        holder.release(lease)
        taken = waiting.result()
    assert time.monotonic() - began < POLL / 2
    assert isinstance(taken, Lease)
    assert proxy.mode == "pass", "no reply was cut"
    waiter.lock_client.renew(taken, 30.0)
    assert waiter.release(taken)


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiter_behind_a_network_that_stops_gets_the_lock_when_it_is_back(
    clean_server: Server, start_proxy: Callable[[Server], Proxy], client: redis.Redis
) -> None:
    proxy = start_proxy(clean_server)
    holder, waiter = Party(clean_server.lock_url(), timeout=5), Party(proxy.url(), timeout=0.5)
    lease = holder.acquire(NAME)

    def acquire() -> object:
        while True:
            with contextlib.suppress(StoreUnavailable):
                request = AcquireRequest(waiter.context.requester)
                return waiter.lock_client.acquire_within(NAME, waiter.context, 30.0, request, 20)

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(acquire)
        eventually(lambda: blocked([client]) == 1)
        proxy.half_open()
        holder.release(lease)
        assert isinstance(waiting.result(timeout=2 * POLL + 2), Lease)


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiter_that_is_killed_when_it_was_woken_costs_the_others_one_slow_poll(
    clean_server: Server, client: redis.Redis, app: Celery
) -> None:
    held = Lock("x", app=app)
    assert held.acquire()
    with clean_server.client() as doomed, ThreadPoolExecutor() as threads:
        # The server sends the entry to a client that never asks again.
        gone = threads.submit(doomed.blpop, [keys_of().wake], 4)
        eventually(lambda: blocked([client]) == 1)
        waiting = threads.submit(lambda: Lock("x", app=app).acquire(timeout=20))
        eventually(lambda: blocked([client]) == 2)
        began = time.monotonic()
        held.release()
        assert gone.result() is not None
        assert waiting.result() is True
    assert time.monotonic() - began < POLL + 1
