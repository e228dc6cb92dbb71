"""A body that may be stopped, and the end of a run that a newer call has stopped (``on_conflict="replace"``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ..errors import LockLost, StoreUnavailable
from ..locking.lease import Lease
from ..locking.lease_table import BodyAborter, LeaseRecord
from ..messaging.results import CallSkipped, Replaced
from ..utils.log import log_fields, logger
from .outcomes import Skipped, store_skipped

if TYPE_CHECKING:
    from ..keys.lock_name import LockName
    from .base import SingletonTask
    from .execution import Execution

__all__ = ["end_stopped", "report_stopped", "run_stoppable"]

#: The value of a body that has not returned.
_RUNNING: Final[Any] = object()


def run_stoppable(run: Execution, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the body, and stop it when its lease is lost (``on_lost="abort"``) or a newer call replaces it."""
    aborter, reasons, lease = run.runtime.worker.aborter, run.options.stop_reasons, run.lease
    if lease is not None and run.options.replaces:
        lease.watch_for_stop(Replaced)
    if aborter is None or run.delivery is None or lease is None or not reasons:
        return body(*args, **kwargs)
    record, value = lease.record, _RUNNING
    if run.options.replaces:
        lease.watch_for_stop(partial(_replaced, aborter, record))
    try:
        try:
            aborter.enter(record, reasons, run.options.kill_after)
            if record.lost and "lost" in reasons:
                raise LockLost  # lost before the body began, so there is nothing to stop
            value = body(*args, **kwargs)
        finally:
            aborter.leave(record)
    except (LockLost, Replaced):
        # The exception may strike after the body's end, before `leave` forbids it. Then the body has done its work.
        if value is _RUNNING:
            raise
    finally:
        aborter.leave(record)  # again: a signal may interrupt the first call
    return value


def _replaced(aborter: BodyAborter, record: LeaseRecord, *facts: Any) -> Replaced:
    """Return the error of ``lease.ensure()``. The worker raises no second one, which would disturb the cleanup."""
    aborter.told(record)
    return Replaced(*facts)


def end_stopped(run: Execution, lease: Lease) -> NoReturn:
    """End the run REVOKED. Its chain and chord end as for a skipped run.

    Raises:
        Skipped: The end is stored.
    """
    task, request = run.task, run.request
    if lease.replaced_by is None:
        # The watchdog has read the stop request, perhaps in another process. Ask the store which call made it.
        with suppress(StoreUnavailable):
            run.runtime.lock_client.renew(lease, lease.ttl)
    error = report_stopped(task, request.id, run.context.owner, lease.lock_name, lease.replaced_by)
    # An earlier delivery may have stored its end, and died before it was acknowledged.
    store_skipped(run, error, keeps_end=True)
    raise Skipped(error)


def report_stopped(task: SingletonTask, task_id: str, owner: str, name: LockName, by: str | None) -> CallSkipped:
    """Report that a newer call has ended the body of this one. Return the error to store.

    Args:
        task: The task of the stopped call.
        task_id: Its id.
        owner: The owner that held the lock.
        name: The lock name.
        by: The id of the newer call; None if it is unknown.
    """
    error = CallSkipped(f"{name}: replaced by {by or 'a newer call'}", name.text, by)
    logger.info(
        "Task %s[%s] is stopped: %s", task.name, task_id, error, extra=log_fields(task.name, task_id, name.text)
    )
    task.dlock.counts.count("conflicts", task.name, "replaced")
    facts = {"task": task.name, "task_id": task_id, "reason": str(error)}
    task.dlock.listeners.emit("skipped", name=name.text, owner=owner, **facts)
    return error
