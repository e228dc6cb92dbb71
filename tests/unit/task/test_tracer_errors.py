"""Errors that Celery's tracer raises outside a body end one message, in each pool."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, states
from celery.app.trace import build_tracer
from celery.exceptions import Reject

from celery_dlock import singleton_task

pytestmark = pytest.mark.core


def a_task() -> Any:
    app = Celery("tracing", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.dlock_enabled = False

    @singleton_task(app=app, name="tracing.body")
    def body() -> None:
        raise ValueError("as asked")

    app.finalize()
    return app.tasks["tracing.body"]


@pytest.mark.filterwarnings("ignore:Exception raised outside body")
def test_tracer_error_of_malformed_callbacks_is_a_failure_that_the_pool_reports() -> None:
    """A pool of threads has no callback for an exception: the message stayed unacknowledged, and took a prefetch."""
    task = a_task()
    task.__trace__ = build_tracer(task.name, task, app=task.app)
    request = {"id": "id1", "chain": [{}], "delivery_info": {}, "hostname": "h"}
    traced = task.__trace__("id1", (), {}, request)
    assert traced.info.state == states.FAILURE
    assert traced.retval.exception is not None


@pytest.mark.parametrize("error", [MemoryError(), Reject("x", requeue=True), SystemExit(1)])
def test_tracer_error_that_is_for_the_pool_is_raised(error: BaseException) -> None:
    task = a_task()

    def tracer(*_: Any) -> None:
        raise error

    task.__trace__ = tracer
    with pytest.raises(type(error)):
        task.__trace__("id1", (), {}, {})
