"""Tasks wait while the store, the broker or all workers stop and restart: all of them run, in order, once."""

import itertools
import json
import signal

import pytest
import redis

from tests.conftest import WORKERS
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.queue_kills"
accounts = (f"restart-{number}" for number in itertools.count(1))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restarts")
    with (
        Server(folder / "broker", persistent=True) as broker,
        Server(folder / "store", persistent=True) as store,
        Server(folder / "results") as results,
    ):
        yield broker, store, results


@pytest.fixture
def environment(servers, tmp_path, request):
    broker, store, results = servers
    urls = Urls(broker.url(), results.url(), store.url())
    with loaded_app(APP, urls) as module, redis.Redis.from_url(urls.result) as notes:
        yield Environment(module.post, notes, urls, tmp_path, request.node.stash.setdefault(WORKERS, []))


class Environment:
    def __init__(self, post, notes, urls, folder, workers):
        self.post, self.notes, self.urls, self.folder, self.workers = post, notes, urls, folder, workers
        self.account = next(accounts)

    def worker(self):
        return running_worker(APP, folder=self.folder, urls=self.urls, concurrency=2)

    def numbers(self, what):
        noted = [json.loads(text) for text in self.notes.lrange(f"runs:{self.account}", 0, -1)]
        return [number for word, number, _ in noted if word == what]

    def three_wait(self):
        """1 runs until its gate goes; 2, 3 and 4 are parked behind it."""
        self.notes.set(f"gate:{self.account}:1", 1)
        for number in (1, 2, 3, 4):
            self.post.delay(self.account, number)
            eventually(lambda: self.numbers("in") == [1])
            eventually(lambda count=number - 1: self.waiting() == count)

    def waiting(self):
        return self.post.waiting(self.account, 0).count

    def go(self):
        self.notes.delete(f"gate:{self.account}:1")

    def waiters_ran_in_order_once(self):
        """... whatever became of the holder: it runs at least once."""
        eventually(lambda: set(self.numbers("out")) == {1, 2, 3, 4}, 30, message="not all of 1, 2, 3 and 4 ran")
        for what in ("in", "out"):
            assert [number for number in self.numbers(what) if number != 1] == [2, 3, 4]

    def all_ran_in_order_once(self):
        eventually(lambda: set(self.numbers("out")) == {1, 2, 3, 4}, 30, message="not all of 1, 2, 3 and 4 ran")
        assert self.numbers("in") == self.numbers("out") == [1, 2, 3, 4]
        eventually(lambda: self.waiting() == 0)


def test_the_store_restarts_with_its_append_only_file(servers, environment):
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.three_wait()
        servers[1].restart()
        environment.go()
        environment.all_ran_in_order_once()
        assert "in a store that is not durable" not in worker.log()


@pytest.mark.invariant("queue-survives-faults")
def test_the_broker_restarts(servers, environment):
    """Waiters are in the store.

    Kombu may end a worker that has an unacknowledged message at that moment, with an AttributeError of its own. Then
    the holder was killed, and a new worker goes on.
    """
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.three_wait()
        servers[0].restart()
        environment.go()
        with environment.worker() as another:
            environment.workers.append(another)
            environment.waiters_ran_in_order_once()


@pytest.mark.invariant("queue-survives-faults")
def test_all_workers_stop_and_start(environment):
    """The holder ends in the warm shutdown and publishes the grant. The next worker finds the message at the broker."""
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.three_wait()
        environment.go()
        worker.stop()
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.all_ran_in_order_once()


@pytest.mark.invariant("prefetched-messages-are-kept")
def test_stopped_worker_without_prefetch_keeps_the_order_of_its_messages(environment):
    """Else kombu gives it back to a Redis broker in reverse."""
    busy = [f"{environment.account}-{slot}" for slot in range(2)]
    with running_worker(
        APP, "--prefetch-multiplier=1", folder=environment.folder, urls=environment.urls, concurrency=2
    ) as worker:
        environment.workers.append(worker)
        for other in busy:
            environment.notes.set(f"gate:{other}:0", 1)
            environment.post.delay(other, 0)
        eventually(
            lambda: all(environment.notes.llen(f"runs:{other}") for other in busy), message="not both slots are busy"
        )
        for number in (1, 2, 3, 4):
            environment.post.delay(environment.account, number)
        for _ in range(3):  # rounds of its event loop, in which it would read them
            eventually(lambda: environment.post.app.control.ping([worker.node], timeout=0.5), 10)
        worker.signal(signal.SIGTERM)
        worker.wait_for_log("Warm shutdown")
        for other in busy:
            environment.notes.delete(f"gate:{other}:0")
        worker.process.wait(30)
    assert environment.numbers("in") == []
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.all_ran_in_order_once()


def test_all_workers_are_killed_and_started(environment):
    """The holder is killed with them: its lease ends, and a sweep grants the next. Its own message comes later."""
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.three_wait()
        worker.kill()
    environment.go()
    with environment.worker() as worker:
        environment.workers.append(worker)
        environment.waiters_ran_in_order_once()


def test_a_store_without_an_append_only_file_is_warned_of_once(servers, environment):
    environment.urls = Urls(servers[0].url(1), servers[2].url(), servers[2].url(2))
    with environment.worker() as worker:
        worker.wait_for_log("parked in a store that is not durable")
        eventually(lambda: worker.log().count("in a store that is not durable") == 1)
