"""The runtime of one app: its settings and listeners and, per process, a store, a lease table and a watchdog."""

from __future__ import annotations

import functools
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import signals
from .config.settings import Settings
from .config.switch import Switch
from .counters.meter import Counts
from .counters.recorder import Recorder
from .keys.lock_name import task_of_name
from .locking.claim_rollback import ClaimRollback
from .locking.client import LockClient
from .locking.events import Listeners, Loss
from .locking.lease_source import LocalLeaseSource
from .locking.lease_table import BodyAborter, LeaseRecord, LeaseTable, LocalLeaseTable
from .locking.other_tables import NoOtherTable, other_table
from .locking.owner import OwnerContext, current_context
from .locking.watchdog import LINGER, Watchdog, WatchdogHooks
from .messaging.handoff import GrantPublisher
from .messaging.receive_order import ReceiveOrder
from .options.lock_options import LockOptions
from .store.acquisition import owner_of
from .store.circuit_breaker import CircuitBreaker, shared_states
from .store.factory import StoreDescription, open_store
from .store.server_model import Quarantine
from .tracing import NO_SPANS, NoSpans, spans_of
from .utils import threads
from .utils.clock import Clock, SystemClock
from .utils.fork_guard import no_fork
from .utils.log import logger

if TYPE_CHECKING:
    from celery import Celery

    from .keys.key_spec import LockName
    from .locking.events import Kind
    from .locking.lock_files import LockFiles
    from .store.base import LockStore
    from .store.model import Grant, Released

__all__ = ["NO_WORKER", "Runtime", "WorkerHooks"]

#: Seconds that the watchdog waits for the store when a lease ends soon. This is not a setting: with a longer timeout, a
#: lease of a few seconds could end before a second attempt.
WATCHDOG_TIMEOUT = 0.4
#: Seconds that it waits while no lease ends soon, so that a slow store costs no lease.
PATIENT_TIMEOUTS = (0.7, 1.5, 3.0)
#: Seconds for which the processes of a worker skip a store that timed out (circuit breaker).
BREAKER_RESET = 2.0
#: The longest release, as a multiple of the store timeout: its commands, and the connections that it opens.
RELEASE_STEPS = 4


_ATTRIBUTE = "_celery_dlock"


class WorkerHooks:
    """The part of a runtime that only the main process of a worker can provide.

    These are the hooks of a process that is no worker: a publisher, beat or a program that takes a ``Lock``.
    """

    #: The aborter for bodies whose lease is lost (``on_lost="abort"``); None if the pool cannot stop a body.
    aborter: BodyAborter | None = None

    def may_be_redelivered(self, acquisition: str) -> bool:
        """Return whether the broker may have delivered the message of this acquisition to another worker."""
        return False

    def kill_deadline(self, acquisition: str) -> float:
        """Return the time by which the process of this acquisition must have ended, on the monotonic clock.

        It is 0 unless Celery kills the process for the task's hard time limit; then it is some seconds after the limit.
        """
        return 0.0

    def describe(self, owner: str) -> dict[str, Any]:
        """Return the task and the task id of an owner, as fields of an event; empty if the owner is unknown."""
        return {}

    def monitored_as(self) -> str | None:
        """Return the name under which to send monitor events; None while the worker sends none."""
        return None

    def hand_off(self, name: LockName, grant: Grant | None) -> None:
        """Make the queue sweeper publish a granted message, if there is one.

        Without a worker, do nothing: the queue sweeper of another one finds the grant in the store.
        """


NO_WORKER: Final = WorkerHooks()


