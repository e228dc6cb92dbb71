"""What the main process of a worker knows of its deliveries."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from celery.worker.state import revoked

from . import execution
from .keys import LockName
from .runtime import Runtime
from .slots import Slot
from .unheard import End, Ended, Unheard, channel_is_gone

if TYPE_CHECKING:
    from celery import Celery

    from .records import Released

__all__ = ["Deliveries"]


#: Ends of dead children that the main process remembers until it knows both halves of them; names of elders.
REMEMBERED = 1000
#: Messages under the queue policy of which it remembers where they may wait.
WAITERS = 20_000
#: Seconds after which an acknowledgement on its way is a reason to doubt; needlessly, that costs a script.
OVERDUE = 0.1


class Delivered(Ended, Protocol):
    """One delivery."""

    @property
    def hostname(self) -> str: ...
    @property
    def acknowledged(self) -> bool: ...

    dlock_owner: str
    dlock_delivered: float
    dlock_asked_at: float

    def dlock_monitored(self) -> bool: ...


class Deliveries:
    """What the main process knows of its deliveries, kept on the app's runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.by_owner: weakref.WeakValueDictionary[str, Delivered] = weakref.WeakValueDictionary()
        #: Those whose messages were published with a claim.
        self.claiming: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._settled: OrderedDict[str, tuple[float, str, str]] = OrderedDict()
        self._freed: OrderedDict[str, Slot] = OrderedDict()
        self._elders: OrderedDict[LockName, int] = OrderedDict()
        #: By task id: where a message that was handed over may wait now.
        self._places: OrderedDict[str, tuple[LockName, str]] = OrderedDict()
        self._revoked = 0
        #: The running worker's consumer tags by queue.
        self.tags: Callable[[], Mapping[str, str]] = dict
        #: Set by the worker: does it consume? Once it does not, no acknowledgement is sure to be heard.
        self.consumes: Callable[[], bool] = lambda: True
        #: Owners whose locks the keeper freed for them.
        self._holding: OrderedDict[str, None] = OrderedDict()
        self.unheard = Unheard(runtime, self._holding.__contains__)
        runtime.doubtful = self.doubtful
        runtime.describe = self.describe
        runtime.monitored_as = self.monitored_as

    @classmethod
    def of(cls, app: Celery) -> Deliveries:
        runtime = Runtime.of(app)
        found: Deliveries | None = runtime.deliveries
        if found is None:
            found = runtime.deliveries = cls(runtime)
        return found

    def doubtful(self, acquisition: str) -> bool:
        """Has the broker perhaps delivered this holder's message once more?

        So with a message whose acknowledgement was not heard, and with a late-acknowledged one whose channel is gone,
        or that outlived the visibility timeout. And while the worker does not consume: py-amqp opens a channel again
        that RabbitMQ closed, and says so only by an error.
        """
        request = self.by_owner.get(acquisition.rpartition(".")[0])
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
        if request.dlock_unheard:
            return True
        if request.message.acknowledged:
            return False
        # Celery tells the broker in a later round of its event loop.
        return channel_is_gone(request.message) or time.monotonic() - request.dlock_asked_at >= OVERDUE

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
        if self.runtime.sweeper is not None:
            self.runtime.sweeper.sweep()
        number = self.runtime.arrivals.next_number()
        elder = 0
        if name is not None:
            elder = self._elders.pop(name, 0)
            self._elders[name] = number
            self._places[request.id] = name, request.dlock_identity.digest
            for remembered, most in ((self._elders, REMEMBERED), (self._places, WAITERS)):
                if len(remembered) > most:
                    remembered.popitem(last=False)
        return number, elder

    def newly_revoked(self) -> list[tuple[LockName, str]]:
        """What was revoked since the last call and may wait: locks' names and identities.

        Looked at where Celery keeps revocations, because its control command has no hook. A waiter that this worker
        does not know of ends when its turn comes, as every revoked message does.
        """
        if len(revoked) == self._revoked:
            return []
        self._revoked = len(revoked)
        return [self._places.pop(task_id) for task_id in list(self._places) if task_id in revoked]

    def describe(self, owner: str) -> dict[str, Any]:
        """Whose delivery it is, as fields of an event."""
        request = self.by_owner.get(owner)
        return {} if request is None else {"task": request.task.name, "task_id": request.id}

    def monitored_as(self) -> str | None:
        """This worker's name while it sends events. Asked in a child during a run, in the main process at any time."""
        run = execution.running()
        if run is not None:
            return run.request.hostname if run.delivery is not None and run.delivery.monitored else None
        request = next(iter(self.by_owner.values()), None)
        return request.hostname if request is not None and request.dlock_monitored() else None

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

    def freed(self, slot: Slot, released: Released) -> None:
        if released.granted is not None and self.runtime.sweeper is not None:
            self.runtime.sweeper.hand_over(slot.name, released.granted)
        owner = slot.acquisition.rpartition(".")[0]
        if released.ours:
            self._holding[owner] = None
            if len(self._holding) > REMEMBERED:
                self._holding.popitem(last=False)
        if released.word or not released.ours:
            self._freed[owner] = slot
            self._mark(owner)

    def _mark(self, owner: str) -> None:
        # Both halves may be told at once, here and in the keeper's thread: one of the two pops finds the slot.
        if owner in self._settled and (slot := self._freed.pop(owner, None)) is not None:
            ended_at, identity, whose = self._settled.pop(owner)
            # By its own thread: a script must not hold this one up, nor the keeper.
            self.unheard.mark_soon(End(ended_at, slot.name, identity, owner, whose))
        for remembered in (self._settled, self._freed):
            while len(remembered) > REMEMBERED:
                remembered.popitem(last=False)
