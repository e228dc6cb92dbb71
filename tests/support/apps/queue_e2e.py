"""A ledger whose entries note their start and their end, for runs with kills."""

import json
import os
import time

from celery_dlock import singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.marks import marks_client

app = make_app(
    "queue_e2e",
    dlock_grant_timeout=8,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    # The last one: for so long a worker that dies while it restores keeps the others from it, else for 5 minutes.
    broker_transport_options={"visibility_timeout": 6, "unacked_restore_interval": 0.5, "unacked_mutex_expire": 1},
)


@singleton_task(app=app, name="e2e.post", on_conflict="queue", key=["account"], ttl=3)
def post(account: int, number: int) -> None:
    with marks_client() as client:
        client.rpush("e2e", json.dumps(["in", account, number, os.getpid()]))
        time.sleep(0.001)
        with client.pipeline() as pipe:
            pipe.rpush("e2e", json.dumps(["out", account, number, os.getpid()])).sadd("e2e:done", number).execute()


@singleton_task(app=app, name="e2e.ledger", on_conflict="queue", key=["account"], ttl=3, reject_on_worker_lost=False)
def ledger(account: int, number: int) -> None:
    """An entry that does not run again if its pool child dies."""
    with marks_client() as client:
        client.rpush("e2e", json.dumps(["in", account, number, os.getpid()]))
        time.sleep(0.1)  # so long that most kills cut a body
        client.rpush("e2e", json.dumps(["out", account, number, os.getpid()]))
