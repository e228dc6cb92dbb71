"""The app that the measured worker runs: one body that does nothing, locked in three ways."""

import os

import redis
from celery import Celery

from celery_dlock import singleton_task

SERVER = os.environ["DLOCK_BENCH_SERVER"]

app = Celery("bench", broker=f"{SERVER}/0", backend=f"{SERVER}/1")
app.conf.update(dlock_url=f"{SERVER}/2", broker_connection_retry_on_startup=True)
client = redis.Redis.from_url(f"{SERVER}/2")


@app.task
def plain(number: int) -> None:
    """Celery's own task, with no lock."""


@singleton_task(app=app)
def singleton(number: int) -> None:
    """Ours: the name is made of the arguments, so every call has a lock of its own."""


@app.task
def locked(number: int) -> None:
    """redis-py's lock in the body: what one writes without us."""
    with client.lock(f"locked:{number}", timeout=30):
        pass
