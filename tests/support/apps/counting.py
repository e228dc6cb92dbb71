"""Tasks that count in the store what the metrics of their worker have to show."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import redis

from celery_dlock import Lock, SingletonTask, signals, singleton_task
from tests.support.apps.base import make_app

app = make_app("counting", dlock_metrics_port=0, task_ignore_result=True, worker_log_color=False)
tally: redis.Redis = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], socket_timeout=None)


def count(kind: str, task: str) -> None:
    tally.hincrby("tally", f"{kind} {task}", 1)


@signals.lock_released.connect
@signals.lock_skipped.connect
@signals.lock_refused.connect
def heard(event: Any, **_: Any) -> None:
    """Count in the process where it happens, beside the metrics."""
    count(event.kind, event.task or "other")


def run(task: SingletonTask, _number: int, seconds: float = 0.0) -> None:
    count("run", task.name)
    time.sleep(seconds)


@singleton_task(app=app, name="free", bind=True)
def free(self: SingletonTask, number: int) -> None:
    """Meet no other call."""
    run(self, number)


@singleton_task(app=app, name="skipping", bind=True, key="one")
def skipping(self: SingletonTask, number: int) -> None:
    """Find the lock held, often."""
    run(self, number, 0.005)


@singleton_task(app=app, name="waiting", bind=True, key="{number}", wait=120, on_conflict="raise")
def waiting(self: SingletonTask, number: int) -> None:
    """Wait for the lock in the pool slot."""
    run(self, number, 0.002)


@singleton_task(app=app, name="threading", bind=True)
def threaded(self: SingletonTask, number: int) -> None:
    """Take more locks in threads of the body's own."""

    def take() -> None:
        with Lock(f"inner-{number}-{threading.get_ident()}", app=app):
            count("run", "other")

    run(self, number)
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@singleton_task(app=app, name="dying", bind=True)
def dying(self: SingletonTask, number: int, dies: bool = False) -> None:
    """Kill the own process while it holds the lock."""
    run(self, number)
    if dies:
        count("died", self.name)
        os.kill(os.getpid(), signal.SIGKILL)
