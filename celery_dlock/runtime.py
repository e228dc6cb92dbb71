"""What one app has at run time: its settings, its listeners, and per process a store, slots, a locker and a keeper."""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from . import native, signals
from .arrivals import Arrivals
from .clock import Clock, SystemClock
from .config import Settings
from .events import Listeners
from .handover import Handover
from .keeper import Keeper, Source
from .locker import Locker
from .owner import Scope, current_scope
from .slots import LocalSlots, Slot, Slots
from .stores import from_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery

    from .records import Released
    from .store import QueueStore

__all__ = ["Runtime"]

#: Seconds after which a command to the store counts as unanswered; for the keeper the shortest, and those that it may
#: wait while no lease ends soon.
STORE_TIMEOUT = 3.0
KEEPER_TIMEOUT = 0.4
PATIENT_TIMEOUTS = (0.7, 1.5, STORE_TIMEOUT)

logger = logging.getLogger("celery_dlock")

_ATTRIBUTE = "_celery_dlock"


class Runtime:
    """Everything of one app; found by :meth:`of`, kept on the app itself, so that two apps share nothing."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.clock: Clock = SystemClock()
        self.listeners = Listeners()
        #: Set by the worker: as which worker to send monitor events; None while they are off.
        self.monitored_as: Callable[[], str | None] = lambda: None
        #: Set by the worker: what it knows of an owner, as fields of an event.
        self.describe: Callable[[str], dict[str, Any]] = lambda owner: {}
        #: Set by the worker: may another live copy of this acquisition's message exist?
        self.doubtful: Callable[[str], bool] = lambda acquisition: False
        #: Made by the worker before it forks; of no use elsewhere.
        self.arrivals = Arrivals()
        #: The worker's rooms keep their state of this app here.
        self.deliveries: Any = None
        self.sweeper: Any = None
        self.children: Any = None
        self._settings: Settings | None = None
        self._processes: dict[int, _Process] = {}
        signals.feed(self.listeners, app, self._monitored_as)

    @classmethod
    def of(cls, app: Celery) -> Runtime:
        """The runtime of ``app``, made at its first use."""
        found = vars(app).get(_ATTRIBUTE)
        if found is None:
            # setdefault is one step: of two threads that come first at once, both get the same one.
            found = vars(app).setdefault(_ATTRIBUTE, cls(app))
        return cast("Runtime", found)

    @property
    def settings(self) -> Settings:
        if self._settings is None:
            self._settings = Settings.of(self.app)
        return self._settings

    @property
    def locker(self) -> Locker:
        return self._here().locker

    @property
    def keeper(self) -> Keeper:
        return self._here().keeper

    @property
    def handover(self) -> Handover:
        return self._here().handover

    @property
    def slots(self) -> Slots:
        return self._here().slots

    # Asked through methods, because the worker sets both after this runtime was made.

    def _doubtful(self, acquisition: str) -> bool:
        return self.doubtful(acquisition)

    def _monitored_as(self) -> str | None:
        return self.monitored_as()

    def _freed(self, slot: Slot, released: Released) -> None:
        # Without a sweeper here, that of a worker finds the grant.
        if released.granted is not None and self.sweeper is not None:
            self.sweeper.hand_over(slot.name, released.granted)

    def wake(self) -> None:
        """Make sure that a keeper reads this process's slots."""
        self._here().wake()

    def scope(self) -> Scope:
        """Who asks: the running execution, or this thread."""
        return current_scope(self.settings.node)

    def adopt(self, slots: Slots) -> None:
        """In a pool child: hold everything in ``slots``, which the main process keeps."""
        self._processes[os.getpid()] = self._begin(slots)

    def store(self, timeout: float) -> QueueStore:
        return from_url(self.settings.url, timeout=timeout)

    def _here(self) -> _Process:
        pid = os.getpid()
        process = self._processes.get(pid)
        if process is None:
            # One step again: a lock taken through one locker can be given back through no other.
            process = self._processes.setdefault(pid, self._begin(None))
        return process

    def _begin(self, kept: Slots | None) -> _Process:
        settings = self.settings
        teller = _Teller(self)
        keeper = Keeper(
            self.store(KEEPER_TIMEOUT),
            self.clock,
            settings.prefix,
            KEEPER_TIMEOUT,
            teller.lost,
            self._doubtful,
            {timeout: self.store(timeout) for timeout in PATIENT_TIMEOUTS},
        )
        slots: Slots
        if kept is None:
            own = LocalSlots()
            source = _OwnSource(own, self._freed)
            slots, wake = own, lambda: keeper.watch(source)
        else:
            slots, wake = kept, _nothing
        store, prefix = self.store(STORE_TIMEOUT), settings.prefix
        handover = Handover(self.app, store, prefix, settings.turn, self.app.producer_or_acquire)
        locker = Locker(store, slots, wake, self.clock, prefix, self.listeners, handover.carry)
        return _Process(slots, keeper, locker, handover, wake)


@dataclass(frozen=True, slots=True)
class _Process:
    """What belongs to one process and must not be used in its forks."""

    slots: Slots
    keeper: Keeper
    locker: Locker
    handover: Handover
    wake: Callable[[], None]


class _OwnSource(Source):
    """The keeper's own process, seen by it."""

    def __init__(self, slots: LocalSlots, freed: Callable[[Slot, Released], None]) -> None:
        self._slots = slots
        self._on_freed = freed

    def taken(self) -> Sequence[Slot]:
        return self._slots.taken()

    def gone(self) -> bool:
        return False

    def closed(self) -> bool:
        return True

    def freed(self, slot: Slot, released: Released) -> None:
        self._on_freed(slot, released)


class _Teller:
    """Tells of lost leases from a thread of its own: a slow listener must not stall renewals."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # A deque, because gevent replaces the queues of the standard library.
        self._untold: collections.deque[tuple[str, str, str]] = collections.deque()
        self._running = native.Flag()

    def lost(self, slot: Slot, reason: str) -> None:
        self._untold.append((slot.name.text, slot.acquisition.rpartition(".")[0], reason))
        if self._running.take():
            native.start_daemon(self._run)

    def _run(self) -> None:
        while True:
            while self._untold:
                name, owner, reason = self._untold.popleft()
                logger.warning("the lease of %s is lost: %s", name, reason)
                facts = self._runtime.describe(owner)
                self._runtime.listeners.tell("lost", name=name, owner=owner, reason=reason, **facts)
            self._running.drop()
            # What was appended after the last look found the flag still up, so look once more.
            if not self._untold or not self._running.take():
                return


def _nothing() -> None:
    return None
