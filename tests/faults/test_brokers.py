"""The broker's connection is cut, or it is killed and restarted, while bodies run and messages were read ahead.

More of it is in tests/worker: test_redelivery.py (visibility timeout, lost connections), test_renewal.py (an outage
longer than the ttl), test_rabbitmq.py, test_queue_restarts.py and test_queue_rabbitmq.py (the queue policy).
"""

import pytest

from tests.conftest import WORKERS
from tests.support.environments.brokers import running_environment
from tests.support.polling import eventually
from tests.support.servers import Server

CONF = {
    # A worker that died leaves what it had read to the visibility timeout.
    # The last one: for so long a worker that dies while it restores keeps the others from it, else for 5 minutes.
    "redis": {
        "broker_transport_options": {
            "visibility_timeout": 5,
            "unacked_restore_interval": 0.2,
            "unacked_mutex_expire": 1,
        }
    },
    # Without confirmation a RabbitMQ that is killed may not have written what it was given a moment ago.
    "rabbitmq": {"broker_transport_options": {"confirm_publish": True}},
}


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.servers)])
def of_kind(request, tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp(request.param), request.param, CONF[request.param]) as made:
        yield made


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("impatient"), "impatient rabbitmq", CONF["rabbitmq"]) as made:
        yield made


@pytest.fixture
def environment(of_kind, request):
    return ready(of_kind, request)


def ready(environment, request):
    request.node.stash[WORKERS] = environment.workers
    if not environment.workers:
        environment.start()
    return environment


class Busy:
    """Two bodies run, one of each acknowledgement, and behind them two messages of each were read ahead."""

    def __init__(self, environment):
        tasks = environment.tasks
        self.early = environment.hold(tasks.skips, environment.fresh())
        self.late = environment.hold(tasks.skips_late, environment.fresh())
        self.ahead = [task.delay(environment.fresh()) for task in (tasks.skips, tasks.skips_late) * 2]
        for result in self.ahead:
            environment.wait_for_line(result.id, "received")

    def all(self):
        return [self.early, self.late, *self.ahead]


@pytest.mark.invariant("lost-connection-runs-nothing-twice")
def test_a_connection_that_is_cut_costs_no_run_and_doubles_none(environment):
    busy = Busy(environment)
    environment.cut()
    assert busy.early.end() == busy.early.n
    assert [result.get(timeout=30) for result in busy.ahead]
    environment.wait_for_line(busy.late.id, "is republished", 30)  # its copy
    assert environment.state(busy.late.id) == "PENDING"
    assert busy.late.end() == busy.late.n
    environment.wait_for_line(busy.late.id, "is a duplicate", 30)
    environment.wait_until_drained()
    environment.ran_once(*busy.all())


@pytest.mark.invariant("lost-connection-runs-nothing-twice")
def test_broker_that_is_killed_and_restarted_loses_and_doubles_no_run(environment):
    busy = Busy(environment)
    environment.restart()
    environment.start()  # over Redis, kombu ends a worker that has unacknowledged messages, once its bodies have ended
    assert busy.early.end() == busy.early.n
    assert busy.late.end() == busy.late.n
    assert [result.get(timeout=30) for result in busy.ahead]
    # The copy of the late one is dropped. Or there is none: the broker was back too late to receive it again from
    # kombu, and in time for the acknowledgement.
    environment.wait_until_drained()
    environment.ran_once(*busy.all())


@pytest.mark.invariant("lost-connection-runs-nothing-twice")
@pytest.mark.servers
@pytest.mark.parametrize("ended", [False, True])
def test_a_message_that_rabbitmq_takes_back_from_a_long_body_is_not_run_again(impatient, request, ended):
    """After its `consumer_timeout` it closes the channel; Celery ends the worker then, once its bodies have ended."""
    environment = ready(impatient, request)
    (worker,) = environment.workers
    holding = environment.hold(environment.tasks.skips_late, environment.fresh())
    worker.wait_for_log("delivery acknowledgement on channel 1 timed out", 20)
    if ended:
        environment.word_is_left(holding)
    else:
        environment.start()
        environment.wait_for_line(holding.id, "is republished", 20)
    assert holding.end() == holding.n
    eventually(lambda: not worker.running, 20)
    if ended:
        environment.start()
    environment.wait_for_line(holding.id, "is a duplicate", 20)
    environment.wait_until_drained()
    environment.ran_once(holding)


@pytest.mark.invariant("lost-connection-runs-nothing-twice")
@pytest.mark.parametrize("noticed", [True, False])
def test_copy_after_the_end_of_a_body_whose_broker_was_killed_does_not_run(environment, noticed):
    """The broker cannot learn of the acknowledgement, whether the worker noticed that before the end or at it."""
    holding = environment.hold(environment.tasks.skips_late, environment.fresh())
    environment.broker_process.kill()
    # Over RabbitMQ, a worker learns of an end only when it is connected again. Another worker has the copy before.
    # An end that it did not notice in time costs a second run (docs/explanation/broker-faults.md, note 2).
    if noticed or not isinstance(environment.broker_process, Server):
        environment.word_is_left(holding)
    assert holding.end() == holding.n
    environment.broker_process.start()
    environment.start()
    try:
        environment.wait_for_line(holding.id, "is a duplicate", 30)
    finally:
        environment.open(holding.gate)
    environment.wait_until_drained()
    environment.ran_once(holding)
