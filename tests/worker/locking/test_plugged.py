"""A worker whose log, listeners and background threads fail again and again keeps its locks and its queues."""

import itertools
import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.environments.worker import WorkerEnvironment, running_environment
from tests.support.polling import eventually
from tests.support.workers import Worker

APP = "tests.support.apps.plugged"
POOLS = ["prefork", "threads", "gevent"]
TTL = 1.0
LONG = 3.5 * TTL


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path_factory.mktemp("plugged"), APP) as running:
        yield running


@pytest.fixture(scope="module")
def workers(environment: WorkerEnvironment) -> dict[str, Worker]:
    """One of each pool, in which a lease is lost while another is held: listener and log raise SystemExit."""
    started = {pool: environment.start("-Q", pool, pool=pool) for pool in POOLS}
    for pool in POOLS:
        for row in ("lost", "kept"):
            environment.app.kept.apply_async((f"{row} {pool}", LONG), queue=pool)
    for pool in POOLS:
        environment.mark(f"lost {pool}", "start")
        environment.store_client.delete(environment.key("kept", f"lost {pool}", LONG))
        environment.mark(f"kept {pool}", "start")
    return started


@pytest.mark.invariant("plugins-do-not-stop-threads", "thread-start-is-retried")
@pytest.mark.parametrize("pool", POOLS)
def test_watchdog_beside_a_log_and_a_listener_that_raise_renews(
    environment: WorkerEnvironment, workers: dict[str, Worker], pool: str
) -> None:
    row = f"kept {pool}"
    start, end = environment.mark(row, "start").at, environment.mark(row, "return").at
    assert end - start > 3 * TTL
    freed = eventually(lambda: environment.log.freed(environment.key("kept", row, LONG), start))
    assert 0 <= freed - end <= 5 * 0.4
    lost = environment.app.kept.lock_name(f"lost {pool}", LONG)
    eventually(lambda: lost in environment.words("lost"), message="the listener was not told")
    assert "celery_dlock: a log handler or filter failed" in workers[pool].log()


@pytest.mark.invariant("plugins-do-not-stop-threads")
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.usefixtures("workers")
def test_sweeper_beside_a_log_and_a_listener_that_raise_hands_off(environment: WorkerEnvironment, pool: str) -> None:
    """The child of the first one is killed (prefork), so only the sweeper can hand the lock over."""
    first, second = f"first {pool}", f"second {pool}"
    environment.app.queued.apply_async((pool, first, 60.0 if pool == "prefork" else 1.0), queue=pool)
    start = environment.mark(first, "start")
    waiter = environment.app.queued.apply_async((pool, second, 0.0), queue=pool)
    eventually(lambda: waiter.state == "QUEUED" or environment.marks(second), message="it does not wait")
    if pool == "prefork":
        os.kill(start.pid, signal.SIGKILL)
    environment.mark(second, "return")


def test_child_whose_worker_has_a_hanging_watchdog_says_so(environment: WorkerEnvironment) -> None:
    worker = environment.start("-Q", "hangs", concurrency=1, environ={"DLOCK_TEST_HANG": "1"})
    numbers = itertools.count()

    def said() -> bool:
        environment.app.kept.apply_async((f"hangs {next(numbers)}", 0.0), queue="hangs")
        return "the watchdog has not looked at the leases of this process for" in worker.log()

    eventually(said, within=10, every=0.2)
    assert re.search(
        r"ERROR/ForkPoolWorker-1\] tests.support.apps.plugged.kept:\S+: the watchdog has not", worker.log()
    )
