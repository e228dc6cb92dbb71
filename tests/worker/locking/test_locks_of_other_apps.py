"""Locks of other apps that a body in a pool child takes: the worker treats them as those of its own app."""

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from celery import Celery

from celery_dlock import Lock
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking import other_tables
from tests.support.environments.worker import WorkerEnvironment, running_environment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Worker

APP = "tests.support.apps.other_apps"
#: Longer than any test: only a release frees a lock with this ttl.
LONG = 600.0
SHORT = 2.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path_factory.mktemp("other_apps"), APP) as running:
        yield running


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The store of the other apps."""
    with Server(tmp_path_factory.mktemp("other_apps") / "elsewhere") as running:
        yield running


@pytest.fixture(scope="module")
def worker(environment: WorkerEnvironment) -> Worker:
    return environment.start(concurrency=3)


def lock_at(url: str, name: str) -> Lock:
    app = Celery("looking", broker="memory://", set_as_current=False)
    app.conf.dlock_url = url
    return Lock(name, app=app)


def holding(environment: WorkerEnvironment, task: str, row: str, url: str, ttl: float) -> int:
    """Start a task that holds the locks; return the pid of its pool child."""
    getattr(environment.app, task).delay(row, url, ttl)
    return environment.mark(row, "held").pid


def free_within(lock: Lock, seconds: float) -> float:
    began = time.monotonic()
    eventually(lambda: not lock.locked(), within=seconds, message=f"{lock} is still held")
    return time.monotonic() - began


@pytest.mark.invariant("dead-owner-is-released")
@pytest.mark.core
@pytest.mark.parametrize("task", ["plain", "locked"])
@pytest.mark.parametrize("place", ["another store", "the same store"])
def test_locks_of_two_apps_are_free_soon_after_the_death_of_their_child(
    environment: WorkerEnvironment, worker: Worker, elsewhere: Server, task: str, place: str
) -> None:
    row = f"dies {task} {place}"
    url = elsewhere.url() if place == "another store" else environment.store.lock_url()
    pid = holding(environment, task, row, url, LONG)
    locks = [lock_at(url, row), lock_at(environment.urls.lock, f"own {row}")]
    assert [lock.locked() for lock in locks] == [True, True]
    os.kill(pid, signal.SIGKILL)
    for lock in locks:
        assert free_within(lock, 5) < 5  # one second is the promise
    assert worker.running


@pytest.mark.invariant("stopped-process-keeps-or-reports")
@pytest.mark.usefixtures("worker")
def test_lock_of_another_app_is_kept_while_its_child_is_stopped(
    environment: WorkerEnvironment, elsewhere: Server
) -> None:
    row = "stopped"
    child = psutil.Process(holding(environment, "plain", row, elsewhere.url(), SHORT))
    child.suspend()
    end = time.monotonic() + 2 * SHORT
    while time.monotonic() < end:
        assert lock_at(elsewhere.url(), row).locked()
        time.sleep(0.1)
    child.resume()
    environment.marks_client.set(f"go {row}", 1)
    environment.mark(row, "still held True")
    free_within(lock_at(elsewhere.url(), row), 5)


@pytest.mark.invariant("lost-lease-is-reported")
@pytest.mark.usefixtures("worker")
def test_lost_lease_of_another_app_is_reported_and_no_other_lease(
    environment: WorkerEnvironment, elsewhere: Server
) -> None:
    row = "lost"
    holding(environment, "locked", row, elsewhere.url(), SHORT)
    lock = lock_at(elsewhere.url(), row)
    with elsewhere.client() as client:
        assert client.delete(*client.keys(f"dlock:*:lock:{lock.name}")) == 1  # type: ignore[misc]
    eventually(lambda: environment.marks(f"lost {lock.name}"), message="no signal lock_lost")
    environment.marks_client.set(f"go {row}", 1)
    environment.mark(row, "still held False")
    assert not environment.marks(f"lost {lock_at(environment.urls.lock, f'own {row}').name}")


@pytest.mark.invariant("dead-owner-is-released")
def test_locks_of_other_apps_of_a_dead_worker_are_free_when_they_are_used_again(
    environment: WorkerEnvironment, elsewhere: Server
) -> None:
    """A worker of the same name learns of the other store when a task takes a lock there."""
    node = "again@other_apps"
    urls = {"first": elsewhere.url(), "second": environment.store.lock_url()}
    first = environment.start("-Q", "again", concurrency=2, node=node)
    for row, url in urls.items():
        environment.app.plain.apply_async((row, url, LONG), queue="again")
        environment.mark(row, "held")
    for row in urls:
        eventually(lambda: recorded(elsewhere if row == "first" else environment.store, row))  # noqa: B023  # called now
        eventually(lambda: recorded(environment.store, f"own {row}"))  # noqa: B023  # called now
    environment.marks_client.flushdb()
    first.kill()
    environment.start("-Q", "again", concurrency=2, node=node)
    for row, url in urls.items():
        environment.app.plain.apply_async((row, url, LONG), queue="again")
        environment.mark(row, "held", within=15)
        environment.marks_client.set(f"go {row}", 1)


def recorded(store: Server, name: str) -> bool:
    """Return whether a worker has recorded in this store that it holds the lock."""
    with store.client() as client:
        texts: list[str] = [text for key in client.keys("dlock:*:worker:*") for text in client.hvals(key)]  # type: ignore[union-attr,misc]
    return any(shared_name(name).text in text for text in texts)


def test_locks_in_too_many_stores_are_taken_and_the_log_says_which_need_their_ttl(
    environment: WorkerEnvironment, elsewhere: Server
) -> None:
    worker = environment.start("-Q", "many", concurrency=1)
    urls = [elsewhere.url(number + 1) for number in range(other_tables.COUNT + 1)]
    environment.app.many.apply_async(("many", urls), queue="many")
    environment.mark("many", "held")
    locks = [lock_at(url, f"many {number}") for number, url in enumerate(urls)]
    for lock in locks[:-1]:
        free_within(lock, 5)
    assert locks[-1].locked()
    worker.wait_for_log(r"renews the locks of app 'many 4' itself, and if it dies, they are held until their ttl ends")