class Runtime:
    """The runtime of one app. Get it with :meth:`of`.

    It is stored as an attribute of the app, so two apps share nothing.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.clock: Clock = SystemClock()
        self.listeners = Listeners()
        #: Set by the worker before it forks, so its pool children inherit the hooks.
        self.worker: WorkerHooks = NO_WORKER
        #: Created before the worker forks, so its pool children share it. Only workers use it.
        self.receive_order = ReceiveOrder()
        #: Shared with the pool children: one timeout of the store opens the circuit breaker of all of them.
        self._store_state = shared_states()
        #: Shared with the pool children: the value of `disconnected_at`, written by the main process.
        self._disconnected_at = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self.switch = Switch(app)
        self._remarks: set[str] = set()
        self.counts = Counts()
        #: Writes to OpenTelemetry spans. Set when `settings` is first read.
        self.spans: NoSpans = NO_SPANS
        self._processes = _Processes(lambda: self._begin(None))
        signals.feed(self.listeners, app, self.monitored_as)

    @classmethod
    def of(cls, app: Celery) -> Runtime:
        """Return the runtime of ``app``. The first call creates it."""
        found: Runtime | None = vars(app).get(_ATTRIBUTE)
        if found is None:
            # setdefault is atomic: two threads that create a runtime at the same time use the same one.
            found = vars(app).setdefault(_ATTRIBUTE, cls(app))
        return found

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings of the app, read and checked at their first use."""
        settings = Settings.of(self.app)
        if self.spans is NO_SPANS:
            self.spans = spans_of(self.listeners, wanted=settings.opentelemetry)
        return settings

    @property
    def enabled(self) -> bool:
        """True if this app takes locks (``dlock_enabled``)."""
        return self.switch.on

    @functools.cached_property
    def node(self) -> str:
        """The name of this host. It does not depend on the settings, because calls without a lock have owners too."""
        return socket.gethostname()

    @property
    def lock_client(self) -> LockClient:
        return self._processes[os.getpid()].lock_client

    @property
    def watchdog(self) -> Watchdog:
        return self._here().watchdog

    @property
    def grant_publisher(self) -> GrantPublisher:
        return self._here().grant_publisher

    @property
    def lease_table(self) -> LeaseTable:
        return self._here().lease_table

    @property
    def lock_store(self) -> LockStore:
        """The store of this process. The watchdog and the claim rollback have stores of their own."""
        return self._here().lock_store

    @property
    def lock_files(self) -> LockFiles:
        """The lock files of this machine (``on_store_error="local"``)."""
        found: LockFiles | None = vars(self).get("_lock_files")
        if found is None:
            from .locking.lock_files import LockFiles  # noqa: PLC0415  # not every platform has flock

            settings = self.settings
            made = LockFiles(settings.run_dir, settings.prefix, settings.locations, self.clock)
            found = vars(self).setdefault("_lock_files", made)  # atomic: all threads use the same one
        return found

    @property
    def claim_rollback(self) -> ClaimRollback:
        """The thread of this process that releases claims whose outcome is unknown."""
        return self._here().claim_rollback

    @property
    def disconnected_at(self) -> float:
        """The time of the worker's last lost broker connection, on the monotonic clock; 0 if there was none.

        The broker then delivers each unacknowledged message again. The main process forgets those whose start no pool
        child has confirmed: only the done mark that the child's release writes prevents their second run.
        """
        return self._disconnected_at[0]

    @disconnected_at.setter
    def disconnected_at(self, now: float) -> None:
        self._disconnected_at[0] = now

    # The next two methods read `self.worker` at each call, because the worker sets it after the runtime is created.

    def monitored_as(self, _kind: Kind | None = None) -> str | None:
        """Return the name under which the worker sends monitor events of any kind; None while it sends none."""
        return self.worker.monitored_as()

    def _freed(self, record: LeaseRecord, released: Released) -> None:
        if released.ours:
            task = self.worker.describe(owner_of(record.acquisition)).get("task", task_of_name(record.name))
            self.counts.count("released", task, "watchdog")
        self.worker.hand_off(record.name, released.granted)

    def first_of(self, remark: str) -> bool:
        """Return true on the first call with this remark in this process. Use it to log a remark only once."""
        first = remark not in self._remarks
        self._remarks.add(remark)
        return first

    def owner_context(self) -> OwnerContext:
        """Return the owner context of the running execution or, outside of one, of this thread."""
        return current_context(self.node)

    def adopt(self, lease_table: LeaseTable) -> None:
        """Use this lease table in the calling pool child. The watchdog of the main process reads it."""
        self._processes[os.getpid()] = self._begin(lease_table)

    def open_store(self, timeout: float) -> LockStore:
        settings = self.settings
        return open_store(
            settings.locations,
            timeout=timeout,
            prefix=settings.prefix,
            quarantine=self._quarantine,
            durability=settings.durability,
        )

    @functools.cached_property
    def _quarantine(self) -> Quarantine | None:
        delay = self.settings.quarantine
        if delay is None and len(self.settings.locations) > 1:
            delay = self._longest_ttl()
        return Quarantine(delay) if delay else None

    def _longest_ttl(self) -> float:
        ours = (getattr(task, "lock_options", None) for task in self.app.tasks.values())
        own = self.settings.ttl
        return max([own, *(options.ttl_or(own) for options in ours if isinstance(options, LockOptions))])

    @contextmanager
    def started_anew(self, clock: Clock) -> Iterator[None]:
        """Return a context in which all parts are new, by this clock and the settings as they are now. For tests."""
        kept = dict(vars(self))
        for cached in ("settings", "_quarantine", "_lock_files"):
            vars(self).pop(cached, None)
        self.clock, self._store_state, self._remarks = clock, shared_states(), set()
        self._processes = _Processes(lambda: self._begin(None))
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(kept)

    def _here(self) -> _Process:
        return self._processes[os.getpid()]

    @property
    def _recorder(self) -> Recorder | None:
        return None if self.counts.meter is None else self.counts.meter.recorder

    def _begin(self, lease_table: LeaseTable | None) -> _Process:
        settings, recorder = self.settings, self._recorder
        watchdog = self.new_watchdog(self.open_store, settings.timeout)
        if lease_table is None and settings.locations[0].kind != "memory":
            lease_table = self._other_table()
        if lease_table is None:
            lease_table = own = LocalLeaseTable()
            source = LocalLeaseSource(own, self._freed)
            own.wake = lambda: watchdog.watch(source)
        store = self.open_store(settings.timeout)
        failed = recorder.store_failed if recorder else lambda _error: None
        breaker = CircuitBreaker(self._store_state, self.clock, BREAKER_RESET, settings.timeout, failed)
        grant_publisher = GrantPublisher(
            self.app,
            store,
            settings.grant_timeout,
            self.app.producer_or_acquire,
            settings.broker,
            self.monitored_as,
            self.counts,
        )
        lock_client = LockClient(
            store, lease_table, self.clock, self.listeners, grant_publisher.publish_next, breaker, recorder
        )
        unsure = ClaimRollback(lambda: self.open_store(settings.timeout), self.clock)
        return _Process(lease_table, watchdog, lock_client, grant_publisher, store, unsure)

    def new_watchdog(self, open_store: Callable[[float], LockStore], timeout: float) -> Watchdog:
        """Return a watchdog for the leases in one store. It reports losses as this app's.

        Args:
            open_store: Opens the store, with a timeout.
            timeout: The timeout of the lock clients of that store.
        """
        recorder = self._recorder
        stores = {each: _watchdog_store(open_store(each), recorder) for each in (WATCHDOG_TIMEOUT, *PATIENT_TIMEOUTS)}
        return Watchdog(stores, self.clock, _WatchdogHooks(self), max(LINGER, RELEASE_STEPS * timeout))

    def _other_table(self) -> LeaseTable | None:
        """Return a lease table that the worker of another app reads, if this process is a child of such a worker."""
        settings = self.settings
        try:
            return other_table(StoreDescription(settings.locations, settings.prefix, settings.timeout).text)
        except NoOtherTable as reason:
            logger.warning(
                "this pool child renews the locks of app %r itself, and if it dies, they are held until their ttl "
                "ends: %s", self.app.main, reason,
            )  # fmt: skip
            return None


