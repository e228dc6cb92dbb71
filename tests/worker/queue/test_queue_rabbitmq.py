"""The queue policy on RabbitMQ: parked in the lock store, published back to the broker, in order, none lost."""

import os
import signal
import time

import pytest
from kombu import Connection

from tests.conftest import WORKERS
from tests.support.environments.rabbitmq import running_environment
from tests.support.polling import eventually

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
