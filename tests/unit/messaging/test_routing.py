"""The queue that a message came from. Over Redis, the publisher writes the fields that name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_dlock.messaging.routing import source_queue

pytestmark = pytest.mark.core


def told(info: Mapping[str, Any], *queues: Queue, tags: Mapping[str, str] | None = None) -> str | None:
    app = Celery("queues", broker="memory://", set_as_current=False)
    if queues:
        app.conf.task_queues = queues
    return source_queue(app.amqp.queues, info, lambda: tags or {})


DIRECT = Queue("orders", Exchange("shop", "direct"), routing_key="order")
TOPIC = Queue("all", Exchange("news", "topic"), routing_key="news.#")


@pytest.mark.parametrize(
    ("info", "queue"),
    [
        ({"exchange": "", "routing_key": "orders"}, "orders"),
        ({"exchange": "shop", "routing_key": "order"}, "orders"),
        ({"exchange": "news", "routing_key": "news.of.today"}, "all"),
        ({"exchange": "", "routing_key": "amq.gen-1", "consumer_tag": "2"}, "all"),
    ],
)
def test_queue_of_a_message_is_the_consumed_one(info: Mapping[str, Any], queue: str) -> None:
    assert told(info, DIRECT, TOPIC, tags={"orders": "1", "all": "2"}) == queue


@pytest.mark.parametrize(
    "info",
    [
        {"exchange": "", "routing_key": "_kombu.binding.celery"}, {"exchange": "", "routing_key": "payroll"},
        {"exchange": "", "routing_key": ""}, {"exchange": "x", "routing_key": "order"}, {},
    ],
)  # fmt: skip
def test_queue_of_a_forged_origin_is_none(info: Mapping[str, Any]) -> None:
    """The library would write to any key of a broker on Redis that a publisher names, or fail to for ever."""
    assert told(info, DIRECT, TOPIC, tags={"orders": "1", "all": "2"}) is None


def test_queue_of_a_message_that_was_moved_is_the_only_consumed_one() -> None:
    assert told({"exchange": "", "routing_key": "before"}, DIRECT) == "orders"
    assert told({"exchange": "", "routing_key": "before"}) == "celery"


def test_queue_that_is_consumed_again_is_believed() -> None:
    """Celery before 5.7 forgets it in ``consume_from``; the consumer's tags know it."""
    app = Celery("queues", broker="memory://", set_as_current=False)
    app.conf.task_queues = (DIRECT, TOPIC)
    app.amqp.queues.deselect("orders")
    queues = app.amqp.queues
    assert source_queue(queues, {"exchange": "", "routing_key": "orders"}, dict) == "all"
    assert (
        source_queue(queues, {"exchange": "", "routing_key": "orders"}, lambda: {"orders": "1", "all": "2"}) == "orders"
    )
    assert source_queue(queues, {"exchange": "shop", "routing_key": "order"}, lambda: {"orders": "1"}) == "orders"
