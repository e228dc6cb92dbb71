"""The end of a run whose body a newer call has stopped (``on_conflict="replace"``)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from ..errors import StoreUnavailable
from ..locking.lease import Lease
from ..messaging.results import CallSkipped, has_end
from ..utils.log import log_fields, logger
from .outcomes import Skipped, store_skipped

if TYPE_CHECKING:
    from .run import Run

__all__ = ["end_stopped"]


def end_stopped(run: Run, lease: Lease) -> NoReturn:
    """End the run REVOKED, with its canvas.

    Raises:
        Skipped: The end is stored.
    """
    task, request, name = run.task, run.request, lease.lock_name
    if lease.replaced_by is None:
        # The watchdog has read the stop request, perhaps in another process. Ask the store which call made it.
        with suppress(StoreUnavailable):
            run.runtime.lock_client.renew(lease, lease.ttl)
    error = CallSkipped(f"{name}: replaced by {lease.replaced_by or 'a newer call'}", name.text, lease.replaced_by)
    logger.info(
        "Task %s[%s] is stopped: %s", task.name, request.id, error, extra=log_fields(task.name, request.id, name.text)
    )
    run.runtime.counts.count("conflicts", task.name, "replaced")
    facts = {"task": task.name, "task_id": request.id, "reason": str(error)}
    task.dlock.listeners.emit("skipped", name=name.text, owner=run.context.owner, **facts)
    # An earlier delivery may have stored its end, and died before it was acknowledged.
    if run.delivery is None or not has_end(task, request.id):
        store_skipped(run, error)
    raise Skipped(error)
