"""RabbitMQ drops some messages in silence. What the library republishes is confirmed, or counts as not published."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_dlock import LockHeld
from celery_dlock.messaging import publishing
from celery_dlock.messaging.publishing import publish, refused_right
from tests.conftest import WORKERS
from tests.support.environments.policies import APP, PolicyEnvironment
from tests.support.environments.rabbitmq import running_environment as queue_environment
from tests.support.polling import eventually
from tests.support.workers import Urls, loaded_app, running_worker

pytestmark = pytest.mark.servers

#: A user who may do everything but write to the default exchange.
ALL_BUT_DEFAULT = r"^(?!amq\.default$).*"
FIELDS = {"content_type": "application/json", "content_encoding": "utf-8"}
#: Celery itself publishes to a queue of a topic exchange through that exchange.
CONF = {"task_queues": {"celery": {"exchange": "tasks", "exchange_type": "topic", "routing_key": "celery"}}}
#: Beside the worker of the other tests, which does not know these tasks.
QUEUE_CONF = {
    "task_queues": {"waiters": {"exchange": "waiting", "exchange_type": "topic", "routing_key": "waiters"}},
    "task_default_queue": "waiters",
}


@pytest.fixture
def app(broker):
    made = Celery("publisher", broker=broker.url, set_as_current=False)
    with made.connection_for_write() as connection:
        channel = connection.default_channel
        channel.queue_declare("plain", durable=True)
        channel.queue_declare("full", durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        channel.queue_purge("plain")
        channel.queue_purge("full")
    yield made
    made.close()


def sent(app, queue, producers=None, **headers):
    publish(app, producers or app.producer_or_acquire, queue, "[]", {"task": "t", "id": "i", **headers}, FIELDS)


def lying(app, queue):
    with app.connection_for_write() as connection:
        return connection.default_channel.queue_declare(queue, passive=True).message_count


# One message


def test_message_for_a_queue_that_is_gone_is_an_error(app):
    with pytest.raises(Exception, match="NO_ROUTE"):
        sent(app, "nowhere")
    sent(app, "plain")
    assert lying(app, "plain") == 1


def test_message_that_the_broker_refuses_is_an_error(app):
    sent(app, "full")
    with pytest.raises(OperationalError):
        sent(app, "full")
    assert lying(app, "full") == 1


def test_message_without_the_right_to_publish_is_an_error(app, broker):
    app.conf.broker_url = broker.url_of("lacking", writes=ALL_BUT_DEFAULT)
    with pytest.raises(Exception, match="ACCESS_REFUSED"):
        sent(app, "plain")
    with app.connection_for_write() as connection:
        assert "amq.default" in refused_right(connection)


def test_right_to_publish_is_seen_and_leaves_no_message(app):
    with app.connection_for_write() as connection:
        assert refused_right(connection) == ""
        assert refused_right(connection) == ""


def test_confirmed_messages_share_a_connection_with_others(app):
    """Celery's channel of that connection does not confirm; nothing that it publishes is taken for ours."""
    for _ in range(20):
        sent(app, "plain")
        with app.producer_or_acquire() as producer:
            producer.publish("[]", routing_key="plain", exchange="", retry=True)
    with pytest.raises(Exception, match="NO_ROUTE"):
        sent(app, "nowhere")
    eventually(lambda: lying(app, "plain") == 40)


def test_message_that_expires_in_years_is_published(app):
    sent(app, "plain", expires="2130")
    assert lying(app, "plain") == 1


def test_broker_that_does_not_answer_holds_up_for_a_bounded_time(app, broker, monkeypatch):
    monkeypatch.setattr(publishing, "CONFIRM_TIMEOUT", 1.0)
    sent(app, "plain")
    with frozen(broker):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="did not confirm"):
            sent(app, "plain")
        assert time.monotonic() - began < 5
    eventually(lambda: sent(app, "plain") is None, 20)


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.parametrize("shared", [True, False])
def test_broker_with_an_alarm_gets_one_copy_however_often_it_is_tried(app, broker, monkeypatch, shared):
    """RabbitMQ publishes what it has not read so far when the alarm is over, also of connections that are closed.

    Pool children share the app's connections. The queue sweeper makes a new one after each error.
    """

    @contextmanager
    def own():
        with app.connection_for_write() as connection:
            yield app.amqp.Producer(connection, auto_declare=False)

    monkeypatch.setattr(publishing, "CONFIRM_TIMEOUT", 1.0)
    sent(app, "plain")
    with broker.alarm():
        for _ in range(4):
            with pytest.raises(TimeoutError, match="did not confirm"):
                sent(app, "plain", None if shared else own)
    eventually(lambda: lying(app, "plain") == 2, 20)
    sent(app, "plain")
    assert lying(app, "plain") == 3


def test_connection_that_broke_is_made_anew(app, broker):
    sent(app, "plain")
    broker.kill()
    with pytest.raises(OperationalError):
        sent(app, "plain")
    broker.start()
    sent(app, "plain")
    assert lying(app, "plain") == 2


class frozen:  # noqa: N801  # used as a function is
    """The broker's processes stand still."""

    def __init__(self, broker):
        listed = subprocess.run(["pgrep", "-s", str(broker._broker.pid)], capture_output=True, text=True, check=True)
        self._pids = [int(pid) for pid in listed.stdout.split()]

    def __enter__(self):
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)
        threads = [path for pid in self._pids for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        eventually(lambda: all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads))

    def __exit__(self, *_):
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)


