"""The worker's side: the request class that makes owners, and the step that keeps what children hold."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import bootsteps
from celery.concurrency import prefork
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request

from . import execution
from .children import Children
from .errors import InvalidLockOptions
from .message import HEADER, PROPERTY, Carried
from .queues import queue_of
from .records import Identity
from .runtime import Runtime
from .slots import Slot
from .store import Ending
from .task import SingletonTask

if TYPE_CHECKING:
    from datetime import datetime

    from celery import Celery

    from .records import Released

__all__ = ["KeeperStep", "SingletonRequest"]

_NOTHING_CARRIED: Final = Carried()

#: Ends of dead children that the main process remembers until it knows both halves of them.
REMEMBERED = 1000


class SingletonRequest(Request):
    """One delivery of one message, made in the worker's main process.

    It makes the owner, and hands it to the pool child with the message as it was received.
    """

    # Celery's own, which its stubs leave out.
    _app: Celery
    _eta: datetime | None
    _eventer: Any
    _request_dict: dict[str, Any]
    _already_cancelled: bool

    dlock_requeued = False

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        request = self._request_dict
        self.dlock_owner = os.urandom(16).hex()
        self.dlock_identity = Identity(self.id, request.get("retries") or 0, request.get("replaced_task_nesting") or 0)
        header = request.pop(HEADER, None)
        carried = _NOTHING_CARRIED if header is None else Carried.of(header, self.dlock_identity)
        deliveries = Deliveries.of(self._app)
        queue = queue_of(self._app, message.delivery_info or {}, deliveries.tags())
        properties = request["properties"]
        self.dlock_delivered = time.monotonic()
        # The fields of a Delivery and of a Raw, as bare tuples: cheaper to make and to pickle, and this is every task.
        raw = (message.body, message.content_type, message.content_encoding, message.headers or {}, properties, queue)
        delivery = (
            self.dlock_owner, self.dlock_delivered, self._since(), self.dlock_monitored(),
            carried.rank_us, carried.tries, raw,
        )  # fmt: skip
        # In a copy of the properties: they belong to the message, and top-level keys leak into what the task publishes.
        request["properties"] = {**properties, PROPERTY: delivery}
        deliveries.by_owner[self.dlock_owner] = self

    def _since(self) -> float:
        """The later of receipt and ETA on the monotonic clock."""
        if self._eta is None:
            return self.dlock_delivered
        return self.dlock_delivered + max(0.0, self._eta.timestamp() - time.time())

    def dlock_monitored(self) -> bool:
        """Whether the worker sends task events just now; its dispatcher is enabled for its heartbeats too."""
        eventer = self._eventer
        return bool(eventer and eventer.enabled and (not eventer.groups or "task" in eventer.groups))

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  # Celery's signature
        self.dlock_requeued = requeue
        super().reject(requeue=requeue)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super().on_failure(exc_info, *args, **kwargs)
        finally:
            error = getattr(exc_info.exception, "exc", exc_info.exception)
            if isinstance(error, WorkerLostError | Terminated | TimeLimitExceeded | SystemExit):
                self._dlock_settle()

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  # Celery's signature
        super().on_timeout(soft, timeout)
        if not soft:
            self._dlock_settle()

    def _announce_revoked(self, *args: Any, **kwargs: Any) -> None:
        super()._announce_revoked(*args, **kwargs)  # type: ignore[misc]  # missing in the stubs
        self._dlock_settle()

    def _dlock_settle(self) -> None:
        """The end of a run whose child is dead or dying is stored: it is final, unless the message comes back."""
        if self.acknowledged and not self.dlock_requeued and not self._already_cancelled:
            Deliveries.of(self._app).settle(self)


class Deliveries:
    """What the main process knows of its deliveries, kept on the app's runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.by_owner: WeakValueDictionary[str, SingletonRequest] = WeakValueDictionary()
        self._settled: OrderedDict[str, Identity] = OrderedDict()
        self._freed: OrderedDict[str, Slot] = OrderedDict()
        #: The running worker's consumer tags by queue.
        self.tags: Callable[[], Mapping[str, str]] = dict
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

        So with a late-acknowledged message whose channel is gone, or that outlived the visibility timeout.
        """
        request = self.by_owner.get(acquisition.rpartition(".")[0])
        if request is None or request.acknowledged or not request.task.acks_late:
            return False
        doubtful_after = self._runtime.settings.doubtful_after
        if doubtful_after is not None and time.monotonic() - request.dlock_delivered >= doubtful_after:
            return True
        channel = getattr(request.message, "channel", None)
        return bool(getattr(channel, "closed", False)) or getattr(channel, "connection", True) is None

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
    # and acknowledged. The done mark needs both, and the keeper writes it: a script must not hold up this process.

    def settle(self, request: SingletonRequest) -> None:
        self._settled[request.dlock_owner] = request.dlock_identity
        self._mark(request.dlock_owner)

    def freed(self, slot: Slot, released: Released) -> None:
        if released.word or not released.ours:
            owner = slot.acquisition.rpartition(".")[0]
            self._freed[owner] = slot
            self._mark(owner)

    def _mark(self, owner: str) -> None:
        # Both halves may be told at once, here and in the keeper's thread: one of the two pops finds the slot.
        if owner in self._settled and (slot := self._freed.pop(owner, None)) is not None:
            identity = self._settled.pop(owner)
            ended = self._runtime.slots.open(slot.name, f"{slot.acquisition}.end", slot.ttl)
            ended.leave_to_keeper(Ending(final=True, identity=identity.digest).text)
            self._runtime.wake()
        for remembered in (self._settled, self._freed):
            while len(remembered) > REMEMBERED:
                remembered.popitem(last=False)


class KeeperStep(bootsteps.StartStopStep):
    """Starts the keeper with the worker.

    It is never stopped: a body may run until the very end of a warm shutdown, and the thread dies with the process.
    """

    def include_if(self, worker: Any) -> bool:
        tasks = [task for task in worker.app.tasks.values() if isinstance(task, SingletonTask)]
        for task in tasks:
            # Bad settings and keys stop the worker here, with their reason, not the first task that meets them.
            task.lock_spec  # noqa: B018  # made at its first use
            task.dlock.settings  # noqa: B018  # likewise
            request = symbol_by_name(task.Request)
            if not issubclass(request, SingletonRequest):
                raise InvalidLockOptions(
                    f"task {task.name}: Request={request!r} is not allowed; allowed: a subclass of {SingletonRequest!r}"
                )
        return bool(tasks)

    def create(self, worker: Any) -> None:
        deliveries = Deliveries.of(worker.app)
        # Kombu keeps this table up to date, also for queues that are added later.
        deliveries.tags = lambda: getattr(worker.consumer.task_consumer, "_active_tags", {})
        if issubclass(worker.pool_cls, prefork.TaskPool):
            Children(Runtime.of(worker.app), deliveries.freed).map_before_forks()
