"""What the main process of a worker knows of its deliveries."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from celery.worker.state import revoked

from ..keys.key_spec import LockName
from ..locking.lease_table import LeaseRecord
from ..locking.watchdog import KILL_GRACE
from ..runtime import Runtime
from ..store.model import owner_of
from ..task import execution
from .completion_marker import CompletedDelivery, CompletedRun, CompletionMarker, channel_is_gone

if TYPE_CHECKING:
    from celery import Celery

    from ..locking.lease_table import BodyAborter
    from ..store.model import Grant, Released
    from .pool_children import PoolChildren
    from .queue_sweeper import HeldBack

__all__ = ["DeliveryRegistry", "sends_task_events"]


#: Ends of dead children that the main process remembers until it knows both halves of them; names of elders.
REMEMBERED = 1000
#: Messages under the queue policy of which it remembers where they may wait.
WAITERS = 20_000
#: Task ids that one look compares with the revoked ones while nothing tells of a new revocation: a tenth of a
#: millisecond. All places are compared in 2 s.
COMPARED = WAITERS // 20
#: Seconds after which an acknowledgement on its way is a reason to doubt; needlessly, that costs a script.
OVERDUE = 0.1


def sends_task_events(dispatcher: Any) -> bool:
    """Return whether a worker sends task events just now; its dispatcher is enabled for its heartbeats too."""
    return bool(dispatcher and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups))


class Delivered(CompletedDelivery, Protocol):
    """One delivery."""

    @property
    def acknowledged(self) -> bool: ...

    dlock_owner: str
    dlock_delivered: float
    dlock_ack_requested_at: float


class Sweeper(Protocol):
    """What the registry and the requests ask of the queue sweeper."""

    def sweep(self) -> None: ...
    def hand_off(self, name: LockName, grant: Grant) -> None: ...
    def discard_waiter(self, name: LockName, identity: str) -> None: ...
    def acknowledge(self, request: HeldBack) -> None: ...


class Renewer(Protocol):
    """What the requests ask of the thread that renews claims."""

    def release_claim(self, request: Any) -> None: ...


class _NoSweeper:
    """The sweeper of a worker that has no store, and so no queues: its calls take no lock."""

    def sweep(self) -> None: ...
    def hand_off(self, name: LockName, grant: Grant) -> None: ...
    def discard_waiter(self, name: LockName, identity: str) -> None: ...

    def acknowledge(self, request: HeldBack) -> None:
        request.dlock_acknowledge()


class _NoRenewer:
    """The claim renewer of a worker that has no store."""

    def release_claim(self, request: Any) -> None: ...


class DeliveryRegistry:
    """What the main process knows of its deliveries, kept on the app's runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.by_owner: weakref.WeakValueDictionary[str, Delivered] = weakref.WeakValueDictionary()
        #: Those whose messages were published with a claim.
        self.claiming: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._settled: OrderedDict[str, tuple[float, str, str]] = OrderedDict()
        self._freed: OrderedDict[str, LeaseRecord] = OrderedDict()
        self._last_numbers: OrderedDict[LockName, int] = OrderedDict()
        #: By task id: where a message that was handed over may wait now.
        self._places: OrderedDict[str, tuple[LockName, str]] = OrderedDict()
        self._revoked = 0
        #: Task ids with a place that are still to be compared with the revoked ones in this round.
        self._uncompared: list[str] = []
        #: The running worker's consumer tags by queue.
        self.tags: Callable[[], Mapping[str, str]] = dict
        #: The running worker's event dispatcher, if it has one.
        self.dispatcher: Callable[[], Any] = lambda: None
        #: Set by the worker: does it consume? Once it does not, no acknowledgement is sure to be heard.
        self.consumes: Callable[[], bool] = lambda: True
        #: Owners whose locks the keeper freed for them.
        self._holding: OrderedDict[str, None] = OrderedDict()
        self.completion_marker = CompletionMarker(runtime, self._holding.__contains__)
        #: By owner: when the process should have ended that Celery kills for its hard time limit.
        self._kill_deadlines: OrderedDict[str, float] = OrderedDict()
        self._queues: Any = None
        #: Stops the body of a lost lease, if the worker's pool has a way to do so.
        self.aborter: BodyAborter | None = None
        #: The lease tables of the pool children; kept alive here, because the hooks of a fork hold it weakly.
        self.children: PoolChildren | None = None
        self.sweeper: Sweeper = _NoSweeper()
        self.claim_renewer: Renewer = _NoRenewer()

    @classmethod
    def of(cls, app: Celery) -> DeliveryRegistry:
        """Return the registry of ``app``, attached to its runtime at the first use."""
        runtime = Runtime.of(app)
        if not isinstance(runtime.worker, cls):
            runtime.worker = cls(runtime)
        return runtime.worker

    @property
    def queues(self) -> Any:
        """The app's queues. Celery changes this mapping in place, and its own property costs ninety steps per task."""
        if self._queues is None:
            self._queues = self.runtime.app.amqp.queues
        return self._queues

    def attach(self, sweeper: Sweeper, claim_renewer: Renewer) -> None:
        """Set the threads that publish grants and give claims up; until then both are left undone."""
        self.sweeper, self.claim_renewer = sweeper, claim_renewer
        self.completion_marker.is_polled = True

    def hand_off(self, name: LockName, grant: Grant | None) -> None:
        """Have the queue sweeper publish a granted message. None is ignored."""
        if grant is not None:
            self.sweeper.hand_off(name, grant)

    def may_be_redelivered(self, acquisition: str) -> bool:
        """Has the broker perhaps delivered this holder's message once more?

        So with a message whose acknowledgement was not heard, and with a late-acknowledged one whose channel is gone,
        or that outlived the visibility timeout. And while the worker does not consume: py-amqp opens a channel again
        that RabbitMQ closed, and says so only by an error.
        """
        request = self.by_owner.get(owner_of(acquisition))
        if request is None:
            return False
        if request.acknowledged:
            return self._perhaps_unheard(request)
        if not request.task.acks_late:
            return False
        doubtful_after = self.runtime.settings.doubtful_after
        if doubtful_after is not None and time.monotonic() - request.dlock_delivered >= doubtful_after:
            return True
        return not self.consumes() or channel_is_gone(request.message)

    def _perhaps_unheard(self, request: Delivered) -> bool:
        if request.dlock_ack_lost:
            return True
        if request.message.acknowledged:
            return False
        # Celery tells the broker in a later round of its event loop.
        return channel_is_gone(request.message) or time.monotonic() - request.dlock_ack_requested_at >= OVERDUE

    def with_claims(self) -> Iterator[Any]:
        """The deliveries whose messages were published with a claim; asked by a thread."""
        # The list of references is made in one step, while the consumer adds to the mapping.
        return (request for ref in self.claiming.valuerefs() if (request := ref()) is not None)

    # Under the queue policy.

    def number(self, request: Delivered, name: LockName | None) -> tuple[int, int]:
        """The next message's number, and its elder's: the last one of the same lock that was handed over.

        Args:
            request: The message that is handed over.
            name: Of its lock; None for a copy, which has its place already.
        """
        self.sweeper.sweep()
        number = self.runtime.arrivals.next_number()
        elder = 0
        if name is not None:
            elder = self._last_numbers.pop(name, 0)
            self._last_numbers[name] = number
            self._places[request.id] = name, request.dlock_identity.digest
            for remembered, most in ((self._last_numbers, REMEMBERED), (self._places, WAITERS)):
                if len(remembered) > most:
                    remembered.popitem(last=False)
        return number, elder

    def newly_revoked(self) -> list[tuple[LockName, str]]:
        """What was revoked since the last call and may wait: locks' names and identities.

        Looked at where Celery keeps revocations, because its control command has no hook. A waiter that this worker
        does not know of ends when its turn comes, as every revoked message does.

        Celery bounds its set of revocations (``CELERY_WORKER_REVOKES_MAX``). A full set keeps its length when it takes
        a new one, so each call also compares the next part of the places.
        """
        if len(revoked) != self._revoked:
            self._revoked = len(revoked)
            compared = list(self._places)
        elif revoked:
            self._uncompared = self._uncompared or list(self._places)
            compared, self._uncompared = self._uncompared[-COMPARED:], self._uncompared[:-COMPARED]
        else:
            compared = []
        known = (self._places.pop(task_id, None) for task_id in compared if task_id in revoked)
        return [place for place in known if place is not None]

    def describe(self, owner: str) -> dict[str, Any]:
        """Whose delivery it is, as fields of an event."""
        request = self.by_owner.get(owner)
        return {} if request is None else {"task": request.task.name, "task_id": request.id}

    def monitored_as(self) -> str | None:
        """This worker's name while it sends events. Asked in a child during a run, in the main process at any time."""
        run = execution.running()
        if run is not None:
            return run.request.hostname if run.delivery is not None and run.delivery.monitored else None
        dispatcher = self.dispatcher()
        return dispatcher.hostname if sends_task_events(dispatcher) else None

    def killing(self, request: Delivered) -> None:
        """Record that Celery is about to kill this delivery's process, because its hard time limit is over."""
        self._kill_deadlines[request.dlock_owner] = self.runtime.clock.monotonic() + KILL_GRACE
        if len(self._kill_deadlines) > REMEMBERED:
            self._kill_deadlines.popitem(last=False)

    def kill_deadline(self, acquisition: str) -> float:
        """Return when the process of this acquisition should have ended; 0 if its hard time limit was not enforced."""
        return self._kill_deadlines.get(owner_of(acquisition), 0.0) if self._kill_deadlines else 0.0

    # A dead child's end has two halves, told in either order: the keeper freed its lock, and Celery stored the end
    # and acknowledged. The done mark needs both.

    def settle(self, request: Delivered, ended_at: float) -> None:
        """A child is dead or dying, and the end of its run is stored and final.

        Args:
            request: Whose end it is.
            ended_at: Before it was stored, on the monotonic clock.
        """
        whose = f"{request.task.name}[{request.id}]"
        self._settled[request.dlock_owner] = (ended_at, request.dlock_identity.digest, whose)
        self._mark(request.dlock_owner)

    def freed(self, slot: LeaseRecord, released: Released) -> None:
        self.hand_off(slot.name, released.granted)
        owner = owner_of(slot.acquisition)
        if released.ours:
            self._holding[owner] = None
            if len(self._holding) > REMEMBERED:
                self._holding.popitem(last=False)
        if released.duplicate_seen or not released.ours:
            self._freed[owner] = slot
            self._mark(owner)

    def _mark(self, owner: str) -> None:
        # Both halves may be told at once, here and in the keeper's thread: one of the two pops finds the slot.
        if owner in self._settled and (slot := self._freed.pop(owner, None)) is not None:
            ended_at, identity, whose = self._settled.pop(owner)
            # By its own thread: a script must not hold this one up, nor the keeper.
            self.completion_marker.mark_soon(CompletedRun(ended_at, slot.name, identity, owner, whose))
        for remembered in (self._settled, self._freed):
            while len(remembered) > REMEMBERED:
                remembered.popitem(last=False)
