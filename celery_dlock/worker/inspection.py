"""The inspect command ``dlock``: what this worker holds, has lost and counts, and how its watchdog is.

``LockControl.workers()`` asks it.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from celery.worker.control import inspect_command

from ..control.workers import COMMAND, COUNTERS, LEASES, LOST_WITHIN
from ..keys.lock_name import task_of_name
from ..messaging.wire import FIELD, WIRE_VERSION
from ..runtime import NO_WORKER, Runtime
from ..store.acquisition import owner_of

if TYPE_CHECKING:
    from ..counters.meter import Meter
    from ..locking.lease_table import LeaseRecord

__all__ = ["held_locks"]

#: Seconds since the last round after which a running watchdog counts as late. A round takes up to 3 s.
LATE: Final = 10.0


@inspect_command(name=COMMAND)
def held_locks(state: Any) -> dict[str, Any]:
    """Locks that the worker holds, and the health of its watchdog."""
    # The keys are fields of `WorkerView`. No value has arguments of tasks. This runs in the thread that receives
    # messages, so it asks neither store nor broker.
    runtime = Runtime.of(state.app)
    me = {
        "version": version("celery-dlock"),
        FIELD: WIRE_VERSION,
        "pool": _pool(state.consumer),
        "pid": os.getpid(),
    }
    if runtime.worker is NO_WORKER:
        return {**me, "problem": "it takes no locks: dlock_enabled is off, or it has no lock store"}
    watchdog, now = runtime.watchdog, runtime.clock.monotonic()
    held, scanned = watchdog.held, round(now - watchdog.scanned_at, 3) if watchdog.scanned_at else None
    return {
        **me,
        "watchdog": _health(running=watchdog.running, scanned=scanned, held=len(held)),
        "scanned": scanned,
        "held": len(held),
        "leases": [_lease(runtime, record, now) for record in held[:LEASES]],
        "lost": runtime.listeners.losses.within(LOST_WITHIN),
        "counters": None if runtime.counts.meter is None else _counters(runtime.counts.meter),
    }


def _health(*, running: bool, scanned: float | None, held: int) -> str:
    if not running:
        return "dead" if held else "idle"
    return "late" if scanned is not None and scanned > LATE else "ok"


def _counters(meter: Meter) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counters since the worker's start that are not 0: by metric, task and the metric's other label."""
    found: dict[str, dict[str, dict[str, int]]] = {name: {} for name in COUNTERS}
    for metric, samples in meter.read():
        for sample in samples if metric.name in COUNTERS else ():
            if sample.value:
                task, value = (*sample.labels, "")[:2]
                found[metric.name].setdefault(task, {})[value] = int(sample.value)
    return found


def _pool(consumer: Any) -> str:
    pool = type(getattr(consumer, "pool", None)).__module__
    return pool.removeprefix("celery.concurrency.").replace("thread", "threads")


def _lease(runtime: Runtime, record: LeaseRecord, now: float) -> list[object]:
    found = runtime.worker.describe(owner_of(record.acquisition))
    return [
        record.name.text,
        record.acquisition,
        found.get("task", task_of_name(record.name)),
        found.get("task_id") or "",
        record.pid,
        round(record.deadline - now, 3),
        record.ttl,
    ]
