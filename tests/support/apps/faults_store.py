"""Tasks that want different things while the lock store is away."""

import time
from typing import Any

from celery_dlock import LockLost, signals, singleton_task
from celery_dlock.locking.events import Event
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark, marks_client, noted

#: Short, so that the tests are; the rest is much longer than what they do in it.
TIMEOUT, BREAKER_RESET = 1.0, 4.0

app = make_app(
    "faults_store",
    dlock_timeout=TIMEOUT,
    breaker_reset=BREAKER_RESET,
    worker_prefetch_multiplier=1,
)


@signals.lock_bypassed.connect
def _on_bypassed(sender: Any, event: Event, **_: Any) -> None:
    mark(f"bypassed {event.name}", f"{sender.name} {event.task_id} {event.token}")


@app.task
def plain() -> str:
    return "plain"


@singleton_task(app=app)
def retrying(row: str) -> str:
    mark(row, "start")
    return "ran"


@singleton_task(app=app, on_store_error="fail")
def failing(row: str) -> str:
    mark(row, "start")
    return "ran"


@singleton_task(app=app, bind=True, on_store_error="run")
def bypassing(self: Any, row: str) -> list[Any]:
    """The reports to the body about its lease."""
    mark(row, "start")
    lease = self.lease
    told = []
    for ask in (lease.ensure, lambda: lease.extend(5)):
        try:
            ask()
        except LockLost as error:
            told.append(str(error))
    return [lease.name, lease.token, lease.held, lease.lost, lease.remaining(), lease.hold_count, told]


@singleton_task(app=app, bind=True, on_store_error="run")
def insisting(self: Any, row: str) -> None:
    """May not run without its lock after all."""
    mark(row, "start")
    self.lease.ensure()


@singleton_task(app=app, ttl=60)
def holding(row: str, gate: str) -> str:
    """Holds its lock until the gate is open."""
    end = time.monotonic() + 30
    with noted(row), marks_client() as client:
        while time.monotonic() < end and not client.exists(gate):
            time.sleep(0.02)
    return "held"


@singleton_task(app=app, on_conflict="queue")
def parked(row: str) -> str:
    mark(row, "start")
    return "ran"
