"""A soft limit may strike between any two steps of the library. All that it leaves behind is freed."""

import logging
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import build_tracer

import celery_dlock
from celery_dlock import singleton_task
from celery_dlock.locking import owner
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.messaging.message import PROPERTY, Delivery
from celery_dlock.runtime import Runtime
from celery_dlock.store.operator_model import RunView
from celery_dlock.task import execution

OURS = str(Path(celery_dlock.__file__).parent)


#: Functions with a line in which no signal can strike: Python looks for signals at calls and loops only.
#: The lines are those round the last exit hook, and the one between a ``with`` block's end and the release of its lock.
NEVER_STRUCK = {"trace", "crossing"}


class Strike:
    """Raises a soft limit at the `at`-th line of celery_dlock that runs, as a signal's handler would."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS) or frame.f_code.co_name in NEVER_STRUCK:
            return None
        if event == "line" and not self.where:
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise SoftTimeLimitExceeded
            self.left -= 1
        return self


@pytest.fixture
def app(redis_url: str, caplog: pytest.LogCaptureFixture) -> Celery:
    # Thousands of tracebacks would take longer than all else.
    caplog.set_level(logging.CRITICAL, "celery.app.trace")
    app = Celery("interruptions", broker=redis_url, backend="cache+memory://", set_as_current=False)
    # The test is the watchdog's scheduler: its thread never starts.
    assert Runtime.of(app).watchdog._loop.running.acquire(blocking=False)
    return app


def run(task: Any, number: int, strike: Strike) -> None:
    """One run of the task through its tracer, as a pool child has it."""
    now = time.monotonic()
    delivery = tuple(Delivery(f"owner{number}", now, now, False, (b"", "", "", {}, {}, "celery")))
    request = {"id": f"id{number}", "properties": {PROPERTY: delivery}, "delivery_info": {}, "hostname": "here"}
    sys.settrace(strike)
    try:
        task.__trace__(f"id{number}", (number,), {}, request)
    except SoftTimeLimitExceeded:
        pass  # struck where Celery does not catch either
    finally:
        sys.settrace(None)


def assert_no_doubt(use: RunView | None, where: str, *, ended: bool) -> None:
    state = use and use.state
    assert (where, state) != (where, "unknown")
    # The steps that come first behind a body belong to it.
    if ended and not where.endswith((" body", " run")):
        assert (where, state) == (where, "used")


# What strikes in after_return Celery 5.5 tells as a warning.
@pytest.mark.invariant("interruption-leaks-no-lock")
@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
@pytest.mark.timeout(300)  # all CPU, and a busy machine has little of it
@pytest.mark.core
@pytest.mark.parametrize(
    "ends",
    ["returns", pytest.param("retries", marks=pytest.mark.long), pytest.param("nests", marks=pytest.mark.long)],
)
def test_a_soft_limit_at_any_line_leaves_no_lock(app: Celery, client: redis.Redis, ends: str) -> None:
    """Expected for every line: no slot that is kept alive, no lock once the watchdog has looked, no run left current.

    And a body that has not begun leaves no doubt (once_per), one that came to its end has used its name.
    """
    ended: set[int] = set()

    @singleton_task(app=app, bind=True, once_per=5, name=f"interruptions.{ends}", max_retries=None)
    def work(self: Any, number: int) -> None:
        if ends == "retries":
            raise self.retry(countdown=1000)
        if ends == "nests":
            with self.lock_for(number), celery_dlock.Lock(f"other {number}", app=app):
                pass
        ended.add(number)

    app.finalize()
    work.__trace__ = build_tracer(work.name, work, app=app)
    runtime = Runtime.of(app)
    struck = 0
    while True:
        strike = Strike(at=struck)
        run(work, struck, strike)
        kept = [slot for slot in runtime.lease_table.records() if slot.state is not LeaseState.RELEASE_DELEGATED]  # type: ignore[attr-defined]
        assert (strike.where, kept) == (strike.where, [])
        runtime.watchdog.run_round()
        assert (strike.where, client.keys("*:lock:*")) == (strike.where, [])
        assert (strike.where, runtime.lease_table.records()) == (strike.where, [])  # type: ignore[attr-defined]
        assert_no_doubt(work.used(struck), strike.where, ended=struck in ended)
        assert (strike.where, execution.running(), owner.entered()) == (strike.where, None, None)
        if not strike.where:
            break
        struck += 1
    assert struck > 150
