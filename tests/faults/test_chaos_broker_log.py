"""`chaos.broker_log` finds the messages that kombu lost, in the file of a real server."""

import kombu
import pytest

from chaos.broker_log import KEEP_ALL, never_recorded
from tests.support.servers import Server


@pytest.fixture
def broker(tmp_path):
    with Server(tmp_path / "broker", persistent=True, options=KEEP_ALL) as server:
        yield server


@pytest.fixture
def queue(broker):
    with kombu.Connection(broker.url()) as connection, connection.SimpleQueue("celery") as queue:
        for task_id in ("a", "b"):
            queue.put({}, headers={"id": task_id})
        yield queue


@pytest.mark.usefixtures("queue")
def test_messages_that_wait_are_not_taken(broker):
    assert never_recorded(broker) == set()


@pytest.mark.usefixtures("queue")
def test_message_that_was_popped_and_not_recorded_is_found_also_after_a_restart(broker):
    with broker.client() as client:
        client.brpop(["celery"])
    broker.restart()
    assert never_recorded(broker) == {"a"}


def test_message_that_kombu_received_is_recorded(broker, queue):
    queue.get(timeout=5)
    assert never_recorded(broker) == set()


def test_message_that_was_acknowledged_is_recorded(broker, queue):
    queue.get(timeout=5).ack()
    assert never_recorded(broker) == set()


def test_message_that_was_returned_and_then_popped_is_found(broker, queue):
    queue.get(timeout=5).requeue()
    with broker.client() as client:
        client.rpop("celery")
        client.rpop("celery")
    assert never_recorded(broker) == {"a", "b"}


def test_message_of_which_another_copy_was_recorded_later_is_not_found(broker, queue):
    queue.put({}, headers={"id": "a"})
    with broker.client() as client:
        client.rpop("celery")
    assert [queue.get(timeout=5).headers["id"] for _ in "ba"] == ["b", "a"]
    assert never_recorded(broker) == set()
