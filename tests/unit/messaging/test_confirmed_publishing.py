"""A message to RabbitMQ is published with the app's retry policy, and its confirmation is awaited."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_dlock.messaging import message
from celery_dlock.messaging.message import RawMessage, RepublishHeader, publish_parked
from celery_dlock.messaging.publishing import publish


@pytest.mark.parametrize("policy", [None, {}, {"max_retries": 3}])
def test_message_is_published_whatever_the_retry_policy_is(policy: dict[str, Any] | None) -> None:
    used: list[dict[str, Any]] = []

    def ensure(_producer: Any, _send: Any, **options: Any) -> Any:
        used.append(options)
        return lambda *_: True

    connection = SimpleNamespace(transport=SimpleNamespace(driver_name="py-amqp"), ensure=ensure)
    app = Celery("a", broker="amqp://", set_as_current=False)
    app.conf.task_publish_retry_policy = policy
    publish(app, lambda: nullcontext(SimpleNamespace(connection=connection)), "celery", "[]", {"task": "t"}, {})
    assert used == [policy or {}]


def test_republished_message_has_no_count_of_its_predecessors_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ would leave it there until the message is requeued itself."""
    sent: list[Any] = []
    monkeypatch.setattr(message, "publish", lambda *arguments: sent.append(arguments[4]))
    raw = RawMessage("[]", "application/json", "utf-8", {"task": "t", "x-delivery-count": 2}, {}, "celery")
    publish_parked(Celery("a", set_as_current=False), nullcontext, raw, "i", RepublishHeader())
    assert sorted(sent[0]) == ["dlock", "task"]
