"""Tasks that have one body per machine while the lock store is away."""

import time
from typing import Any

from celery_dlock import signals, singleton_task
from celery_dlock.locking.events import Event
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark, marks_client, noted

app = make_app(
    "faults_local",
    configurable=True,
    dlock_timeout=1.0,
    breaker_reset=0.5,
    worker_prefetch_multiplier=1,
)


@signals.lock_bypassed.connect
def _on_bypassed(sender: Any, event: Event, **_: Any) -> None:
    mark(f"bypassed {event.name}", f"{sender.name} {event.task_id} {event.token} local={event.local}")


def body(self: Any, row: str, gate: str = "") -> list[Any]:
    """Return what its lease says, after the gate is open."""
    lease = self.lease
    with noted(row), marks_client() as client:
        end = time.monotonic() + 60
        while gate and time.monotonic() < end and not client.exists(gate):
            time.sleep(0.02)
    return [lease.local, lease.token is not None, lease.held]


def singleton(name: str, **options: Any) -> Any:
    made: Any = singleton_task(
        app=app, bind=True, name=f"faults_local.{name}", key="{row}", scope="shared", on_store_error="local", **options
    )
    return made(body)


skipping = singleton("skipping", on_conflict="skip")
retrying = singleton("retrying", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.3)
waiting = singleton("waiting", wait=30, on_conflict="raise")
raising = singleton("raising", on_conflict="raise")


@singleton_task(app=app, bind=True, name="faults_local.nesting", key="{row}", scope="shared", on_store_error="local")
def nesting(self: Any, row: str) -> list[Any]:
    """Call itself, eagerly, as the same owner."""
    if self.request.is_eager:
        return [self.lease.local]
    return [self.lease.local, nesting.apply((row,)).get(disable_sync_subtasks=False)]


@app.task(name="faults_local.plain")
def plain() -> str:
    return "plain"
