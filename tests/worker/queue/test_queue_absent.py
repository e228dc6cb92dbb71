"""An app without the queue policy pays next to nothing: its workers look twice a minute, all others never."""

import time
from collections import Counter

import psutil
import pytest

from celery_dlock import Lock
from celery_dlock.runtime import NO_WORKER
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

#: A worker with queues asks the store ten times a second.
LOOK = 1.0


def scripts(server):
    """Return how many scripts the store has run, except for crash records.

    A slow watchdog may note a lock that it sees at two of its looks. Such a note is one HSET or HDEL. An acquire has
    one HSET and one SET, and a release none.
    """
    told = commands(server)
    notes = told["cmdstat_hdel"] + told["cmdstat_hset"] - told["cmdstat_set"]
    return told["cmdstat_eval"] + told["cmdstat_evalsha"] - notes


def commands(server):
    """Return how often each command has reached the store."""
    with server.client() as client:
        return Counter({name: stats["calls"] for name, stats in client.info("commandstats").items()})


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


@pytest.mark.invariant("unused-queue-costs-little")
def test_a_worker_without_queues_asks_the_store_nothing_between_two_rare_looks(clean_server, lock_server, tmp_path):
    urls = Urls(clean_server.url(0), clean_server.url(1), lock_server.url(0))
    with (
        loaded_app("tests.support.apps.canvas", urls) as tasks,
        running_worker("tests.support.apps.canvas", folder=tmp_path, urls=urls, concurrency=1) as worker,
    ):
        assert "append-only" not in worker.log()
        # At its start it looks whether calls that chose to wait are still there, and then twice a minute.
        eventually(lambda: not asked_within(lock_server, LOOK), 10)
        before = scripts(lock_server)
        assert tasks.step.delay("warm").get(timeout=10)
        # Each of the two is sent by its digest first, which the store does not know yet.
        eventually(lambda: scripts(lock_server) - before == 4, message="the first run is two scripts")
        before, threads = scripts(lock_server), psutil.Process(worker.pid).num_threads()
        results = [tasks.step.delay(f"n{number}") for number in range(20)]
        for result in results:
            result.get(timeout=10)
        # To acquire and to release, as before there was a queue.
        eventually(lambda: scripts(lock_server) - before == 40, message="20 runs are 40 scripts")
        assert not asked_within(lock_server, LOOK)
        assert psutil.Process(worker.pid).num_threads() == threads


@pytest.mark.invariant("unused-queue-costs-little")
def test_a_call_that_chose_to_wait_runs_though_the_one_worker_that_knew_of_it_died(clean_server, lock_server, tmp_path):
    """No task of the app queues, and the other worker found no waiter at its start: expected, it looks again."""
    app, urls = "tests.support.apps.unqueued", Urls(clean_server.url(0), clean_server.url(1), lock_server.url(0))
    with (
        loaded_app(app, urls) as tasks,
        running_worker(app, "-Q", "other", folder=tmp_path / "other", urls=urls, concurrency=1) as other,
        running_worker(app, "-Q", "first", folder=tmp_path / "first", urls=urls) as first,
    ):
        tasks.post.apply_async(("n", "shut"), queue="first")
        eventually(tasks.post.lock_for("n").locked, 10)
        waits = tasks.post.apply_async(("n",), queue="first", dlock={"on_conflict": "queue"})
        eventually(lambda: tasks.post.waiting("n").count == 1, 10)
        first.kill()
        tasks.app.control.add_consumer("first", destination=[other.node], reply=True)
        assert waits.get(timeout=20) == "n"


def test_worker_with_queues_asks_the_store_within_the_same_time(tmp_path):
    with running_environment(tmp_path, separate=True, concurrency=1) as environment:
        assert environment.worker.running
        assert asked_within(environment.lock_server, LOOK).total() >= 5


@pytest.mark.invariant("unused-queue-costs-little")
def test_a_publisher_needs_no_store_and_gets_no_thread(clean_server):
    nowhere = "redis://127.0.0.1:9/0"
    with loaded_app("tests.support.apps.queueing", Urls(clean_server.url(0), clean_server.url(1), nowhere)) as tasks:
        tasks.plain.delay("warm")
        threads = psutil.Process().num_threads()
        start = time.monotonic()
        for number in range(50):
            tasks.early.delay(f"n{number}")
        assert time.monotonic() - start < 2
        assert psutil.Process().num_threads() <= threads
        assert tasks.early.dlock.worker is NO_WORKER
        with clean_server.client() as client:
            assert client.llen("celery") == 51


def test_a_program_that_takes_a_lock_sweeps_nothing(clean_server, lock_server):
    urls = Urls(clean_server.url(0), clean_server.url(1), lock_server.url(0))
    with loaded_app("tests.support.apps.queueing", urls) as tasks:
        with Lock("one", app=tasks.app):
            before = scripts(lock_server)
            assert not asked_within(lock_server, 0.3)
            assert scripts(lock_server) == before
        assert tasks.early.dlock.worker is NO_WORKER
