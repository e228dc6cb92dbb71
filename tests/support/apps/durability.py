"""Tasks whose locks need confirmations, and which want different things where those are missing."""

import os
import time
from typing import Any

from celery_dlock import singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark

app = make_app(
    "durability",
    dlock_timeout=8,
    dlock_durability={"fsync": "local"} if "DLOCK_TEST_FSYNC" in os.environ else {"replicas": 1, "timeout": 0.8},
    dlock_quarantine=float(os.environ.get("DLOCK_TEST_QUARANTINE", "0")),
    worker_prefetch_multiplier=1,
)


def body(self: Any, row: str) -> bool:
    """Whether it holds a lock."""
    mark(row, "start")
    return bool(self.lease.held)


def singleton(name: str, **options: Any) -> Any:
    made: Any = singleton_task(app=app, bind=True, name=f"durability.{name}", **options)
    return made(body)


failing = singleton("failing", on_store_error="fail")
bypassing = singleton("bypassing", on_store_error="run")
returning = singleton("returning")
queueing = singleton("queueing", on_conflict="queue")


@singleton_task(app=app, name="durability.working", ttl=3, on_lost="abort")
def working(row: str) -> None:
    """Works until it is stopped."""
    mark(row, "start")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.02)
