"""Entries of ledgers with three seats each, which note their start and their end, for runs with kills."""

import json
import os
import time
from typing import Any

from celery_dlock import singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.marks import marks_client

LIMIT = int(os.environ.get("DLOCK_TEST_LIMIT", "3"))
#: Seconds inside.
BODY = float(os.environ.get("DLOCK_TEST_BODY", "0.02"))

app = make_app(
    "seats_e2e",
    dlock_grant_timeout=8,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    # The last one: for so long a worker that dies while it restores keeps the others from it, else for 5 minutes.
    broker_transport_options={"visibility_timeout": 6, "unacked_restore_interval": 0.5, "unacked_mutex_expire": 1},
)


def body(task: Any, account: int, number: int) -> None:
    place = f"{account}/{task.lease.seat}"
    with marks_client() as client:
        client.rpush("e2e", json.dumps(["in", place, number, os.getpid()]))
        time.sleep(BODY)
        with client.pipeline() as pipe:
            pipe.rpush("e2e", json.dumps(["out", place, number, os.getpid()])).sadd("e2e:done", number).execute()


def seated(name: str, **options: Any) -> Any:
    made: Any = singleton_task(app=app, bind=True, name=f"seats.{name}", key=["account"], ttl=3, limit=LIMIT, **options)
    return made(body)


queues = seated("queues", on_conflict="queue")
retries = seated("retries", on_conflict="retry", retry_delay=0.05, retry_delay_max=0.5)
waits = seated("waits", wait=0.5, on_conflict="retry", retry_delay=0.05, retry_delay_max=0.5)
