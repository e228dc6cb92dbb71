"""The queue policy on RabbitMQ: parked in the lock store, published back to the broker, in order, none lost."""

import json
import os
import random
import signal
import time
from contextlib import ExitStack

import pytest
import redis
from kombu import Connection

from tests.conftest import WORKERS
from tests.support.environments.rabbitmq import running_environment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

pytestmark = pytest.mark.servers


def queues(**arguments):
    """Named here: a worker that learns by remote control to read a queue does not know of which kind it is."""
    return {
        name: {"exchange": "celery", "routing_key": name, "queue_arguments": arguments}
        for name in ("celery", "parcels")
    }


QUEUES = {
    "classic": {"task_queues": queues(**{"x-max-priority": 10})},
    "quorum": {
        "task_queues": queues(**{"x-queue-type": "quorum"}),
        "broker_transport_options": {"confirm_publish": True},
    },
}
COMBINATIONS = [("json", None), ("pickle", "zlib"), ("yaml", "bzip2")]
HEADERS = {"x-tenant": "acme ü", "trace": {"id": 2**60, "deep": [1, None, 2.5, ""]}, "dlock-like": True}


@pytest.fixture(scope="module", params=QUEUES)
def of_kind(request, broker, tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp(request.param), broker, QUEUES[request.param]) as made:
        yield made
    with Connection(broker.url) as connection:
        for queue in QUEUES[request.param]["task_queues"]:
            connection.default_channel.queue_delete(queue)


@pytest.fixture
def environment(of_kind, request):
    request.node.stash[WORKERS] = of_kind.workers
    yield of_kind
    of_kind.let_all_go()


def all_ran_once_in_order(environment, n, holding, results):
    assert [result.get(timeout=30) for result in results] == [n] * len(results)
    assert environment.order(n) == [holding.id, *(result.id for result in results)]
    assert environment.overlaps(n) == 1


