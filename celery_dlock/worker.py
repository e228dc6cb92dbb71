"""The step with which a worker begins to keep locks and to look after queues."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.bootsteps import TERMINATE  # type: ignore[attr-defined]  # missing in the stubs
from celery.concurrency import prefork
from celery.utils.imports import symbol_by_name

from .children import Children
from .deliveries import Deliveries
from .errors import InvalidLockOptions
from .request import SingletonRequest
from .sweeper import Sweeper
from .task import SingletonTask

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["KeeperStep", "SingletonRequest"]


class KeeperStep(bootsteps.StartStopStep):
    """Starts the keeper with the worker.

    It is never stopped: a body may run until the very end of a warm shutdown, and the thread dies with the process.
    """

    def include_if(self, worker: Any) -> bool:
        tasks = _singletons(worker.app)
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
            Children(deliveries.runtime, deliveries.freed).map_before_forks()
        if any(task.lock_options.on_conflict == "queue" for task in _singletons(worker.app)):
            living = _Living(worker)
            sweeper = Sweeper(deliveries.runtime, deliveries.newly_revoked, living.soon, living.goes_on)
            deliveries.runtime.sweeper = sweeper
            sweeper.start()


def _singletons(app: Celery) -> list[SingletonTask]:
    return [task for task in app.tasks.values() if isinstance(task, SingletonTask)]


class _Living:
    """A worker, as its sweeper sees it; the sweeper must not keep it alive."""

    def __init__(self, worker: Any) -> None:
        self._worker = weakref.ref(worker)

    def goes_on(self) -> bool:
        worker = self._worker()
        return worker is not None and worker.blueprint.state != TERMINATE

    def soon(self, call: Callable[[], None]) -> None:
        worker = self._worker()
        if worker is not None and worker.consumer is not None:
            worker.consumer.call_soon(call)
