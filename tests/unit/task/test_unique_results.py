"""The result of a call that was refused when it was published (`unique`)."""

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as CeleryTimeoutError

from celery_dlock import CallSkipped, singleton_task


def bill(number: int) -> int:
    return number


@pytest.mark.invariant("claim-loses-no-work")
def test_refused_call_with_an_id_of_its_own_ends_over_rpc(redis_url: str) -> None:
    app = Celery("refused", broker="memory://", backend="rpc://", set_as_current=False)
    app.conf.update(dlock_url=redis_url, task_default_queue="refused")
    task = singleton_task(app=app, name="refused.run", unique="queued")(bill)
    first, _ = task.apply_async((1,), task_id="first"), task.apply_async((1,), task_id="second")
    with pytest.raises(CallSkipped, match=r"first"):
        app.AsyncResult("second").get(timeout=5)
    with pytest.raises(CeleryTimeoutError):
        first.get(timeout=0.1)
