"""The bootstep that starts the watchdog and the background threads with a worker."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.apps.worker import Worker
from celery.bootsteps import RUN, TERMINATE  # type: ignore[attr-defined]  # missing in the stubs
from celery.concurrency import prefork
from celery.utils.imports import symbol_by_name

from ..config.settings_table import SETTINGS
from ..errors import InvalidLockOptions, LockFilesUnusable, NoLockStore
from ..messaging.results import has_backend
from ..metrics.server import serve
from ..metrics.worker import WorkerCollector
from ..runtime import Runtime
from ..task.app_check import check_task, singleton_tasks
from ..utils import threads
from ..utils.log import logger
from . import inspection  # noqa: F401  # registers the inspect command
from .body_stop import aborter_for_pool
from .broker_check import BrokerCheck
from .claim_renewal import ClaimRenewer
from .crash_record import WorkerRecord
from .crash_recovery import CrashRecovery
from .delivery_registry import DeliveryRegistry
from .other_stores import OtherStores
from .overdue_messages import OverdueMessages
from .pool_children import PoolChildren
from .queue_sweeper import QueueSweeper
from .request import SingletonRequest
from .store_check import StoreCheck, refuse_memory_in_several_processes, refuse_without_disk

if TYPE_CHECKING:
    from ..task.base import SingletonTask

__all__ = ["SingletonRequest", "SingletonStep"]


class SingletonStep(bootsteps.StartStopStep):
    """Starts the watchdog and the background threads with the worker.

    They are never stopped: a body may run until the very end of a warm shutdown, and the threads die with the process.
    """

    def __init__(self, _worker: Any, dlock_metrics_port: str | None = None, **_kwargs: Any) -> None:
        #: Start the background threads.
        self._starts: list[Callable[[], None]] = []
        self._handle: _WorkerHandle
        self._metrics_port = dlock_metrics_port
        self._metrics_address: tuple[str, int] | None = None
        self._collector: WorkerCollector | None = None

    def include_if(self, worker: Any) -> bool:
        with _refusing_to_start(worker):
            tasks = singleton_tasks(worker.app)
            if not tasks or not Runtime.of(worker.app).enabled:
                return False
            return _has_store(worker, tasks)

    def create(self, worker: Any) -> None:
        with _refusing_to_start(worker):
            refuse_memory_in_several_processes(Runtime.of(worker.app), worker.pool_cls)
            self._create(worker)

    def _create(self, worker: Any) -> None:
        tasks = singleton_tasks(worker.app)
        deliveries = DeliveryRegistry.of(worker.app)
        self._count(deliveries.runtime, tasks)
        # Kombu keeps this table up to date, also if queues are added later.
        deliveries.tags = lambda: getattr(worker.consumer.task_consumer, "_active_tags", {})
        deliveries.dispatcher = lambda: getattr(worker.consumer, "event_dispatcher", None)
        self._handle = handle = _WorkerHandle(worker)
        deliveries.consumes = handle.consumes
        deliveries.aborter = aborter_for_pool(worker.pool_cls)
        _warn_of_options_without_effect(tasks, worker.pool_cls, can_stop=deliveries.aborter is not None)
        mine = WorkerRecord.of_this_process()
        if issubclass(worker.pool_cls, prefork.TaskPool):
            others = OtherStores(deliveries.runtime, worker.hostname, handle.goes_on, mine)
            self._starts.append(others.loop.start)
            self._watch_children(deliveries, others)
        if mine is not None:
            recovery = CrashRecovery(deliveries.runtime, worker.hostname, handle.goes_on, mine)
            self._starts.append(recovery.loop.start)
        parks = any(task.lock_options.parks for task in tasks)
        store_check = StoreCheck(deliveries.runtime, handle.goes_on, parks=parks)
        self._starts += [store_check.start, BrokerCheck(worker.app, handle.goes_on).start]
        # Also if no task queues, because a call may choose to.
        sweeper = QueueSweeper(deliveries, handle.soon, handle.goes_on, parks=parks)
        # Also if no task claims, because a call may choose to.
        claim_renewer = ClaimRenewer(deliveries, handle.goes_on)
        deliveries.attach(sweeper, claim_renewer)
        self._starts += [sweeper.loop.start, claim_renewer.loop.start]
        if _needs_search_for_overdue_messages(worker):
            self._starts.append(OverdueMessages(worker.app, handle.channel, handle.goes_on).loop.start)

    def _watch_children(self, deliveries: DeliveryRegistry, others: OtherStores) -> None:
        deliveries.body_killer.announce = self._handle.announce_kill
        deliveries.body_killer.soon = self._handle.soon
        deliveries.children = PoolChildren(deliveries, others.add)
        deliveries.children.map_before_forks()

    def _count(self, runtime: Runtime, tasks: list[SingletonTask]) -> None:
        """Begin to count if metrics are on. Call this before any part of this process is created, and before forks."""
        address = SETTINGS["dlock_metrics_port"].value("--dlock-metrics-port", self._metrics_port)
        self._metrics_address = address = address or runtime.settings.metrics_port
        if address is not None or runtime.counts.wanted:
            runtime.counts.start(task.name for task in tasks)
        if address is not None:
            self._collector = WorkerCollector(runtime.app)

    def start(self, worker: Any) -> None:
        self._handle.watch(worker.consumer, DeliveryRegistry.of(worker.app).completion_marker.connection_broke)
        # Not in `create`, where the main thread still makes its pool. Under gevent, a thread that imports at that time
        # ends the worker with LoopExit, because the import's lock belongs to a greenlet.
        threads.preload_imports()
        for start in self._starts:
            start()
        if self._collector is not None and self._metrics_address is not None:
            serve(self._metrics_address, [self._collector])


@contextmanager
def _refusing_to_start(worker: Any) -> Iterator[None]:
    """Log one line and exit with status 78 (EX_CONFIG), in place of the traceback that Celery would log."""
    try:
        yield
    except InvalidLockOptions as error:
        if not isinstance(worker, Worker):
            raise  # a worker within another program, such as a test
        logger.critical("the worker does not start: %s", error)
        raise SystemExit(os.EX_CONFIG) from None


def _has_store(worker: Any, tasks: list[SingletonTask]) -> bool:
    """Check the settings. Return whether there is a store; only a worker within a program may do without.

    Tests start such a worker, where calls may take no lock (``dlock={"enabled": False}``).
    """
    try:
        _check(tasks)
    except NoLockStore as error:
        if isinstance(worker, Worker):
            raise
        logger.warning("singleton tasks will fail in this worker, except for calls without a lock: %s", error)
        return False
    return True


def _check(tasks: list[SingletonTask]) -> None:
    """Check settings and keys, so that an invalid one stops the worker here and does not fail the first task."""
    for task in tasks:
        check_task(task)
        request = symbol_by_name(task.Request)
        if not issubclass(request, SingletonRequest):
            raise InvalidLockOptions(
                f"task {task.name!r}: invalid Request={request!r}: expected a subclass of {SingletonRequest!r}"
            )
    if any(task.lock_options.on_store_error == "local" for task in tasks):
        try:
            tasks[0].dlock.lock_files.directory.check()
        except LockFilesUnusable as error:
            raise InvalidLockOptions(f"on_store_error='local': {error}") from error
    refuse_without_disk(tasks[0].dlock)


class _WorkerHandle:
    """A weak reference to a worker: its background threads must not keep it alive."""

    def __init__(self, worker: Any) -> None:
        self._worker = weakref.ref(worker)
        self._broken: Any = None

    def goes_on(self) -> bool:
        worker = self._worker()
        return worker is not None and worker.blueprint.state != TERMINATE

    def watch(self, consumer: Any, broke: Callable[[], None]) -> None:
        """Call `broke` as soon as the consumer finds its connection broken.

        Celery first closes the connection, which takes up to a second, and only then changes the consumer's state.
        """
        original = consumer.on_connection_error_after_connected

        def on_connection_error(error: BaseException) -> Any:
            self._broken = consumer.connection
            broke()
            return original(error)

        consumer.on_connection_error_after_connected = on_connection_error

    def consumes(self) -> bool:
        worker = self._worker()
        consumer = None if worker is None else worker.consumer
        if consumer is None:
            return True
        connection, broken = consumer.connection, self._broken
        lost = broken is not None and (connection is None or connection is broken)
        return consumer.blueprint.state == RUN and not lost

    def channel(self) -> Any:
        """Return the channel that consumes tasks; None while there is none."""
        worker = self._worker()
        consumer = None if worker is None else worker.consumer
        return getattr(getattr(consumer, "task_consumer", None), "channel", None)

    def announce_kill(self, pid: int) -> None:
        """Tell the pool that this worker ends a child that is paused: Celery's pool has no method for that alone."""
        worker = self._worker()
        pool = None if worker is None else worker.pool
        if pool is not None:
            pool.terminate_job(pid, signal.SIGSTOP)

    def soon(self, call: Callable[[], None]) -> None:
        worker = self._worker()
        if worker is not None and worker.consumer is not None:
            worker.consumer.call_soon(call)


