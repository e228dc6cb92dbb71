"""Tasks that end in every way a task can end. Each writes down when it started and how it ended."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_dlock import SingletonTask, singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.marks import FOR_EVER, beat, mark, noted, starts

app = make_app(
    "endings",
    dlock_ttl=60,
    broker_connection_max_retries=None,
    broker_transport_options={"socket_connect_timeout": 1},
    worker_cancel_long_running_tasks_on_connection_loss="DLOCK_TEST_CANCEL" in os.environ,
)


def _fail(_task: Any, _row: str) -> None:
    raise ValueError("on purpose")


def _retry(task: Any, _row: str) -> None:
    if not task.request.retries:
        task.retry(countdown=0.5)


def _ignore(_task: Any, _row: str) -> None:
    raise Ignore


def _reject(_task: Any, _row: str) -> None:
    raise Reject("on purpose", requeue=False)


def _requeue(_task: Any, row: str) -> None:
    if starts(row) == 1:
        raise Reject("on purpose", requeue=True)


def _replace(task: Any, _row: str) -> None:
    task.replace(plain.si())


def _sleep_at_first(_task: Any, row: str) -> None:
    if starts(row) == 1:
        time.sleep(FOR_EVER)


def _caught(_task: Any, _row: str) -> None:
    try:
        time.sleep(FOR_EVER)
    except SoftTimeLimitExceeded:
        return


def _deaf(_task: Any, row: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    beat(row)


def _stubborn(_task: Any, row: str) -> None:
    try:
        beat(row)
    except BaseException:  # noqa: BLE001  # such as gevent's Timeout
        beat(row)


def _exit_at_once(_task: Any, row: str) -> None:
    if starts(row) == 1:
        mark(row, "died")
        os._exit(1)


def _kill(_task: Any, row: str) -> None:
    mark(row, "died")
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault(_task: Any, row: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mark(row, "died")
    ctypes.string_at(0)


def _sys_exit(_task: Any, _row: str) -> None:
    sys.exit(1)


WAYS: dict[str, Callable[[Any, str], None]] = {
    "success": lambda task, row: None,
    "short": lambda task, row: time.sleep(1.5),
    "long": lambda task, row: time.sleep(4),
    "sleep": lambda task, row: time.sleep(FOR_EVER),
    "sleep at first": _sleep_at_first,
    "beat": lambda task, row: beat(row),
    "fail": _fail,
    "retry": _retry,
    "ignore": _ignore,
    "reject": _reject,
    "requeue": _requeue,
    "replace": _replace,
    "caught": _caught,
    "deaf": _deaf,
    "stubborn": _stubborn,
    "os._exit": _exit_at_once,
    "kill": _kill,
    "segfault": _segfault,
    "sys.exit": _sys_exit,
}


@app.task
def plain() -> None: ...


def _body(task: Any, row: str, way: str) -> None:
    with noted(row):
        WAYS[way](task, row)


@singleton_task(app=app, bind=True)
def early(self: Any, row: str, way: str) -> None:
    _body(self, row, way)


@singleton_task(app=app, bind=True, acks_late=True)
def late(self: Any, row: str, way: str) -> None:
    _body(self, row, way)


@singleton_task(app=app, bind=True, ttl=3)
def early_brief(self: Any, row: str, way: str) -> None:
    _body(self, row, way)


@singleton_task(app=app, bind=True, ttl=3, acks_late=True)
def late_brief(self: Any, row: str, way: str) -> None:
    _body(self, row, way)


@singleton_task(app=app, bind=True, acks_late=True, reject_on_worker_lost=True)
def rejected_when_lost(self: Any, row: str, way: str) -> None:
    _body(self, row, way)


if hasattr(Task, "retry_on_worker_lost"):

    @singleton_task(app=app, bind=True, retry_on_worker_lost=True, default_retry_delay=1)
    def retried_when_lost(self: Any, row: str, way: str) -> None:
        _body(self, row, way)


@singleton_task(app=app, bind=True, key="{row}", wait=30, on_conflict="raise")
def queueing(self: Any, row: str, way: str, marks: str) -> None:  # noqa: ARG001  # row is what is locked
    _body(self, marks, way)


class SlowBefore(SingletonTask):
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        with noted(args[0]):
            time.sleep(FOR_EVER)


class SlowAfter(SingletonTask):
    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        with noted(args[0]):
            time.sleep(FOR_EVER)


@singleton_task(app=app, base=SlowBefore)
def slow_before(row: str, way: str) -> None:
    mark(row, f"body {way}")


@singleton_task(app=app, base=SlowAfter)
def slow_after(row: str, way: str) -> None:
    mark(row, f"body {way}")
