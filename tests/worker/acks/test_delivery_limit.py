"""RabbitMQ drops a message of a quorum queue that is requeued too often. Refused republications must not lead there."""

from types import SimpleNamespace

import pytest

from celery_dlock import LockHeld
from tests.conftest import WORKERS
from tests.support.environments.rabbitmq import running_environment
from tests.support.polling import eventually

pytestmark = pytest.mark.servers

#: A user who may do everything but write to the default exchange.
ALL_BUT_DEFAULT = r"^(?!amq\.default$).*"
#: Nor may such a user delay messages.
NO_DELAYED = r"^(?!amq\.default$|celery_delayed_).*"
LIMIT = 3
CONF = {
    "task_queues": {
        "counted": {
            "exchange": "counted",
            "exchange_type": "topic",
            "routing_key": "counted",
            "queue_arguments": {"x-queue-type": "quorum", "x-delivery-limit": LIMIT},
        }
    },
    "task_default_queue": "counted",
}
RETRIES = {"on_conflict": "retry", "retry_delay": 0.1, "retry_delay_max": 0.4}
#: Calls beside their holder: as many as the worker has slots left.
CALLS = 3


@pytest.fixture(scope="module")
def environment(broker, tmp_path_factory):
    """Its user may not republish until the test grants the right."""
    url = broker.url_of("counting", writes=ALL_BUT_DEFAULT)
    with running_environment(tmp_path_factory.mktemp("counted"), SimpleNamespace(url=url), CONF) as made:
        yield made


@pytest.fixture
def refusing(environment, broker, request):
    request.node.stash[WORKERS] = environment.workers
    broker.grant("counting", writes=ALL_BUT_DEFAULT)
    yield environment
    environment.let_all_go()


def refused_too_often(environment, calls):
    """Wait until each call was refused more often than the broker would have taken it back."""
    for call in calls:
        eventually(lambda call=call: len(environment.lines(call.id, "cannot be republished")) > LIMIT + 1, 40)


@pytest.mark.invariant("republishing-is-confirmed")
# First without the right: RabbitMQ lets a channel use a right for some seconds after it was taken away.
@pytest.mark.parametrize("granted", [False, True])
def test_calls_that_cannot_be_republished_outlive_the_delivery_limit(refusing, broker, granted):
    """They run once their lock is free, or once the broker takes their messages."""
    task, n = refusing.tasks.late, refusing.fresh()
    holding = refusing.hold(task, n)
    calls = [task.apply_async((n,), dlock=RETRIES) for _ in range(CALLS)]
    refused_too_often(refusing, calls)
    if granted:
        broker.grant("counting", writes=".*")
        for call in calls:
            refusing.wait_for_line(call.id, "is republished", 30)
    assert holding.end() == n
    assert [call.get(timeout=30) for call in calls] == [n] * CALLS
    assert refusing.overlaps(n) == 1


@pytest.mark.invariant("republishing-is-confirmed")
def test_queued_calls_without_store_and_republication_outlive_the_delivery_limit(refusing, broker):
    task, n = refusing.tasks.late, refusing.fresh()
    refusing.lock_server.kill()
    calls = [task.delay(n) for _ in range(CALLS)]
    refused_too_often(refusing, calls)
    refusing.lock_server.start()
    broker.grant("counting", writes=".*")
    assert [call.get(timeout=40) for call in calls] == [n] * CALLS
    assert refusing.overlaps(n) == 1


@pytest.mark.slow
@pytest.mark.invariant("republishing-is-confirmed")
def test_call_that_cannot_be_republished_for_long_ends_with_a_stored_failure(refusing):
    task, n = refusing.tasks.late, refusing.fresh()
    with task.lock_for(n):
        call = task.apply_async((n,), dlock=RETRIES)
        with pytest.raises(LockHeld):
            call.get(timeout=90)
    assert "ERROR" in refusing.wait_for_line(call.id, "cannot be republished; it fails")
    assert refusing.history(id=call.id) == []


@pytest.mark.invariant("killed-worker-runs-again")
def test_redelivery_that_cannot_be_republished_runs_when_the_dead_lease_ends(refusing, broker):
    task, n = refusing.tasks.late, refusing.fresh()
    holding = refusing.hold(task, n, dlock={**RETRIES, "ttl": 10})
    killed = refusing.worker
    refusing.start()
    broker.grant("counting", writes=NO_DELAYED)
    killed.kill()
    refusing.wait_for_line(holding.id, "cannot be republished", 20)
    assert holding.result.get(timeout=40) == n
    assert len(refusing.history(id=holding.id, what="in")) == 2
