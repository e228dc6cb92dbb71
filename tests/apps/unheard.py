"""Tasks in a worker whose acknowledgements do not reach its broker, a Redis, while the key `deaf` is in database 1."""

import os

import redis
from celery import Celery
from kombu.transport.redis import QoS

from celery_dlock import singleton_task

app = Celery("unheard", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.update(
    dlock_url=os.environ["DLOCK_TEST_LOCK_URL"],
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3, "unacked_restore_interval": 0.2, "unacked_mutex_expire": 1},
)
notes = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], decode_responses=True)
_ack = QoS.ack


def _ack_unless_deaf(self: QoS, delivery_tag: str) -> None:
    if notes.exists("deaf"):
        raise redis.ConnectionError("the broker does not hear it")
    _ack(self, delivery_tag)


QoS.ack = _ack_unless_deaf


def _run(n: str, end: str) -> str:
    notes.rpush("ran", n)
    if end == "fail":
        raise ValueError(n)
    return n


@singleton_task(app=app, key="{n}")
def early(n: str, end: str = "") -> str:
    return _run(n, end)


@singleton_task(app=app, key="{n}", acks_late=True)
def late(n: str, end: str = "") -> str:
    return _run(n, end)