def _needs_search_for_overdue_messages(worker: Any) -> bool:
    return not worker.use_eventloop and worker.app.connection_for_read().transport.driver_type == "redis"


def _warn_of_options_without_effect(tasks: Sequence[SingletonTask], pool: type, *, can_stop: bool) -> None:
    def named(applies: Callable[[SingletonTask], bool]) -> str:
        return ", ".join(sorted(task.name for task in tasks if applies(task)))

    if not can_stop and (aborts := named(lambda task: "lost" in task.lock_options.stop_reasons)):
        logger.warning(
            "on_lost='abort' of %s has no effect: the pool %s cannot stop a body, and only lease.ensure() raises",
            aborts, pool.__module__,
        )  # fmt: skip
    if not can_stop and (raises := named(_raises_if_replaced)):
        logger.warning(
            "stop='raise' of %s works as 'ask': the pool %s cannot stop a body, and only lease.ensure() raises",
            raises, pool.__module__,
        )  # fmt: skip
    kills = named(lambda task: task.lock_options.kill_after is not None)
    if kills and not issubclass(pool, prefork.TaskPool):
        logger.warning(
            "seconds for stop of %s work as %r: the pool %s cannot kill a body, only prefork can",
            kills, "raise" if can_stop else "ask", pool.__module__,
        )  # fmt: skip
    if unreturned := named(_returns_without_result):
        logger.warning(
            "on_used='return' of %s has no effect: no result is stored (no result backend, or ignore_result), so a "
            "call of a used name is skipped",
            unreturned,
        )


def _raises_if_replaced(task: SingletonTask) -> bool:
    return "replaced" in task.lock_options.stop_reasons and task.lock_options.kill_after is None


def _returns_without_result(task: SingletonTask) -> bool:
    return task.lock_options.on_used == "return" and (task.ignore_result or not has_backend(task))