# Whole workers


@pytest.fixture(scope="module")
def environment(broker, server, tmp_path_factory):
    """Its worker's user may not write to the default exchange; the test's own may."""
    server.flush()
    urls, folder = Urls(broker.url, server.url(1), server.lock_url(2)), tmp_path_factory.mktemp("rights")
    environ = {"DLOCK_TEST_CONF": json.dumps(CONF)}
    lacking = replace(urls, broker=broker.url_of("worker", writes=ALL_BUT_DEFAULT))
    with loaded_app(APP, urls) as tasks:
        tasks.app.conf.update(CONF)
        made = PolicyEnvironment(server, urls, tasks, folder)
        with running_worker(APP, folder=folder, urls=lacking, concurrency=4, environ=environ) as worker:
            made.workers.append(worker)
            yield made


@pytest.mark.usefixtures("tasks")
def test_worker_without_the_right_to_republish_says_so_at_its_start(environment):
    line = eventually(lambda: [line for line in environment.worker.log().splitlines() if "may not write" in line])[0]
    assert "ERROR" in line
    assert "amq.default" in line


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_calls_that_cannot_be_republished_fail_or_run_and_none_is_lost(environment, tasks, name):
    task, n = getattr(tasks, name), environment.fresh()
    with environment.hold(task, n):
        results = [task.delay(n) for _ in range(6)]
        for result in results:
            environment.wait_for_line(result.id, "cannot be republished", 20)
    for result in results:
        if task.acks_late:
            assert result.get(timeout=30) == n
        else:
            with pytest.raises(LockHeld):
                result.get(timeout=20)
    assert environment.overlaps(n) == 1


@pytest.mark.invariant("republishing-is-confirmed")
def test_waiter_that_cannot_be_republished_waits_until_the_right_is_granted(broker, tmp_path, request):
    url = broker.url_of("queueing", writes=ALL_BUT_DEFAULT)
    with queue_environment(tmp_path, SimpleNamespace(url=url), QUEUE_CONF) as queueing:
        request.node.stash[WORKERS] = queueing.workers
        task, n = queueing.tasks.early, queueing.fresh()
        holding = queueing.hold(task, n)
        (waiter,) = queueing.park(task, n)
        assert holding.end() == n
        eventually(lambda: "hand-off failed at the broker" in queueing.worker.log(), 20)
        assert task.waiting(n).count == 1
        broker.grant("queueing", writes=".*")
        assert waiter.get(timeout=30) == n


# Quorum queues: a message waits for its ETA in the broker, not in the worker's prefetch window

QUORUM = {
    "task_queues": {
        "steady": {
            "exchange": "steady",
            "exchange_type": "topic",
            "routing_key": "steady",
            "queue_arguments": {"x-queue-type": "quorum"},
        }
    },
    "task_default_queue": "steady",
    "worker_prefetch_multiplier": 1,
}


@pytest.fixture(scope="module")
def quorum(broker, server, tmp_path_factory):
    urls, folder = Urls(broker.url, server.url(3), server.lock_url(4)), tmp_path_factory.mktemp("quorum")
    with loaded_app(APP, urls) as tasks:
        tasks.app.conf.update(QUORUM)
        made = PolicyEnvironment(server, urls, tasks, folder)
        made.client, made.locks = server.client(3), server.client(4)
        environ = {"DLOCK_TEST_CONF": json.dumps(QUORUM)}
        with running_worker(APP, folder=folder, urls=urls, concurrency=2, environ=environ) as worker:
            made.workers.append(worker)
            yield made


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_republished_messages_of_a_quorum_queue_leave_the_prefetch_window_free(quorum, request, name):
    request.node.stash[WORKERS] = quorum.workers
    task, n = getattr(quorum.tasks, name), quorum.fresh()
    holding = quorum.hold(task, n)
    slowly = {"retry_delay": 30, "retry_delay_max": 30}
    for result in [task.apply_async((n,), dlock=slowly) for _ in range(4)]:
        quorum.wait_for_line(result.id, "is republished")
    began = time.monotonic()
    assert quorum.tasks.plain.delay("at once").get(timeout=30) == "at once"
    assert time.monotonic() - began < 5  # the calls that wait, for 15 s at least
    assert holding.end() == n


@pytest.mark.invariant("republishing-is-confirmed")
@pytest.mark.parametrize("end", ["", "retry"])
def test_message_that_a_quorum_queue_delays_again_and_again_runs_once(quorum, request, end):
    """The same queue of the delay each time: RabbitMQ drops what it takes for a message that goes round."""
    request.node.stash[WORKERS] = quorum.workers
    task, n = quorum.tasks.retries, quorum.fresh()
    holding = quorum.hold(task, n)
    result = task.apply_async((n,), {"end": end}, dlock={"retry_delay": 3, "retry_delay_max": 3})
    eventually(lambda: len(quorum.lines(result.id, "is republished")) >= 3, 30)
    holding.let_go()
    assert result.get(timeout=20) == n
    bodies = quorum.history(what="in", id=result.id)
    assert [body["retries"] for body in bodies] == ([0, 1] if end else [0])
    assert quorum.overlaps(n) == 1
