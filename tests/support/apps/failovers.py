"""The app of `make chaos STORE=...`: bodies that write down when they run, and write to a fenced resource."""

import json
import os
import time
from typing import Any

from celery import Celery

from celery_dlock import singleton_task
from chaos.gaps import watch_for_gaps
from chaos.history import History
from chaos.resource import write
from tests.support.apps.base import still_held

#: Long enough for a lease to be renewed behind a failover.
TTL = 6.0
SLICE = 0.05

app = Celery("failovers", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_publish_retry=False,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    # The longest lease that a task asks for. A Redlock node that restarted empty stays out for so long.
    dlock_ttl=TTL,
)
#: `dlock_url` and what this run declares.
app.conf.update(json.loads(os.environ["DLOCK_FAILOVERS_CONF"]))
history = History.of_environ()
watch_for_gaps(history)


def body(task: Any, name: str, seconds: float) -> None:
    """Be inside `name` for `seconds`, and write to the resource at both ends of it."""
    lease, run = task.lease, os.urandom(6).hex()
    how, written = "died", os.environ["DLOCK_CHAOS_RESOURCE"]
    facts = {"id": task.request.id, "name": name, "token": lease.token, "pid": os.getpid(), "main": os.getppid()}
    history.note("in", run=run, task=task.name, **facts)
    try:
        history.note("write", run=run, ok=write(written, name, lease.token, task.request.id))
        inside(run, lease, seconds)
        asked = time.monotonic_ns()
        history.note("ensure", run=run, ok=still_held(lease), asked=asked)
        # A holder that learns of the loss would stop here. This one goes on, so that its late write is refused.
        history.note("write", run=run, ok=write(written, name, lease.token, task.request.id))
        how = "return"
    finally:
        history.note("out", run=run, how=how)


def inside(run: str, lease: Any, seconds: float) -> None:
    until, told = time.monotonic() + seconds, False
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(SLICE, left))
        if not told and not lease.held:
            told = True
            history.note("told", run=run)


def singleton(name: str, on_conflict: str, **options: Any) -> Any:
    made: Any = singleton_task(
        app=app, bind=True, name=f"failovers.{name}", scope="shared", key="failovers:{name}", ttl=TTL,
        on_conflict=on_conflict, acks_late=True, **options,
    )  # fmt: skip
    return made(body)


BACK: dict[str, Any] = {"retry_delay": 0.2, "retry_delay_max": 1.0}

skips = singleton("skips", "skip")
retries = singleton("retries", "retry", **BACK)
waits = singleton("waits", "retry", wait=1, **BACK)
if os.environ["DLOCK_FAILOVERS_QUEUE"] == "yes":
    queues = singleton("queues", "queue")
