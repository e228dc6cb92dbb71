"""The state of one run of a task.

:mod:`~celery_dlock.task.execution` drives a run and :mod:`~celery_dlock.task.outcomes` ends one that did not get its
lock. Both read and write this state, and neither imports the other for it.
"""

from __future__ import annotations

import os
from typing import Any, Final

from ..keys.lock_name import LockName
from ..locking.lease import BypassLease, Lease
from ..locking.owner import OwnerContext
from ..messaging.message import PROPERTY, Delivery, RawMessage
from ..messaging.ticks import Tick, tick_of, unstamped
from ..store.model import Identity, Requester
from ..utils.log import log_fields, logger
from .call_options import LockedTask, call_of

__all__ = ["Run"]

#: Position of the headers in a :class:`RawMessage`, which the pool child receives as a bare tuple.
_HEADERS: Final = RawMessage._fields.index("headers")


class Run:
    """The state of one run of a task.

    Args:
        task: The task that runs. The run's request is on top of the task's request stack.

    Raises:
        InvalidLockOptions: The message carries call options that the task does not allow.
        InvalidTick: The message carries a malformed due time.
    """

    #: The lease, once the lock is acquired.
    lease: Lease | None = None
    #: Replaces the lease if the body runs without the lock (``on_store_error="run"`` or ``"local"``).
    bypass: BypassLease | None = None
    #: The lock name whose lock file this run has tried to take (``on_store_error="local"``).
    file_of: LockName | None = None
    #: If the lock is held, the call waits in the lock store.
    queues = False
    #: The body does not run. The task returns ``skip_value`` instead.
    skipped = False
    skip_value: Any = None
    #: Why the message was parked; empty if this delivery did not park it.
    refused_because = ""
    #: The broker flagged this delivery as redelivered, or flagged the message of which this is a copy.
    redelivered = False
    #: The tracer has called ``before_start``, and calls the body next.
    body_is_next = False
    #: A newer call has stopped the body (``on_conflict="replace"``).
    was_stopped = False
    #: The body returned a value.
    returned = False
    #: The message was republished or parked, so the claim made when it was published stays.
    keeps_claim = False
    #: Under ``once_per="tick"``: the due time that the message is for.
    tick: Tick | None = None
    #: The message's rank among the waiters of its lock, once the store has reported it.
    rank_us: int | None = None
    #: When the broker first refused to take the message again, on the monotonic clock. The run has kept its delivery.
    refused_since: float | None = None

    def __init__(self, task: LockedTask) -> None:
        self.task = task
        request: Any = task.request
        self.request = request
        given = (request.properties or {}).get(PROPERTY)
        self.delivery = delivery = Delivery(*given) if given else None
        # Use the message's headers: a tracing tool may have replaced those of the request.
        headers = delivery.raw[_HEADERS] if delivery else request.headers
        if not request.headers and "headers" not in (headers or ()):
            request.headers = None  # as in a run without this library
        self.runtime = runtime = task.dlock
        self.call = call = call_of(task, headers, enabled=runtime.switch.on)
        self.options = options = call.options
        if not options.is_simple:
            self.queues = options.parks
            if options.once_per == "tick" and call.enabled:
                self.tick = self._tick_of(headers)
        task_id, name = request.id, task.name
        self.identity = Identity(task_id, request.retries or 0, request.replaced_task_nesting or 0)
        by = Requester.of(name, task_id, request.hostname or runtime.node, os.getpid())
        if delivery is None:
            # An eager run is nested in its caller, so it re-enters the locks that the caller holds.
            outer = runtime.owner_context()
            self.context = OwnerContext(outer.owner, by, name, task_id, outer)
        else:
            self.context = OwnerContext(delivery.owner, by, name, task_id, delivered=True)

    @property
    def known_rank_us(self) -> int | None:
        """The rank that the store has reported, in this run or before it; None: it has not reported one."""
        return self.rank_us if self.rank_us is not None or self.delivery is None else self.delivery.rank_us

    def record_order(self) -> None:
        """Record that the message holds its lock, is parked or needs neither: its acknowledgement may be sent now."""
        if self.delivery is not None and self.delivery.number:
            self.runtime.receive_order.record(self.delivery.number, self.rank_us or 0)

    @property
    def debounces(self) -> bool:
        """Whether the call waits for newer ones. A retry and an eager call do not."""
        return self.options.debounce is not None and self.delivery is not None and not self.identity.retries

    def _tick_of(self, headers: Any) -> Tick | None:
        task, runtime = self.task, self.runtime
        tick = tick_of(task.name, headers, runtime.clock.wall())
        if tick is None and unstamped(headers) and runtime.first_of(f"unstamped {task.name}"):
            logger.warning(
                "Task %s[%s] has once_per='tick' but its message carries no due time, so once_per is ignored. Start "
                "beat with -S celery_dlock.beat:DLockScheduler (worker -B: beat_scheduler), or use a TickScheduler",
                task.name, self.request.id, extra=log_fields(task.name, self.request.id),
            )  # fmt: skip
        return tick
