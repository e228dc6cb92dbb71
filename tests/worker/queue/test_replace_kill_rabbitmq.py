"""``stop`` with seconds on RabbitMQ: the message of a killed body is acknowledged, whatever the type of its queue."""

import pytest
from celery.exceptions import TaskRevokedError

from tests.conftest import WORKERS
from tests.support.environments.rabbitmq import running_environment

pytestmark = [pytest.mark.servers, pytest.mark.slow]

#: Seconds of a body that is to be killed, and of the wait for an end.
LONG, ENDED = 40, 30
QUEUES = {"classic": {}, "quorum": {"x-queue-type": "quorum", "x-delivery-limit": 5}}


@pytest.fixture(scope="module", params=QUEUES)
def of_kind(request, broker, tmp_path_factory):
    name = f"{request.param}-kills"
    queue = {"exchange": name, "exchange_type": "topic", "routing_key": name, "queue_arguments": QUEUES[request.param]}
    conf = {"task_queues": {name: queue}, "task_default_queue": name}
    folder = tmp_path_factory.mktemp(request.param)
    with running_environment(folder, broker, conf, app="tests.support.apps.replacing") as made:
        made.queue = name
        yield made


@pytest.fixture
def environment(of_kind, request):
    request.node.stash[WORKERS] = of_kind.workers
    return of_kind


@pytest.mark.invariant("newest-call-stops-the-running-one")
@pytest.mark.parametrize("kind", ["killed", "killed_early", "killed_at_once"])
def test_killed_body_runs_once_and_its_message_is_gone(environment, kind):
    n, task = environment.fresh(), getattr(environment.tasks, kind)
    older = task.delay(n, LONG, "stubborn")
    environment.entered(id=older.id)
    newer = task.delay(n, 0.1)
    assert newer.get(timeout=ENDED) == n
    with pytest.raises(TaskRevokedError, match=f"replaced by {newer.id}"):
        older.get(timeout=ENDED)
    assert environment.lines(older.id, "is killed with pool child")
    # The worker stops, and so returns what it has not acknowledged.
    environment.worker.stop()
    assert environment.queued(environment.queue) == 0
    environment.start()
    assert [fact["what"] for fact in environment.history(id=older.id)] == ["in"]
    (entered,) = environment.history(id=newer.id, what="in")
    assert float(environment.client.get(f"beat:{older.id}")) < entered["at"]
    assert environment.state(older.id) == "REVOKED"
