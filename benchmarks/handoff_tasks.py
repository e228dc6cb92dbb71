"""The app and tasks of the hand-off benchmark: one body under the queue policy, and others to compare it with."""

import os
import time
from pathlib import Path

import redis
from celery import Celery

from celery_dlock import singleton_task

SERVER = os.environ["DLOCK_BENCH_SERVER"]
#: Bodies write their starts and ends here, and find their gates here.
FOLDER = Path(os.environ["DLOCK_BENCH_FOLDER"])
#: Duration of every body and of the pause before a measured publication, in seconds: caches cool down alike.
BODY = 0.01

app = Celery("bench-handoff", broker=f"{SERVER}/0", backend=f"{SERVER}/1")
app.conf.update(dlock_url=f"{SERVER}/2", broker_connection_retry_on_startup=True)
client = redis.Redis.from_url(f"{SERVER}/2")
# An append writes its line whole from any process, in microseconds. A store would take hundreds of them.
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
    """Hold redis-py's lock in the body, with its own polling: the usual way without this library."""
    with client.lock(f"locked:{name}", timeout=30, sleep=0.1):
        body(name, number)


@app.task
def plain(name: str, number: int) -> None:
    body(name, number)


@app.task
def publish(name: str, count: int) -> None:
    """Publish plain tasks one by one from a pool child, as a hand-off does."""
    for number in range(count):
        time.sleep(BODY)
        pass_gate(name)
        note("published", name, number)
        plain.delay(name, number)


@app.task
def filler() -> None:
    """Fill the broker's queue."""
