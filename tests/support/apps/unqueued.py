"""A task that waits in the store only where a call chooses to, and workers that look for such calls twice a second."""

import os

import redis
from celery import Celery

from celery_dlock import singleton_task
from celery_dlock.worker import queue_sweeper as sweeper

sweeper.LOOK = 0.5  # half a minute outside tests

app = Celery("unqueued", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.update(dlock_url=os.environ["DLOCK_TEST_LOCK_URL"], broker_connection_retry_on_startup=True)
gates = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], socket_timeout=None)


@singleton_task(app=app, key="{n}", ttl=3)
def post(n: str, gate: str = "") -> str:
    if gate:
        gates.blpop(gate, timeout=30)
    return n
