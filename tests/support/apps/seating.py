"""One body under each policy with three seats (``limit=3``); each run notes its seat, and when it entered and left."""

import os
import signal
from typing import Any

from celery_dlock import singleton_task
from tests.support.apps.base import History, make_app

app = make_app("seating", configurable=True, result_expires=600, worker_log_color=False)
history = History.of_environ()


def work(self: Any, n: str, gate: str = "", end: str = "") -> int:
    """Wait at the gate, and return the seat; ``end="die"``: the first run kills its process."""
    request, lease = self.request, self.lease
    facts = {"task": self.name, "id": request.id, "n": n, "node": request.hostname}
    with history.recorded_body(facts, seat=lease.seat, token=lease.token, gate=gate):
        history.pass_gate(gate)
        if end == "die" and history.set(f"died:{request.id}", 1, nx=True):
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "nested":
            with self.lock_for(n):  # the seat of this run, entered again
                history.note("nested", id=request.id)
        lease.ensure()
    return int(lease.seat)


def define(name: str, **options: Any) -> Any:
    made: Any = singleton_task(app=app, bind=True, name=f"seating.{name}", key=["n"], limit=3, **options)
    return made(work)


skips = define("skips")
raises = define("raises", on_conflict="raise")
retries = define("retries", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.4)
queues = define("queues", on_conflict="queue")
waits = define("waits", wait=10, on_conflict="raise")
late = define("late", on_conflict="retry", retry_delay=0.1, acks_late=True, reject_on_worker_lost=True)
