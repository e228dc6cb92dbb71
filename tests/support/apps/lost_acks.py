"""Tasks in workers whose acknowledgements do not reach their broker, a Redis, as the keys of database 1 say.

- `deaf`: none does, while it is there.
- `stay`: bodies whose end begins with `stay` do not end, while it is there.
- `cut`: so many times one fails in the way that ends Celery's event loop; that worker stays away while there is `away`.
- `cancel`: what Celery cancels because its connection broke waits until it is gone.
- `close`: a connection that was cut is closed only once it is gone.
- `forget`: so many are forgotten before they are tried.
- `freeze`: so many times a main process stops itself when it is to hear that a body has begun.
- `retry`: what Celery cancels is not stored as RETRY until it is gone.
"""

import os
import signal
import time
from typing import Any

import redis
from celery.backends.base import Backend
from celery.exceptions import Ignore, Reject
from celery.signals import celeryd_init, task_prerun
from celery.worker.consumer.consumer import Consumer
from celery.worker.request import Request
from kombu import Connection
from kombu.transport.redis import QoS

from celery_dlock import singleton_task
from tests.support.apps.base import make_app

app = make_app(
    "unheard",
    worker_cancel_long_running_tasks_on_connection_loss="DLOCK_TEST_CANCEL" in os.environ,
    worker_deduplicate_successful_tasks="DLOCK_TEST_DEDUPLICATE" in os.environ,
    # From 2 s before that on, one is late.
    broker_transport_options={"visibility_timeout": float(os.environ.get("DLOCK_TEST_VISIBILITY", "3600"))},
)
notes = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], decode_responses=True)
_ack, _reject, _cancel = QoS.ack, QoS.reject, Request.cancel
#: Celery 5.5 has no way of its own for acknowledgements.
_SOON = "call_soon_ack" if hasattr(Consumer, "call_soon_ack") else "call_soon"
_soon = getattr(Consumer, _SOON)
_connect, _collect = Consumer.connect, Connection.collect
_accepted, _mark_as_retry = Request.on_accepted, Backend.mark_as_retry
#: Seconds in which the watchdog has left word in what it doubts.
SLOWLY = 1.5
_cuts: list[str] = []


def _asked(key: str) -> bool:
    return bool(notes.exists(key)) and notes.decr(key) >= 0


def _ack_unless_deaf(self: QoS, delivery_tag: str) -> None:
    if notes.exists("deaf"):
        raise redis.ConnectionError("the broker does not hear it")
    if _asked("cut"):
        _cuts.append(delivery_tag)
        raise BrokenPipeError("the connection is cut")
    _ack(self, delivery_tag)


def _reject_unless_deaf(self: QoS, delivery_tag: str, requeue: bool = False) -> None:  # kombu's
    if notes.exists("deaf"):
        raise redis.ConnectionError("the broker does not hear it")
    _reject(self, delivery_tag, requeue)
    notes.rpush("rejected", delivery_tag)


def _cancel_when_told(self: Any, *args: Any, **kwargs: Any) -> None:
    notes.set("cancelling", 1)
    while notes.exists("cancel"):
        time.sleep(0.05)
    _cancel(self, *args, **kwargs)


def _soon_unless_forgotten(self: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    return call if _asked("forget") else _soon(self, call, *args, **kwargs)


def _collect_when_told(self: Any, *args: Any, **kwargs: Any) -> None:
    while _cuts and notes.exists("close"):
        time.sleep(0.05)
    _collect(self, *args, **kwargs)


def _connect_unless_away(self: Any) -> Any:
    while _cuts and notes.exists("away"):
        time.sleep(0.1)
    return _connect(self)


def _accepted_unless_frozen(self: Any, *args: Any, **kwargs: Any) -> None:
    if _asked("freeze"):
        os.kill(os.getpid(), signal.SIGSTOP)
    _accepted(self, *args, **kwargs)


def _mark_as_retry_when_told(self: Any, *args: Any, **kwargs: Any) -> Any:
    notes.set("retrying", 1)
    while notes.exists("retry"):
        time.sleep(0.05)
    return _mark_as_retry(self, *args, **kwargs)


@celeryd_init.connect(weak=False)
def _make_deaf(**_: Any) -> None:
    """In workers only: the tests' own process imports this module, too, and others than these run there."""
    QoS.ack, QoS.reject = _ack_unless_deaf, _reject_unless_deaf
    if app.conf.worker_cancel_long_running_tasks_on_connection_loss:
        Request.cancel = _cancel_when_told
        Backend.mark_as_retry = _mark_as_retry_when_told
    Request.on_accepted = _accepted_unless_frozen
    setattr(Consumer, _SOON, _soon_unless_forgotten)
    Consumer.connect, Connection.collect = _connect_unless_away, _collect_when_told


def _run(task: Any, n: str, end: str) -> str:
    notes.rpush("ran", n)
    try:
        while end.startswith("stay") and notes.exists("stay"):
            time.sleep(0.05)
    except SystemExit as told:
        if end == "stay stubborn":
            raise ValueError(n) from told
        raise
    if notes.lrange("ran", 0, -1).count(n) == 1:
        _end_at_first(task, n, end)
    if end.endswith("fail"):
        raise ValueError(n)
    if end == "replace":
        raise task.replace(late.si(f"instead of {n}"))
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def _end_at_first(task: Any, n: str, end: str) -> None:
    """Do this in the first run only."""
    if end.startswith("anew"):
        task.apply_async((n,), task_id=task.request.id)
    if "slowly" in end:
        time.sleep(SLOWLY)
    if end.startswith("anew"):
        raise Ignore
    if end.startswith("reject"):
        raise Reject(n, requeue=False)


@task_prerun.connect(weak=False)
def _die_unheld(args: Any, **_: Any) -> None:
    """Once, before its lock is asked for."""
    if "die unheld" in args and notes.set("died", 1, nx=True):
        os.kill(os.getpid(), signal.SIGKILL)


@singleton_task(app=app, bind=True, key="{n}")
def early(self: Any, n: str, end: str = "") -> str:
    return _run(self, n, end)


@singleton_task(app=app, bind=True, key="{n}", acks_late=True)
def late(self: Any, n: str, end: str = "") -> str:
    return _run(self, n, end)


@singleton_task(app=app, bind=True, key="{n}", acks_late=True, acks_on_failure_or_timeout=False)
def rejecting(self: Any, n: str, end: str = "") -> str:
    return _run(self, n, end)
