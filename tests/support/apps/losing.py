"""Tasks whose leases are lost while they run, and what they notice of it."""

import os
import time

from celery_dlock import LockLost, SingletonTask, signals, singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark, mark_lost, noted, starts

TTL = 2.0

app = make_app(
    "losing",
    worker_log_color=False,
)


signals.lock_lost.connect(mark_lost)


def work(row: str, seconds: float) -> str:
    """Many small steps, as Python code has them."""
    with noted(row):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
    return "done"


@singleton_task(app=app, key=["row"], ttl=TTL, on_lost="abort")
def aborts(row: str, seconds: float) -> str:
    return work(row, seconds)


@singleton_task(app=app, key=["row"], ttl=TTL)
def goes_on(row: str, seconds: float) -> str:
    return work(row, seconds)


@singleton_task(
    app=app, key=["row"], ttl=TTL, on_lost="abort", bind=True, autoretry_for=(LockLost,), default_retry_delay=0
)
def again(self: SingletonTask, row: str, seconds: float) -> list[int]:
    if not starts(row):
        work(row, seconds)
    mark(row, "second")
    return [self.request.retries]


@singleton_task(app=app, key=["row"], ttl=TTL, on_lost="abort", bind=True)
def catches(self: SingletonTask, row: str, seconds: float) -> list[str]:
    """Catches what is raised in it, and asks three times."""
    answers = []
    try:
        work(row, seconds)
    except LockLost:
        for _ in range(3):
            try:
                self.lease.ensure()
            except LockLost:
                answers.append("lost")
    return answers


@singleton_task(app=app, key=["row"], ttl=TTL, bind=True)
def ensures(self: SingletonTask, row: str, seconds: float) -> None:
    with noted(row):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            self.lease.ensure()


@singleton_task(app=app, key=["row"], ttl=TTL, on_lost="abort", max_hold=1.0)
def hung(row: str, seconds: float) -> str:
    return work(row, seconds)


@singleton_task(app=app, key=["row"], ttl=TTL, max_hold=1.0)
def hung_and_deaf(row: str, seconds: float) -> str:
    return work(row, seconds)


@singleton_task(app=app, key=["row"], ttl=TTL, min_hold=1.5)
def kept(row: str, end: str = "") -> str:
    with noted(row):
        if end == "fail":
            raise ValueError(row)
        if end == "die":
            os.kill(os.getpid(), 9)
    return "done"


@singleton_task(app=app, key=["row"], ttl=TTL, min_hold=1.5)
def kept_long(row: str, seconds: float) -> str:
    return work(row, seconds)


@singleton_task(app=app, key=["row"], ttl=TTL, min_hold=1.5, on_conflict="queue", bind=True)
def kept_in_order(self: SingletonTask, row: str, number: int) -> int | None:
    """Its token: the server's microseconds when it took the lock."""
    mark(row, f"{number}")
    return self.lease.token


@singleton_task(app=app, key=["row"], ttl=TTL, min_hold=1.5, wait=10, on_conflict="raise", bind=True)
def kept_and_waits(self: SingletonTask, row: str) -> int | None:
    mark(row, "start")
    return self.lease.token


@singleton_task(app=app, key=["row"], bind=True)
def says_until_when(self: SingletonTask, row: str) -> float:
    """Seconds after which its lease is renewed no more."""
    mark(row, "start")
    until: float = self.lease.record.max_hold_until  # type: ignore[union-attr]  # it runs in a worker
    return until - time.monotonic() if until else 0.0


@singleton_task(app=app, key=["row"], ttl=TTL, acks_late=True)
def late(row: str, seconds: float) -> str:
    return work(row, 0 if starts(row) else seconds)
