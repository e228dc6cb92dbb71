"""Who has no task under the queue policy pays nothing for it: neither a thread nor a command to the store."""

import time

import psutil
import pytest

from celery_dlock import Lock
from tests.apps.queueing_stage import staged
from tests.servers import Server
from tests.waiting import eventually
from tests.workers import Urls, loaded_app, running_worker

pytestmark = pytest.mark.xdist_group("queue-absent")

#: A worker with queues asks the store ten times a second.
LOOK = 1.0


def scripts(server):
    """How many scripts the store has run."""
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


def commands(server):
    with server.client() as client:
        return client.info("stats")["total_commands_processed"]


def asked_within(server, seconds):
    """Commands that reach the store within so many seconds, beside our own looks."""
    before, end = commands(server), time.monotonic() + seconds
    # Our own: each look greets, and asks once.
    own = commands(server) - before
    before = commands(server)
    eventually(lambda: time.monotonic() > end, within=seconds + 5, every=0.1)
    return commands(server) - before - own


@pytest.fixture
def lock_server(tmp_path):
    with Server(tmp_path / "locks") as server:
        yield server


def test_a_worker_without_queues_asks_the_store_nothing_of_its_own_accord(clean_server, lock_server, tmp_path):
    urls = Urls(clean_server.url(0), clean_server.url(1), lock_server.url(0))
    with (
        loaded_app("tests.apps.canvas", urls) as tasks,
        running_worker("tests.apps.canvas", folder=tmp_path, urls=urls, concurrency=1) as worker,
    ):
        assert "append-only" not in worker.log()
        assert asked_within(lock_server, LOOK) == 0
        assert tasks.step.delay("warm").get(timeout=10)
        # Each of the two is sent by its digest first, which the store does not know yet.
        eventually(lambda: scripts(lock_server) == 4, message="the first run is two scripts")
        before, threads = scripts(lock_server), psutil.Process(worker.pid).num_threads()
        results = [tasks.step.delay(f"n{number}") for number in range(20)]
        for result in results:
            result.get(timeout=10)
        # To take and to give back, as before there was a queue.
        eventually(lambda: scripts(lock_server) - before == 40, message="20 runs are 40 scripts")
        assert asked_within(lock_server, LOOK) == 0
        assert psutil.Process(worker.pid).num_threads() == threads


def test_a_worker_with_queues_is_told_from_one_without_by_this(tmp_path):
    with staged(tmp_path, separate=True, concurrency=1) as stage:
        assert stage.worker.running
        assert asked_within(stage.lock_server, LOOK) >= 5


def test_a_publisher_needs_no_store_and_gets_no_thread(clean_server):
    nowhere = "redis://127.0.0.1:9/0"
    with loaded_app("tests.apps.queueing", Urls(clean_server.url(0), clean_server.url(1), nowhere)) as tasks:
        tasks.plain.delay("warm")
        threads = psutil.Process().num_threads()
        start = time.monotonic()
        for number in range(50):
            tasks.early.delay(f"n{number}")
        assert time.monotonic() - start < 2
        assert psutil.Process().num_threads() <= threads
        assert tasks.early.dlock.sweeper is None
        with clean_server.client() as client:
            assert client.llen("celery") == 51


def test_a_program_that_takes_a_lock_sweeps_nothing(clean_server, lock_server):
    urls = Urls(clean_server.url(0), clean_server.url(1), lock_server.url(0))
    with loaded_app("tests.apps.queueing", urls) as tasks:
        with Lock("one", app=tasks.app):
            before = scripts(lock_server)
            assert asked_within(lock_server, 0.3) == 0
            assert scripts(lock_server) == before
        assert tasks.early.dlock.sweeper is None
