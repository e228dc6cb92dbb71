"""A republished message returns to its own queue, through whatever exchange it came: exactly once, never nowhere."""

import json
from contextlib import contextmanager

import pytest
from celery import Celery

from celery_dlock import LockHeld
from tests.conftest import WORKERS
from tests.support.environments.policies import PolicyEnvironment, _stop_listening
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.exchanges"

QUEUES = {"TOPIC": "q.topic", "DIRECT": "q.direct", "BOUND": "q.bound"}


@contextmanager
def running_environment(folder, broker=None):
    with Server(folder / "server") as server:
        urls = Urls(broker or server.url(0), server.url(1), server.lock_url(2))
        with loaded_app(APP, urls) as tasks, running_worker(APP, folder=folder, urls=urls, concurrency=4) as worker:
            made = PolicyEnvironment(server, urls, tasks, folder)
            made.workers.append(worker)
            yield made
            _stop_listening(tasks.app)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("exchanges")) as made:
        yield made


def rounds(environment, task_id, count=2):
    """Wait until a message was republished so many times."""
    return eventually(
        lambda: (found := environment.lines(task_id, "is republished"))[count - 1 :] and found,
        message=f"{task_id} does not come back {count} times",
    )


def bodies(environment, task_id):
    return [fact["what"] for fact in environment.history(id=task_id)]


@pytest.mark.core
@pytest.mark.parametrize("route", ["TOPIC", "DIRECT", "BOUND"])
@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_message_at_a_held_lock_is_republished_to_its_own_queue_and_runs_once(environment, tasks, name, route):
    task, n = getattr(tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    result = task.apply_async((n,), **getattr(tasks, route))
    rounds(environment, result.id)
    copy = eventually(lambda: (m := environment.unacked(result.id))["headers"].get("dlock") and m)
    assert copy["properties"]["delivery_info"] == {"exchange": "", "routing_key": QUEUES[route]}
    holding.end()
    assert result.get(timeout=10) == n
    environment.wait_until_drained()
    assert bodies(environment, result.id) == ["in", "out"]


@pytest.mark.core
@pytest.mark.parametrize("route", ["TOPIC", "DIRECT"])
def test_duplicate_delivery_is_republished_to_its_own_queue_and_does_not_run(environment, tasks, route):
    n, options = environment.fresh(), getattr(tasks, route)
    holding = environment.hold(tasks.skips_late, n, **options)
    tasks.skips_late.apply_async((n,), task_id=holding.id, **options)
    environment.wait_for_line(holding.id, "is republished.*another delivery of this message is running")
    first = eventually(lambda: copies(environment, holding.id))
    assert [copy["properties"]["delivery_info"]["routing_key"] for copy in first] == [QUEUES[route]]
    assert holding.end() == n
    environment.wait_for_line(holding.id, "is a duplicate")
    environment.wait_until_drained()
    assert environment.state(holding.id) == "SUCCESS"
    assert bodies(environment, holding.id) == ["in", "out"]


def copies(environment, task_id):
    """Our copies of a message that the worker has."""
    kept = [json.loads(text)[0] for text in environment.broker.hvals("unacked")]
    return [message for message in kept if message["headers"]["id"] == task_id and message["headers"].get("dlock")]


def sent_to_two_queues(environment, tasks):
    """Return how often a message of two queues was republished until it was given up after four tries."""
    n = environment.fresh()
    with environment.hold(tasks.gives_up, n):
        result = tasks.gives_up.apply_async((n,), **tasks.PAIR)
        with pytest.raises(LockHeld, match="given up after 4 tries"):
            result.get(timeout=10)
        return len(eventually(lambda: (found := environment.lines(result.id, "is republished"))[7:] and found))


def test_queues_of_one_topic_do_not_multiply_republished_messages(environment, tasks):
    """Two copies, four times each. If both queues got each of them again, 2 + 4 + 8 + 16."""
    assert sent_to_two_queues(environment, tasks) == 8
    environment.wait_until_drained()


@pytest.mark.core
@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_message_through_a_fanout_fails_with_lock_held(environment, tasks, name):
    """Over Redis it came from no queue, so there is none to return to; and it must not vanish."""
    task, n = getattr(tasks, name), environment.fresh()
    with environment.hold(task, n):
        result = task.apply_async((n,), **tasks.FANOUT)
        with pytest.raises(LockHeld, match="held by"):
            result.get(timeout=10)
        assert environment.state(result.id) == "FAILURE"
        assert environment.lines(result.id, "cannot be republished")
    environment.wait_until_drained()
    assert bodies(environment, result.id) == []


@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_duplicate_delivery_through_a_fanout_leaves_the_holders_result_alone(environment, tasks, name):
    """As where two workers get one broadcast."""
    task, n = getattr(tasks, name), environment.fresh()
    holding = environment.hold(task, n, **tasks.FANOUT)
    task.apply_async((n,), task_id=holding.id, **tasks.FANOUT)
    environment.wait_for_line(holding.id, "cannot be republished")
    assert environment.state(holding.id) == "PENDING"
    assert holding.end() == n
    environment.wait_until_drained()
    assert environment.state(holding.id) == "SUCCESS"
    assert bodies(environment, holding.id) == ["in", "out"]


@pytest.mark.core
@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_protocol_1_message_at_a_held_lock_is_redelivered_a_few_times_and_fails(environment, tasks, name):
    """It cannot be published again; going back to the broker, it would go round as fast as the worker can."""
    task, n = getattr(tasks, name), environment.fresh()
    old = Celery("old", broker=environment.urls.broker, backend=environment.urls.result, set_as_current=False)
    old.conf.task_protocol = 1
    with environment.hold(task, n):
        result = old.send_task(task.name, (n,))
        with pytest.raises(LockHeld, match="held by"):
            environment.app.AsyncResult(result.id).get(timeout=10)
        assert environment.state(result.id) == "FAILURE"
        assert len(environment.lines(result.id, "received")) <= 3
    environment.wait_until_drained()
    assert bodies(environment, result.id) == []
    _stop_listening(old)
    old.close()


# The same on RabbitMQ, where every exchange has queues behind it, and would deliver each copy to all of them


@pytest.fixture(scope="module")
def rabbit(rabbitmq_url, tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("exchanges-rabbitmq"), rabbitmq_url) as made:
        yield made


@pytest.fixture
def rabbit_tasks(rabbit, request):
    request.node.stash[WORKERS] = rabbit.workers
    return rabbit.tasks


@pytest.mark.servers
@pytest.mark.parametrize("route", ["TOPIC", "DIRECT", "BOUND", "FANOUT"])
@pytest.mark.parametrize("name", ["retries", "retries_late"])
def test_rabbitmq_message_at_a_held_lock_is_republished_and_runs_once(rabbit, rabbit_tasks, name, route):
    task, n = getattr(rabbit_tasks, name), rabbit.fresh()
    holding = rabbit.hold(task, n)
    result = task.apply_async((n,), **getattr(rabbit_tasks, route))
    rounds(rabbit, result.id)
    holding.end()
    assert result.get(timeout=10) == n
    assert bodies(rabbit, result.id) == ["in", "out"]


@pytest.mark.servers
def test_rabbitmq_queues_of_one_topic_do_not_multiply_republished_messages(rabbit, rabbit_tasks):
    assert sent_to_two_queues(rabbit, rabbit_tasks) == 8
