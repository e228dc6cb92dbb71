"""Tasks of a worker in which all fails that can: the log, a listener, each second round of every background thread."""

import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from celery.signals import worker_init

from celery_dlock import signals, singleton_task
from celery_dlock.locking import client
from celery_dlock.locking.watchdog import Watchdog
from celery_dlock.utils import threads as native
from celery_dlock.worker.claim_renewal import ClaimRenewer
from celery_dlock.worker.crash_recovery import CrashRecovery
from celery_dlock.worker.queue_sweeper import QueueSweeper
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark, noted

TTL = 1.0

app = make_app(
    "plugged",
)


class Broken(logging.Filter):
    """Raises at whatever a background thread says of a failure."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and "is republished, retrying in" not in record.getMessage():
            raise SystemExit(3)
        return True


@signals.lock_lost.connect
def _on_lost(event: Any, **_: Any) -> None:
    mark("lost", event.name)
    raise SystemExit(4)


class Failed(Exception):
    """Of another class each time: errors of one class are logged once a minute."""


def _fail_each_second_time(room: type, name: str) -> None:
    works: Callable[..., Any] = getattr(room, name)
    numbers = itertools.count()

    def step(*args: Any) -> Any:
        number = next(numbers)
        if number % 2:
            raise type(f"Failed{number}", (Failed,), {})
        return works(*args)

    setattr(room, name, step)


_start = native.start_daemon
_failed: list[object] = []


def _start_at_the_second_try(target: Callable[[], None]) -> None:
    """Refuse to start the watchdog's thread once."""
    loop = getattr(getattr(target, "__self__", None), "_work", None)
    if getattr(getattr(loop, "__self__", None), "_name", "") == "watchdog" and not _failed:
        _failed.append(target)
        raise RuntimeError("can't start new thread")
    _start(target)


@worker_init.connect
def _break(**_: Any) -> None:
    """In workers only: the test's process imports this module, too."""
    if "DLOCK_TEST_HANG" in os.environ:
        client.UNWATCHED = 0.5
        Watchdog._wait = lambda *_: native.sleep(600)  # type: ignore[method-assign]  # after its first look
        return
    logging.getLogger("celery_dlock").addFilter(Broken())
    native.start_daemon = _start_at_the_second_try
    for room, name in (
        (Watchdog, "run_round"),
        (ClaimRenewer, "_renew_and_release"),
        (CrashRecovery, "note"),
        (QueueSweeper, "_do_left_work"),
    ):
        _fail_each_second_time(room, name)


@singleton_task(app=app, ttl=TTL, on_conflict="queue", key=["name"])
def queued(name: str, row: str, seconds: float) -> None:  # noqa: ARG001  # the lock is that of the name
    with noted(row):
        time.sleep(seconds)


@singleton_task(app=app, ttl=TTL)
def kept(row: str, seconds: float) -> None:
    with noted(row):
        time.sleep(seconds)
