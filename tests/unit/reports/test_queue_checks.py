"""The checks of the app's queues: a quorum queue drops messages at its delivery limit."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Queue

from celery_dlock.reports.checks import queue_checks


def an_app(broker: str = "amqp://") -> Celery:
    made = Celery("a", broker=broker, set_as_current=False)
    made.conf.task_queues = [
        Queue("plain"),
        Queue("steady", queue_arguments={"x-queue-type": "quorum"}),
        *(Queue(f"of{n}", queue_arguments={"x-queue-type": "quorum", "x-delivery-limit": n}) for n in (0, 4, 5)),
    ]
    return made


@pytest.mark.core
def test_queue_with_a_low_delivery_limit_is_a_problem() -> None:
    found = {item.check: item for item in queue_checks(an_app())}
    assert {name for name, item in found.items() if item.problem} == {"queue of0", "queue of4"}
    assert "delivery limit 4" in found["queue of4"].found
    assert "no delivery limit declared" in found["queue steady"].found
    assert "not declared as a quorum queue" in found["queue plain"].found


@pytest.mark.parametrize("broker", ["memory://", "redis://"])
def test_queues_of_another_broker_are_not_checked(broker: str) -> None:
    assert list(queue_checks(an_app(broker))) == []
