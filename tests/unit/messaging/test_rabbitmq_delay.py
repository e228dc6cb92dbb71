"""A republished message waits in RabbitMQ where quorum queues are used, and then returns to its own queue."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from celery_dlock.messaging.rabbitmq_delay import delay_route, without_deaths


@pytest.fixture
def app() -> Celery:
    made = Celery("a", broker="amqp://", set_as_current=False)
    made.conf.task_queues = [Queue("celery", queue_arguments={"x-queue-type": "quorum"})]
    return made


@pytest.mark.core
def test_delay_over_quorum_queues_is_rounded_up_to_seconds(app: Celery) -> None:
    route = delay_route(app, "celery", 2.1)
    assert route is not None
    bits, _, word = route.routing_key.rpartition(".")
    assert int(bits.replace(".", ""), 2) == 3
    assert (route.exchange, route.binding) == ("celery_delayed_27", f"#.{word}")


def test_delay_of_two_queues_has_two_bindings(app: Celery) -> None:
    routes = [delay_route(app, name, 2) for name in ("a.b", "b", "x" * 250)]
    assert len({route and route.binding for route in routes}) == 3
    assert all(route and len(route.routing_key) < 255 for route in routes)


def test_delay_of_years_is_the_longest_that_the_broker_knows(app: Celery) -> None:
    route = delay_route(app, "celery", 1e12)
    assert route is not None
    assert route.routing_key.startswith("1." * 28)


def test_delay_below_a_second_is_left_to_the_worker(app: Celery) -> None:
    assert delay_route(app, "celery", 0.9) is None


def test_delay_over_classic_queues_is_left_to_the_worker() -> None:
    assert delay_route(Celery("a", broker="amqp://", set_as_current=False), "celery", 30) is None


DELAYED: dict[str, Any] = {
    "x-death": [{"queue": "celery_delayed_1", "reason": "expired"}],
    "x-first-death-queue": "celery_delayed_1",
    "x-first-death-exchange": "celery_delayed_27",
    "x-first-death-reason": "expired",
}


@pytest.mark.core
def test_headers_of_a_delayed_message_lose_the_notes_of_the_delay() -> None:
    assert without_deaths({"task": "t", **DELAYED}) == {"task": "t"}


def test_headers_keep_the_notes_of_other_queues() -> None:
    other = {"queue": "mine", "reason": "rejected"}
    headers = {
        "x-death": [*DELAYED["x-death"], other],
        "x-first-death-queue": "mine",
        "x-first-death-reason": "rejected",
    }
    assert without_deaths(headers) == {**headers, "x-death": [other]}


@pytest.mark.parametrize("headers", [{}, {"task": "t"}, {"x-death": "odd"}, {"x-death": [None, {"queue": 5}]}])
def test_headers_without_notes_of_a_delay_stay_as_they_are(headers: dict[str, Any]) -> None:
    assert without_deaths(headers) is headers