@pytest.mark.parametrize("name", ["early", "late"])
def test_waiters_run_once_in_order_and_no_message_is_left(environment, name):
    task, n = getattr(environment.tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    results = environment.park(task, n, 5)
    assert environment.queued() == 0
    assert holding.end() == n
    all_ran_once_in_order(environment, n, holding, results)
    environment.wait_until_drained()


@pytest.mark.invariant("queue-survives-faults")
@pytest.mark.parametrize(("serializer", "compression"), COMBINATIONS)
def test_parked_message_is_published_unchanged(environment, serializer, compression):
    n = environment.fresh()
    lock = environment.tasks.parcel.lock_for(n)
    assert lock.acquire(blocking=False)
    environment.ignore("parcels")
    result = environment.tasks.parcel.apply_async(
        (n,),
        {"secret": "pässwort\n"},
        queue="parcels",
        serializer=serializer,
        compression=compression,
        priority=3,
        expires=60,
        argsrepr="('***',)",
        kwargsrepr="{}",
        time_limit=50,
        headers=HEADERS,
        reply_to="somebody",
    )
    first = environment.take("parcels", back=True)
    environment.consume("parcels")
    environment.parked(environment.tasks.parcel, n, result)
    environment.ignore("parcels")
    lock.release()
    second = environment.take("parcels")
    assert second.body == first.body
    its, mine = dict(second.properties), dict(first.properties)
    headers = its.pop("application_headers")
    assert headers.pop("dlock")["conflict_retries"] == 1
    assert headers == mine.pop("application_headers")
    assert its["priority"] == 3
    assert 0 < int(its.pop("expiration")) < int(mine.pop("expiration"))
    assert its == mine


@pytest.mark.invariant("queue-survives-faults")
def test_holder_whose_child_is_killed_hands_off_soon_and_runs_again(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.comes_back, n)
    results = environment.park(environment.tasks.comes_back, n, 2)
    (body,) = environment.history(what="in", id=holding.id)
    killed = time.monotonic()
    os.kill(body["pid"], signal.SIGKILL)
    assert environment.entered(id=results[0].id)[0]["at"] - killed < 2  # one second of it is the promise, for the lock
    assert [result.get(timeout=15) for result in results] == [n, n]
    environment.open(holding.gate)
    assert holding.result.get(timeout=15) == n
    environment.wait_until_drained()
    first, *rest = environment.order(n)
    assert first == holding.id
    assert sorted(rest) == sorted([holding.id, *(result.id for result in results)])
    assert [one for one in rest if one != holding.id] == [result.id for result in results]


@pytest.mark.invariant("queue-survives-faults")
@pytest.mark.parametrize("name", ["early", "late"])
def test_a_worker_stops_and_another_starts_while_tasks_wait(environment, name):
    task, n = getattr(environment.tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    results = environment.park(task, n, 3)
    holding.let_go()
    environment.worker.stop()  # the holder ends first, and grants the lock to no waiter
    environment.start()
    all_ran_once_in_order(environment, n, holding, results)


@pytest.mark.invariant("killed-worker-runs-again")
def test_killed_worker_runs_its_late_holder_twice_and_no_waiter(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.late_brief, n)
    results = environment.park(environment.tasks.late_brief, n, 3)
    environment.worker.kill()
    environment.open(holding.gate)
    environment.start()
    assert [result.get(timeout=30) for result in (holding.result, *results)] == [n] * 4
    assert [one for one in environment.order(n) if one != holding.id] == [result.id for result in results]
    assert len(environment.history(what="in", id=holding.id)) == 2


@pytest.mark.invariant("queue-survives-faults")
@pytest.mark.parametrize("name", ["early", "late"])
def test_the_broker_is_killed_and_starts_again_while_a_body_runs_and_others_wait(environment, broker, name):
    task, n = getattr(environment.tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    results = environment.park(task, n, 3)
    broker.kill()
    broker.start()
    assert holding.end() == n
    all_ran_once_in_order(environment, n, holding, results)
    environment.wait_until_drained()


@pytest.mark.invariant("queue-survives-faults")
def test_a_turn_that_comes_while_the_broker_is_away_is_published_when_it_is_back(environment, broker):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.early, n)
    results = environment.park(environment.tasks.early, n, 2)
    broker.kill()
    try:
        holding.let_go()
        eventually(lambda: environment.history(what="out", id=holding.id))
    finally:
        broker.start()
    all_ran_once_in_order(environment, n, holding, results)


class LedgerRun:
    """Calls of some accounts that all wait for their locks, two workers that run them, and kills meanwhile."""

    NAMES = 5

    def __init__(self, folder, broker, stack):
        server = stack.enter_context(Server(folder / "server"))
        self.urls = Urls(broker.url, server.url(1), server.lock_url(2))
        self.tasks = stack.enter_context(loaded_app("tests.support.apps.queue_e2e", self.urls))
        self.notes = stack.enter_context(redis.Redis.from_url(self.urls.result))
        self.folder, self.stack, self.random = folder, stack, random.Random(24)
        self.killed, self.workers = set(), [self.start(), self.start()]

    def start(self):
        options = {"folder": self.folder, "urls": self.urls, "concurrency": 3}
        return self.stack.enter_context(running_worker("tests.support.apps.queue_e2e", "-Q", "ledger", **options))

    def park(self, calls):
        """Send so many calls while a program holds all locks, until all of them wait."""
        ledger = self.tasks.ledger
        locks = [ledger.lock_for(account, 0) for account in range(self.NAMES)]
        for lock in locks:
            assert lock.acquire(blocking=False)
        for number in range(calls):
            ledger.apply_async((number % self.NAMES, number), queue="ledger")
        eventually(lambda: self.waiting() == calls, 60, message=f"not all of {calls} wait")
        for lock in locks:
            lock.release()

    def waiting(self):
        return sum(self.tasks.ledger.waiting(account, 0).count for account in range(self.NAMES))

    def is_over(self):
        return not (self.waiting() or any(self.tasks.ledger.lock_for(n, 0).locked() for n in range(self.NAMES)))

    def kill_worker(self):
        place = self.random.randrange(2)
        worker = self.workers[place]
        self.killed.update(worker.children())
        worker.kill()
        self.workers[place] = self.start()

    def kill_child(self):
        worker = self.random.choice(self.workers)
        child = self.random.choice(worker.children())
        self.killed.add(child)
        os.kill(child, signal.SIGKILL)
        # Until Celery sees the death, the message is not acknowledged. If its worker is killed then, the call runs
        # again, after the calls that were granted the lock meanwhile.
        worker.wait_for_log(f"pid:{child} exited", 30)
        acknowledged = time.monotonic() + 2
        eventually(lambda: time.monotonic() > acknowledged)

    def noted(self):
        return [json.loads(text) for text in self.notes.lrange("e2e", 0, -1)]

    def ended(self):
        """The calls that have run to their end, or whose child was killed."""
        noted = self.noted()
        cut = {number for word, _, number, pid in noted if word == "in" and pid in self.killed}
        return {number for word, _, number, _ in noted if word == "out"} | cut


@pytest.mark.invariant("running-message-is-no-waiter", "queue-order-is-by-rank")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("calls", "kills"),
    [(40, ["worker", "child"]), pytest.param(500, ["worker", "child"] * 4, marks=pytest.mark.slow)],
)
def test_waiters_start_in_their_order_although_workers_and_children_are_killed(broker, tmp_path, request, calls, kills):
    """A call whose worker was killed in its body runs again before the next one of its account starts."""
    with ExitStack() as stack:
        run = LedgerRun(tmp_path, broker, stack)
        request.node.stash[WORKERS] = run.workers
        run.park(calls)
        for place, victim in enumerate(kills, 1):
            eventually(lambda after=place: len(run.ended()) >= calls * after / (len(kills) + 2), 120)
            getattr(run, f"kill_{victim}")()
        eventually(run.is_over, 120, every=0.2, message="calls still wait")
        # A child that is killed before its body begins notes nothing.
        assert len(run.ended()) >= calls - kills.count("child")
        began, over = {}, set()
        for word, account, number, _ in run.noted():
            if word == "out":
                over.add(number)
            # A call that had ended when its worker was killed before the acknowledgement runs again later.
            elif number not in over:
                began.setdefault(account, []).append(number)
        wrong = {account: numbers for account, numbers in began.items() if numbers != sorted(numbers)}
        assert not wrong, [fact for fact in run.noted() if fact[1] in wrong]
