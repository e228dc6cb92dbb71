"""An app that says nothing of locks: they are kept where its broker is."""

import os

import redis
from celery import Celery

from celery_dlock import singleton_task

app = Celery("borrowing", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
watched = {"master_name": "mymaster"}
app.conf.update(
    broker_transport_options=watched,
    result_backend_transport_options=watched,
    broker_connection_retry_on_startup=True,
    worker_log_color=False,
)
notes = redis.Redis.from_url(os.environ["DLOCK_TEST_LOCK_URL"], decode_responses=True)


@singleton_task(app=app, name="borrowing.once", key=["number"])
def once(number: int) -> str:
    notes.rpush("began", number)
    notes.blpop("gate", timeout=30)
    return "ran"
