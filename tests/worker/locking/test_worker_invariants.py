"""Invariants of a worker: reports of losses, owners of releases, and no leaks."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from celery_dlock.locking.watchdog import FREED_WITHIN
from tests.support import lock_records
from tests.support.environments.worker import WorkerEnvironment, running_environment
from tests.support.polling import eventually
from tests.support.rx_queue import has_unread
from tests.support.workers import Worker

APP = "tests.support.apps.keeping"
TASKS = 20
WAIT = "until told to go"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path_factory.mktemp("laws"), APP) as running:
        yield running


@pytest.fixture(scope="module")
def worker(environment: WorkerEnvironment) -> Worker:
    return environment.start(concurrency=8)


# -- a lost lease is reported


def lose(environment: WorkerEnvironment, task: str, name: str, seconds: float, queue: str = "celery") -> str:
    """Start the task, take its lock away in the store, and return the lock's name."""
    getattr(environment.app, task).apply_async((name, seconds), queue=queue)
    environment.mark(name, "start")
    assert lock_records.forget(environment.store, environment.key(task, name, seconds)) == 1
    lock_name: str = getattr(environment.app, task).lock_name(name, seconds)
    return lock_name


@pytest.mark.invariant("lost-lease-is-reported")
@pytest.mark.core
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_lost_lease_is_reported_by_lease_signal_and_log(environment: WorkerEnvironment, pool: str) -> None:
    name = f"told {pool}"
    worker = environment.start("-Q", f"lose-{pool}", pool=pool, concurrency=1)
    lock_name = lose(environment, "told", name, 20.0, f"lose-{pool}")
    # The watchdog finds it at a third of the ttl, without a call by the holder.
    taken_away = eventually(lambda: environment.log.freed(environment.key("told", name, 20.0)))
    assert environment.mark(name, "held False").at - taken_away < 2.0
    environment.mark(name, "LockLost")
    told_by = eventually(lambda: environment.marks(f"lost {lock_name}"), message="no signal lock_lost")
    assert told_by[0].pid == worker.pid
    worker.wait_for_log(rf"WARNING/MainProcess\] the lease of {re.escape(lock_name)} is lost")


@pytest.mark.invariant("lost-lease-is-reported")
def test_ensure_asks_the_store_and_does_not_wait_for_the_watchdog(
    environment: WorkerEnvironment, worker: Worker
) -> None:
    # Its ttl is 60 s: the watchdog looks after 20.
    lock_name = lose(environment, "asking", "asking", 10.0)
    environment.mark("asking", "LockLost", within=5)
    # Operators learn of it, whichever process finds it.
    eventually(lambda: environment.words(f"lost {lock_name}"), message="no signal lock_lost")
    worker.wait_for_log(rf"the lease of {re.escape(lock_name)} is lost")


# -- who may release


@pytest.mark.invariant("owner-is-one-delivery", "descendants-hold-nothing")
@pytest.mark.core
@pytest.mark.usefixtures("worker")
def test_a_fork_in_a_body_neither_has_nor_releases_the_lock(environment: WorkerEnvironment) -> None:
    environment.app.forks.delay("forks", 0.5)
    end = environment.mark("forks", "return").at
    freed = environment.log.freed(environment.key("forks", "forks", 0.5), environment.mark("forks", "start").at)
    assert environment.words("forks") == ["start", "the fork gets it: False", "the fork has left", "return"]
    assert not freed or freed >= end


@pytest.mark.invariant("release-at-every-ending")
@pytest.mark.core
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("task", ["with_super", "without_super"])
def test_hooks_of_a_subclass_run_under_the_lock(environment: WorkerEnvironment, task: str) -> None:
    getattr(environment.app, task).delay(task)
    after = environment.mark(task, "after, locked: True").at
    freed = eventually(lambda: environment.log.freed(environment.key(task, task)), message="still locked")
    assert freed >= after
    assert environment.words(task) == [f"{word}, locked: True" for word in ("before", "call", "body", "after")]


