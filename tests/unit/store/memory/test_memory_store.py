"""The store in memory: whose data it has, its clock, and what it refuses. Its rules are compared with the scripts."""

import os
import threading
import time

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, Lock, StoreUnavailable
from celery_dlock.config.locations import locations_from_settings
from celery_dlock.config.settings import Settings
from celery_dlock.control import LockControl
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Requester
from tests.support.polling import eventually

pytestmark = pytest.mark.core

NAME = shared_name("x")
REQUEST = AcquireRequest(Requester.of(None, None, "node1", 77))


@pytest.fixture
def clock() -> MemoryClock:
    return MemoryClock(lambda: 1_800_000_000_000_000)


@pytest.fixture
def memory(clock: MemoryClock) -> MemoryBackend:
    return MemoryBackend(clock)


@pytest.fixture
def store(memory: MemoryBackend) -> EngineStore:
    return EngineStore(memory)


def app_of(name: str = "plain", **conf: object) -> Celery:
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.update(dlock_url="memory://", **conf)
    return app


def test_lock_expires_when_the_clock_is_moved(store: EngineStore, clock: MemoryClock) -> None:
    assert isinstance(store.acquire(NAME, "o.1", 30_000, REQUEST), Acquired)
    clock.travel(29.999)
    assert isinstance(store.acquire(NAME, "p.1", 30_000, REQUEST), Held)
    clock.travel(0.001)
    assert isinstance(store.acquire(NAME, "p.1", 30_000, REQUEST), Acquired)


def test_clock_never_goes_back() -> None:
    times = iter([2_000_000, 1_000_000])
    clock = MemoryClock(lambda: next(times))
    assert [clock.now_us(), clock.now_us()] == [2_000_000, 2_000_000]


def test_every_store_of_an_app_has_the_same_locks_and_another_app_has_none_of_them() -> None:
    first, second = app_of("first"), app_of("second")
    with Lock("stock", app=first):
        assert [view.states for view in LockControl(first).locks().items] == [("held",)]
        assert not LockControl(second).locks().items
        with Lock("stock", app=second) as other:
            assert other.locked()


def test_stores_with_two_prefixes_share_no_lock() -> None:
    locations = locations_from_settings("memory://", {})
    one, other = (open_store(locations, timeout=1, prefix=prefix) for prefix in ("a", "b"))
    assert isinstance(one.acquire(NAME, "o.1", 30_000, REQUEST), Acquired)
    assert isinstance(other.acquire(NAME, "p.1", 30_000, REQUEST), Acquired)


def test_release_wakes_the_call_that_has_waited_for_the_longest_time(store: EngineStore, memory: MemoryBackend) -> None:
    store.acquire(NAME, "o.1", 30_000, REQUEST)
    store.acquire(NAME, "p.1", 30_000, REQUEST._replace(notify=True))
    woken: list[str] = []

    def wait(who: str) -> None:
        if store.release_listener(NAME).wait(10 if who == "first" else 0.2):
            woken.append(who)

    threads = [threading.Thread(target=wait, args=(who,)) for who in ("first", "second")]
    for number, thread in enumerate(threads, 1):
        thread.start()
        while len(memory.data(NAME).tickets) < number:
            time.sleep(0.001)
    assert store.release(NAME, "o.1", ReleaseRequest()).woke
    for thread in threads:
        thread.join()
    assert woken == ["first"]


def test_forked_process_cannot_use_the_store(store: EngineStore) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.inspect(NAME)
        except StoreUnavailable as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 200).decode().startswith(f"the store memory:// is in the memory of process {os.getpid()}, ")
    os.close(reader)
    os.close(writer)


def test_store_that_a_test_makes_fail_refuses_every_command(store: EngineStore, memory: MemoryBackend) -> None:
    memory.failure = "the test took it away"
    with pytest.raises(StoreUnavailable, match="the test took it away"):
        store.acquire(NAME, "o.1", 30_000, REQUEST)


def test_expired_records_do_not_stay_for_ever(store: EngineStore, memory: MemoryBackend, clock: MemoryClock) -> None:
    store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True))
    clock.travel(24 * 3600)
    for _ in range(10_000):
        store.inspect(NAME)
    assert memory.names.keys() == {(NAME.bucket, NAME.text)}


def test_durability_is_refused() -> None:
    with pytest.raises(
        InvalidLockOptions,
        match=r"memory:// in dlock_url has neither replicas nor a disk",
    ):
        Settings.of(app_of(dlock_durability={"replicas": 1}))


@pytest.mark.parametrize("url", ["memory://host", "memory:///x", "memory://?a=b"])
def test_url_with_anything_behind_memory_is_refused(url: str) -> None:
    with pytest.raises(InvalidLockOptions, match="expected memory:// and nothing behind it"):
        locations_from_settings(url, {})


def test_transport_options_are_refused() -> None:
    with pytest.raises(InvalidLockOptions, match="ssl needs a server, and this store is in the memory of the process"):
        locations_from_settings("memory://", {"ssl": True})


def test_call_that_ends_to_wait_leaves_the_wake_up_to_the_other_one(store: EngineStore, memory: MemoryBackend) -> None:
    store.acquire(NAME, "o.1", 30_000, REQUEST._replace(notify=True))
    store.acquire(NAME, "p.1", 30_000, REQUEST._replace(notify=True))
    woken: list[bool] = []
    first = threading.Thread(target=lambda: woken.append(store.release_listener(NAME).wait(20)))
    first.start()
    eventually(lambda: len(memory.data(NAME).tickets) == 1)
    assert not store.release_listener(NAME).wait(0.01)  # it began to wait later, and waits no longer
    assert store.release(NAME, "o.1", ReleaseRequest()).woke
    first.join(20)
    assert woken == [True]
