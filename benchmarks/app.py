"""The app of the measured worker: an empty body, locked in three ways."""

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
    """Run without a lock."""


@singleton_task(app=app)
def singleton(number: int) -> None:
    """Run under a singleton task's lock. Each call has its own, because the arguments differ."""


@app.task
def locked(number: int) -> None:
    """Run under redis-py's lock, the usual way without this library."""
    with client.lock(f"locked:{number}", timeout=30):
        pass