@dataclass(frozen=True, slots=True)
class _Process:
    """The parts of one process. A forked process must not use them; it creates its own."""

    lease_table: LeaseTable
    watchdog: Watchdog
    lock_client: LockClient
    grant_publisher: GrantPublisher
    lock_store: LockStore
    claim_rollback: ClaimRollback


class _Processes(dict[int, _Process]):
    """The parts of each process, by its pid. They are created when a process first uses them."""

    def __init__(self, begin: Callable[[], _Process]) -> None:
        super().__init__()
        self._begin = begin

    def __missing__(self, pid: int) -> _Process:
        # setdefault is atomic, so all threads use the same lock client. Another one could not release their locks.
        return self.setdefault(pid, self._begin())


class _WatchdogHooks(WatchdogHooks):
    """The hooks of an app's watchdogs. A thread reports losses, because a slow listener must not delay a watchdog."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._errands = threads.SerialExecutor()

    def lost(self, record: LeaseRecord, reason: Loss) -> None:
        owner = owner_of(record.acquisition)
        # Log here: a listener may block the thread.
        logger.warning("the lease of %s is lost: %s", record.name, reason.text)
        self._errands.add(lambda: self._tell(record.name, owner, reason))

    def _tell(self, name: LockName, owner: str, reason: Loss) -> None:
        with no_fork():
            facts = self._runtime.worker.describe(owner)
            self._runtime.counts.count("lost", facts.get("task", task_of_name(name)), reason.cause.value)
            self._runtime.listeners.emit("lost", name=name.text, owner=owner, reason=reason.text, **facts)

    def renewed(self, margin: float) -> None:
        self._runtime.counts.observe("renewal_margin_seconds", margin)

    def may_be_redelivered(self, acquisition: str) -> bool:
        return self._runtime.worker.may_be_redelivered(acquisition)

    def kill_deadline(self, acquisition: str) -> float:
        return self._runtime.worker.kill_deadline(acquisition)


def _watchdog_store(store: LockStore, recorder: Recorder | None) -> LockStore:
    if recorder is not None:
        for command in ("renew", "release"):
            vars(store)[command] = recorder.timed(command, getattr(store, command))
    return store
