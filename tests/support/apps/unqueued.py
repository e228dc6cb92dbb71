"""A task that waits in the store only where a call chooses to, and workers that look for such calls twice a second."""

import os

import redis

from celery_dlock import singleton_task
from celery_dlock.worker import queue_sweeper as sweeper
from tests.support.apps.base import make_app

sweeper.CHECK_INTERVAL = 0.5  # half a minute outside tests

app = make_app(
    "unqueued",
)
gates = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], socket_timeout=None)


@singleton_task(app=app, key="{n}", ttl=3)
def post(n: str, gate: str = "") -> str:
    if gate:
        gates.blpop(gate, timeout=30)
    return n
