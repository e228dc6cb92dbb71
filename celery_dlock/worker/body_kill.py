"""The kill of pool children whose bodies do not stop when a newer call replaces them (``stop`` with seconds).

The watchdog's thread kills. Celery's thread then ends the call (:mod:`.request`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ..store.acquisition import owner_of
from ..utils.latest import Latest
from ..utils.log import log_fields, logger
from ..utils.threads import SerialExecutor

if TYPE_CHECKING:
    from ..keys.lock_name import LockName
    from ..locking.shared_lease_table import WatchdogRecord
    from .delivery_registry import DeliveryRegistry
    from .pool_children import ChildWatch

__all__ = ["BodyKiller", "KilledBody", "StopDeadlines"]

#: Maximum number of killed bodies whose call Celery has not ended yet.
REMEMBERED: Final = 1000


class KilledBody(NamedTuple):
    """A body that was killed.

    Args:
        name: The lock name.
        by: The task id of the newer call; None if no renewal has told it.
    """

    name: LockName
    by: str | None


class StopDeadlines:
    """The bodies of one pool child that were asked to stop, and when each is to be killed."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def overdue(self, records: Sequence[WatchdogRecord], now: float) -> list[WatchdogRecord]:
        """Return the records whose bodies have not ended in time.

        If the lease's holder has learned of the newer call before the watchdog, its id is unknown. Then the body goes
        on until a renewal tells the id, or the lease is lost. No call gets the lock before that.
        """
        asked = [record for record in records if record.must_end]
        self._ends = {
            record.acquisition: self._ends.get(record.acquisition, now + record.kill_after) for record in asked
        }
        return [
            record
            for record in asked
            if now >= self._ends[record.acquisition] and (record.replaced_by is not None or record.lost)
        ]


class BodyKiller:
    """Kills pool children, and knows the calls that have to be ended because of that.

    Args:
        deliveries: The deliveries of this worker.
    """

    def __init__(self, deliveries: DeliveryRegistry) -> None:
        self._deliveries = deliveries
        self._killed: Latest[str, KilledBody] = Latest(REMEMBERED)
        #: Stores ends that the result backend did not take at once. Celery's thread must not wait for that.
        self.ends = SerialExecutor()
        #: The acquisition of the last body whose kill had to wait.
        self._delayed = ""
        #: Tells the pool that this worker ends the child with this pid, so that it logs no error. Set by the bootstep.
        self.announce: Callable[[int], None] = lambda pid: None
        #: Calls a function in Celery's thread. Set by the bootstep.
        self.soon: Callable[[Callable[[], None]], None] = lambda call: None

    def kill(self, child: ChildWatch, record: WatchdogRecord) -> None:
        """Kill the child if it still runs the body of this lease. The watchdog's thread calls this.

        The child is paused while this is checked. Without that, the body could end between the check and the kill, and
        the kill would strike the next task.
        """
        if child.killed:
            return
        owner = owner_of(record.acquisition)
        if self._deliveries.kill_deadline(record.acquisition):
            return  # Celery kills the child itself, and has ended the call
        # Celery before 5.7 forgets running calls when it loses the broker. The broker then delivers the message again,
        # and the mark of its stop request in the store ends that delivery.
        request = self._deliveries.find(owner)
        task, task_id = (None, None) if request is None else (request.task.name, request.id)
        call = f"under {record.name}" if request is None else f"{task}[{task_id}]"
        fields = log_fields(task, task_id, record.name.text)
        with child.paused() as stands_still:
            if not stands_still and self._delayed != record.acquisition and not child.gone():
                self._delayed = record.acquisition
                logger.warning(
                    "Task %s cannot be killed yet (stop), because pool child %d does not pause; retrying",
                    call, child.pid, extra=fields,
                )  # fmt: skip
            if not stands_still or not record.must_end:
                return
            self.announce(child.pid)
            if request is not None:
                self._killed[owner] = KilledBody(record.name, record.replaced_by)
            child.send(signal.SIGKILL)
        if request is not None:
            self.soon(request.dlock_on_killed)
        logger.warning(
            "Task %s is killed with pool child %d: a newer call has replaced it, and it has not ended within %g s "
            "(stop)", call, child.pid, record.kill_after, extra=fields,
        )  # fmt: skip

    def knows(self, owner: str) -> bool:
        """Return whether the body of this delivery was killed and nothing has taken it yet."""
        return owner in self._killed

    def take(self, owner: str) -> KilledBody | None:
        """Return the killed body of this delivery, once; None if its body was not killed."""
        return self._killed.pop(owner, None)
