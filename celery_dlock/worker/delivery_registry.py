"""The deliveries that a worker's main process has received and not yet finished."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.worker.state import revoked

from ..keys.lock_name import LockName, task_of_name
from ..locking.lease_table import LeaseRecord
from ..locking.watchdog import KILL_GRACE
from ..runtime import Runtime, WorkerHooks
from ..store.acquisition import owner_of
from ..task import execution
from ..utils.latest import Latest
from .body_kill import BodyKiller
from .completion_marker import CompletedRun, CompletionMarker, channel_is_gone

if TYPE_CHECKING:
    from celery import Celery

    from ..store.model import Grant, Released
    from .claim_renewal import ClaimRenewer
    from .pool_children import PoolChildren
    from .queue_sweeper import QueueSweeper
    from .request import SingletonRequest

__all__ = ["DeliveryRegistry", "sends_task_events"]


#: Maximum entries of each table: ends of dead pool children, and lock names with their last number.
REMEMBERED = 1000
#: Maximum number of messages under the queue policy whose lock names are remembered.
WAITERS = 20_000
#: Task ids that one call compares with the revoked ones if the number of revoked ids has not changed. A call takes a
#: tenth of a millisecond. After 20 calls (2 s), all ids are compared.
COMPARED = WAITERS // 20
#: Seconds after which an acknowledgement that was not sent may be lost. A false alarm costs one script.
OVERDUE = 0.1


def sends_task_events(dispatcher: Any) -> bool:
    """Return whether a worker sends task events now. Its dispatcher is also enabled for heartbeats alone."""
    return bool(dispatcher and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups))


class _NoSweeper:
    """The sweeper of a worker without a store. In such a worker no call takes a lock, and no message is parked."""

    def start_sweeping(self) -> None: ...
    def hand_off(self, name: LockName, grant: Grant) -> None: ...
    def discard_waiter(self, name: LockName, identity: str) -> None: ...
    def sweep_after(self, number: int, name: LockName, seconds: float) -> None: ...

    def acknowledge(self, request: SingletonRequest) -> None:
        request.dlock_acknowledge()


class _NoRenewer:
    """The claim renewer of a worker that has no store."""

    def release_claim(self, request: SingletonRequest) -> None: ...


class DeliveryRegistry(WorkerHooks):
    """The deliveries of one app's worker, and the worker's side of the app's runtime (`WorkerHooks`)."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.app = runtime.app
        # No WeakValueDictionary: it takes five times as many steps for each message.
        self._by_owner: dict[str, weakref.ref[SingletonRequest]] = {}
        #: The deliveries whose messages were published with a claim.
        self.claiming: weakref.WeakValueDictionary[str, SingletonRequest] = weakref.WeakValueDictionary()
        self._settled: Latest[str, tuple[float, str, str, str]] = Latest(REMEMBERED)
        self._freed: Latest[str, LeaseRecord] = Latest(REMEMBERED)
        self._last_numbers: Latest[LockName, int] = Latest(REMEMBERED)
        #: By task id: the lock name and identity of a message that was passed to the pool and may be parked now.
        self._parked_at: Latest[str, tuple[LockName, str]] = Latest(WAITERS)
        self._revoked = 0
        #: The task ids that are still to be compared with the revoked ones in this round.
        self._uncompared: list[str] = []
        #: Returns the worker's consumer tags by queue.
        self.tags: Callable[[], Mapping[str, str]] = dict
        #: Returns the worker's event dispatcher, if it has one.
        self.dispatcher: Callable[[], Any] = lambda: None
        #: Returns whether the worker consumes. If not, every acknowledgement may be lost.
        self.consumes: Callable[[], bool] = lambda: True
        #: The owners whose locks the watchdog released after their process died.
        self._holding: Latest[str, None] = Latest(REMEMBERED)
        self.completion_marker = CompletionMarker(runtime, self._holding.__contains__)
        #: By owner: the time by which its process must have ended, if Celery kills it for its hard time limit.
        self._kill_deadlines: Latest[str, float] = Latest(REMEMBERED)
        self.body_killer = BodyKiller(self)
        #: The pool children and their lease tables. This is the only strong reference: fork hooks have a weak one.
        self.children: PoolChildren | None = None
        self.sweeper: QueueSweeper | _NoSweeper = _NoSweeper()
        self.claim_renewer: ClaimRenewer | _NoRenewer = _NoRenewer()

    @classmethod
    def of(cls, app: Celery) -> DeliveryRegistry:
        """Return the registry of ``app``, attached to its runtime at the first use."""
        runtime = Runtime.of(app)
        if not isinstance(runtime.worker, cls):
            runtime.worker = cls(runtime)
        return runtime.worker

    @functools.cached_property
    def queues(self) -> Any:
        """The app's queues. Celery changes this mapping in place, and its own property costs ninety steps per task."""
        return self.app.amqp.queues

    @functools.cached_property
    def doubtful_after(self) -> float | None:
        """Seconds after which the broker may have delivered a message again; None: the broker has no such limit."""
        return self.runtime.settings.doubtful_after

    def add(self, request: SingletonRequest) -> None:
        """Add a delivery. It is forgotten when its request is freed."""
        by_owner, owner = self._by_owner, request.dlock_owner
        # When the request is freed, Python calls pop(owner, reference).
        by_owner[owner] = weakref.ref(request, partial(by_owner.pop, owner))

    def find(self, owner: str) -> SingletonRequest | None:
        """Return the delivery of an owner; None if this process does not have its request any more."""
        reference = self._by_owner.get(owner)
        return None if reference is None else reference()

    def attach(self, sweeper: QueueSweeper, claim_renewer: ClaimRenewer) -> None:
        """Set the threads that publish grants and release claims. Before this call, neither is done."""
        self.sweeper, self.claim_renewer = sweeper, claim_renewer
        self.completion_marker.is_polled = True

    def hand_off(self, name: LockName, grant: Grant | None) -> None:
        """Have the queue sweeper publish a granted message. None is ignored."""
        if grant is not None:
            self.sweeper.hand_off(name, grant)

    def may_be_redelivered(self, acquisition: str) -> bool:
        """Return whether the broker may have delivered the message of this acquisition again.

        This is so if the acknowledgement was lost. With late acknowledgement, it is also so if the channel is closed,
        if the visibility timeout is over, or while the worker does not consume. The last condition is for RabbitMQ: if
        the broker closes a channel, py-amqp opens it again and reports this only by an error.
        """
        request = self.find(owner_of(acquisition))
        if request is None:
            return False
        if request.acknowledged:
            return self._ack_may_be_lost(request)
        if not request.task.acks_late:
            return False
        limit = self.doubtful_after
        if limit is not None and time.monotonic() - request.dlock_delivered >= limit:
            return True
        return not self.consumes() or channel_is_gone(request.message)

    def _ack_may_be_lost(self, request: SingletonRequest) -> bool:
        if request.dlock_ack_lost:
            return True
        if request.message.acknowledged:
            return False
        # Celery sends the acknowledgement in a later round of its event loop.
        return channel_is_gone(request.message) or time.monotonic() - request.dlock_ack_requested_at >= OVERDUE

    def with_claims(self) -> Iterator[SingletonRequest]:
        """Return the deliveries whose messages were published with a claim. The claim renewal's thread calls this."""
        # `valuerefs` copies the references in one step. The consumer may add to the mapping during the iteration.
        return (request for ref in self.claiming.valuerefs() if (request := ref()) is not None)

    # Under the queue policy.

    def number(self, request: SingletonRequest, name: LockName | None) -> tuple[int, int]:
        """Return the number of a message, and that of its predecessor: the last message of the same lock name.

        Args:
            request: The message that is about to be passed to the pool.
            name: The lock name; None for a republished message, which has its rank already.
        """
        self.sweeper.start_sweeping()
        number = self.runtime.receive_order.next_number()
        predecessor = 0
        if name is not None:
            predecessor = self._last_numbers.pop(name, 0)
            self._last_numbers[name] = number
            self._parked_at[request.id] = name, request.dlock_identity.digest
        return number, predecessor

    def newly_revoked(self) -> list[tuple[LockName, str]]:
        """Return the messages that were revoked since the last call and may be parked: lock names and identities.

        Celery's control command has no hook, so this reads the set in which Celery keeps revocations. If this
        worker does not know a revoked waiter, the waiter ends when it is granted, like every revoked message.

        Celery bounds that set (``CELERY_WORKER_REVOKES_MAX``). A full set keeps its length when an id is added, so each
        call also compares the next part of the known ids.
        """
        if len(revoked) != self._revoked:
            self._revoked = len(revoked)
            compared = list(self._parked_at)
        elif revoked:
            self._uncompared = self._uncompared or list(self._parked_at)
            compared, self._uncompared = self._uncompared[-COMPARED:], self._uncompared[:-COMPARED]
        else:
            compared = []
        known = (self._parked_at.pop(task_id, None) for task_id in compared if task_id in revoked)
        return [waiter for waiter in known if waiter is not None]

    def describe(self, owner: str) -> dict[str, Any]:
        """Return the task and the task id of an owner, as fields of an event; empty if the owner is unknown."""
        request = self.find(owner)
        return {} if request is None else {"task": request.task.name, "task_id": request.id}

    def monitored_as(self) -> str | None:
        """Return this worker's name while it sends events; None otherwise.

        A pool child calls this during a run, the main process at any time.
        """
        run = execution.running()
        if run is not None:
            return run.request.hostname if run.delivery is not None and run.delivery.monitored else None
        dispatcher = self.dispatcher()
        return dispatcher.hostname if sends_task_events(dispatcher) else None

    def killing(self, request: SingletonRequest) -> None:
        """Record that Celery is about to kill this delivery's process, because its hard time limit is over."""
        self._kill_deadlines[request.dlock_owner] = self.runtime.clock.monotonic() + KILL_GRACE

    def kill_deadline(self, acquisition: str) -> float:
        """Return when the process of this acquisition must have ended; 0 if no hard time limit was enforced."""
        return self._kill_deadlines.get(owner_of(acquisition), 0.0) if self._kill_deadlines else 0.0

    # A done mark for a dead pool child needs two events, in any order. In one, the watchdog releases the child's lock.
    # In the other, Celery stores the end and acknowledges the message.

    def settle(self, request: SingletonRequest, ended_at: float) -> None:
        """Record that the end of a run is stored and final, and that its pool child is dead or dying.

        Args:
            request: The delivery that ended.
            ended_at: The time on the monotonic clock, read before the end was stored.
        """
        self._settled[request.dlock_owner] = (ended_at, request.dlock_identity.digest, request.task.name, request.id)
        self._mark(request.dlock_owner)

    def freed(self, record: LeaseRecord, released: Released) -> None:
        """Record that the watchdog released a lease of a dead pool child."""
        self.hand_off(record.name, released.granted)
        owner = owner_of(record.acquisition)
        if released.ours:
            self._count_freed(owner, record)
            self._holding[owner] = None
        if released.duplicate_seen or not released.ours:
            self._freed[owner] = record
            self._mark(owner)

    def _count_freed(self, owner: str, record: LeaseRecord) -> None:
        request = self.find(owner)
        task = task_of_name(record.name) if request is None else request.task.name
        self.runtime.counts.count("released", task, "watchdog")
        # Without a release request, the process died while it held the lock.
        if not record.ending and request is not None and request.task.lock_options.once_per:
            self.runtime.counts.count("unknown_outcomes", task)

    def _mark(self, owner: str) -> None:
        # Both events may come at once, here and in the watchdog's thread: only one of the two pops finds the record.
        if owner in self._settled and (record := self._freed.pop(owner, None)) is not None:
            ended_at, identity, task, task_id = self._settled.pop(owner)
            # The sweeper's thread writes the mark: a script must delay neither this thread nor the watchdog.
            self.completion_marker.mark_soon(CompletedRun(ended_at, record.name, identity, owner, task, task_id))