@pytest.mark.invariant("lease-is-recorded-before-acquire")
def test_a_child_killed_between_asking_for_the_lock_and_hearing_of_it_leaves_no_lock(tmp_path: Path) -> None:
    with running_environment(tmp_path, APP) as environment:
        worker = environment.start(concurrency=1)
        # So that the child is connected: what it sends next is the acquire.
        environment.app.long.delay("first", "sleep", 0)
        environment.mark("first", "return")
        eventually(lambda: environment.log.freed(environment.key("long", "first", "sleep", 0)), message="still locked")
        key = environment.key("long", "second", "sleep", 0)
        environment.store.pause()
        # Results are kept there too. With a result store of its own, publishing would be seen there first.
        environment.app.long.apply_async(("second", "sleep", 0), ignore_result=True)
        assert environment.store.port is not None
        port = environment.store.port
        eventually(lambda: has_unread(port), message="the child has not asked")
        (child,) = worker.children()
        psutil.Process(child).kill()
        eventually(lambda: child not in worker.children(), message="the child lives")
        resumed = time.monotonic()
        environment.store.resume()
        taken = eventually(lambda: environment.log.taken(key), message="the dead child's acquire was not carried out")
        freed = eventually(lambda: environment.log.freed(key, taken), message="still locked")
        assert freed - resumed <= FREED_WITHIN
        assert not environment.words("second")


# -- what nothing may leak


@pytest.mark.invariant("watchdog-renews")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_one_thread_keeps_any_number_of_locks(environment: WorkerEnvironment, pool: str) -> None:
    worker = environment.start("-Q", f"keep-{pool}", pool=pool, concurrency=8)
    main = psutil.Process(worker.pid)

    def hold(task: str, numbers: range) -> None:
        for number in numbers:
            getattr(environment.app, task).apply_async((f"{pool} {task} {number}", WAIT, 30.0), queue=f"keep-{pool}")
        for number in numbers:
            environment.mark(f"{pool} {task} {number}", "start")

    def let_go(task: str, numbers: range) -> None:
        environment.marks_client.set("go", 1)
        for number in numbers:
            environment.mark(f"{pool} {task} {number}", "return")
        environment.marks_client.delete("go")

    hold("plain", range(8))  # a pool of threads makes them as it needs them
    let_go("plain", range(8))
    hold("long", range(1))
    with_one = main.num_threads()
    hold("long", range(1, 8))
    with_eight = main.num_threads()
    let_go("long", range(8))
    assert with_eight == with_one


@pytest.mark.invariant("lease-is-recorded-before-acquire", "child-per-task-leaks-nothing")
def test_many_children_leave_no_lock_no_descriptor_and_no_memory_map(tmp_path: Path) -> None:
    with running_environment(tmp_path, APP) as environment:
        worker = environment.start("--max-tasks-per-child", "1", concurrency=2)
        main = psutil.Process(worker.pid)

        def run(names: list[str]) -> None:
            for name in names:
                environment.app.long.delay(name, "sleep", 0)
            for name in names:
                environment.mark(name, "return", within=60)
            eventually(lambda: len(worker.children()) == 2, within=10, message="the pool is not whole again")

        def descriptors() -> int:
            return main.num_fds()

        def maps() -> int:
            return len(Path(f"/proc/{worker.pid}/maps").read_text().splitlines())

        run([f"before {number}" for number in range(6)])
        before = descriptors(), maps()
        run([f"task {number}" for number in range(TASKS)])
        assert len({mark.pid for number in range(TASKS) for mark in environment.marks(f"task {number}")}) == TASKS
        # A handful may be on their way; a leak would be one of each child.
        eventually(lambda: descriptors() <= before[0] + 4, message=f"descriptors: {before[0]} before, now more")
        eventually(lambda: maps() <= before[1] + 8, message=f"memory maps: {before[1]} before, now more")
        eventually(lambda: not lock_records.held(environment.store), message="locks")
