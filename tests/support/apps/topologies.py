"""One body under each policy, on whatever store; each run notes when it entered and left."""

import json
import os
from typing import Any

from celery import Celery

from celery_dlock import singleton_task
from tests.support.apps.base import History

app = Celery("topologies", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.update(broker_connection_retry_on_startup=True, worker_log_color=False)
#: `dlock_url` and what belongs to it.
app.conf.update(json.loads(os.environ["DLOCK_TEST_CONF"]))

history = History.of_environ()


def body(self: Any, n: str, gate: str = "", end: str = "") -> bool:  # noqa: ARG001  # the environment sends one
    """Be inside the lock `n` until the test opens `gate`; says whether the lease is held at the end."""
    with history.recorded_body({"n": n, "id": self.request.id, "token": self.lease.token}):
        history.pass_gate(gate)
        return bool(self.lease.held)


def singleton(name: str, on_conflict: str, **options: Any) -> Any:
    made: Any = singleton_task(
        app=app, bind=True, name=f"topologies.{name}", key=["n"], on_conflict=on_conflict, **{"ttl": 20, **options}
    )
    return made(body)


skips = singleton("skips", "skip")
short = singleton("short", "skip", ttl=3)
retries = singleton("retries", "retry", retry_delay=0.2, retry_delay_max=0.5)
waits = singleton("waits", "raise", wait=20)
if os.environ["DLOCK_TEST_QUEUE"] == "yes":
    queues = singleton("queues", "queue")
