"""The app that the measured worker runs: one body under the queue policy, and what it is compared with."""

import os
import time
from pathlib import Path

import redis
from celery import Celery

from celery_dlock import singleton_task

SERVER = os.environ["DLOCK_BENCH_SERVER"]
#: Where bodies write when they began and ended, and find their gates.
FOLDER = Path(os.environ["DLOCK_BENCH_FOLDER"])
#: Seconds of every body, and of the quiet before a measured publication: caches and clocks cool down alike.
BODY = 0.01

app = Celery("bench-handover", broker=f"{SERVER}/0", backend=f"{SERVER}/1")
app.conf.update(dlock_url=f"{SERVER}/2", broker_connection_retry_on_startup=True)
client = redis.Redis.from_url(f"{SERVER}/2")
# A write appends its line whole, whatever process writes, and takes microseconds where a store takes hundreds.
diary = os.open(FOLDER / "diary", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(what: str, name: str, number: int) -> None:
    os.write(diary, f"{time.monotonic():.7f} {what} {name} {number}\n".encode())


def pass_gate(name: str) -> None:
    gate = FOLDER / f"closed-{name}"
    while gate.exists():
        time.sleep(0.001)


def body(name: str, number: int) -> None:
    note("start", name, number)
    time.sleep(BODY)
    pass_gate(name)
    note("end", name, number)


@singleton_task(app=app, key=["name"], on_conflict="queue")
def queued(name: str, number: int) -> None:
    body(name, number)


@singleton_task(app=app, key=["name"], on_conflict="retry")
def retried(name: str, number: int) -> None:
    body(name, number)


@app.task
def locked(name: str, number: int) -> None:
    """redis-py's lock in the body, with its own polling: what one writes without us."""
    with client.lock(f"locked:{name}", timeout=30, sleep=0.1):
        body(name, number)


@app.task
def plain(name: str, number: int) -> None:
    body(name, number)


@app.task
def publish(name: str, count: int) -> None:
    """Publishes plain tasks, each alone, from a pool child as a hand-over does."""
    for number in range(count):
        time.sleep(BODY)
        pass_gate(name)
        note("published", name, number)
        plain.delay(name, number)


@app.task
def filler() -> None:
    """Something else in the broker's queue."""


if os.environ.get("DLOCK_BENCH_PROFILE"):
    from benchmarks.handover_profile import stamp_steps

    stamp_steps(note)
