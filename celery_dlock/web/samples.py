"""The last hour of the store and of the live workers, sampled into the memory of the dashboard's process."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from ..control import Counts, LockControl, LockView, Workers, WorkerView
from ..errors import StoreUnavailable
from ..utils.background import Loop, begin_thread

__all__ = ["HOUR", "Change", "Sample", "Sampler", "Samples"]

HOUR: Final = 3600.0
#: Seconds between two samples. After a sample that took t seconds, the next one follows after at least SHARE * t.
PERIOD, SHARE = 30.0, 20.0
#: Seconds that a sample waits for the answers of workers.
WORKERS_WITHIN: Final = 10.0
#: Locks whose state is remembered, and the changes of all locks together: at most about 20 MB.
LOCKS, CHANGES = 10_000, 50_000

#: A metric of ``counters.catalog``, a task and the value of the metric's other label.
Key = tuple[str, str, str]


class Sample(NamedTuple):
    """The answers of the store and the workers at one time.

    Args:
        since: The time of the sample before, in seconds since the epoch by this host's clock.
        at: The time of this sample.
        waiting: The waiters of each task.
        counted: What live workers counted since the sample before.
        counting: The number of workers that count.
    """

    since: float
    at: float
    waiting: Mapping[str, int]
    counted: Mapping[Key, int]
    counting: int


class Change(NamedTuple):
    """A lock whose holder or number of waiters was not as in the sample before.

    Args:
        name: The lock name.
        at: The time since which it is so, by this host's clock: that of the acquisition, or of the sample.
        state: The state of its holder; "" if the lock is free.
        acquisition: The acquisition; "" if the lock is free.
        task_id: The id of the holder's task.
        by: The worker or the operator; "" for a grant.
        waiting: The number of waiters.
    """

    name: str
    at: float
    state: str = ""
    acquisition: str = ""
    task_id: str = ""
    by: str = ""
    waiting: int = 0

    @classmethod
    def of(cls, view: LockView, at: float, before: Change | None) -> Change:
        """Return what a view shows.

        Args:
            view: The view of the lock.
            at: The time of the view by this host's clock.
            before: The last change of this lock.
        """
        holder = view.holder
        if holder is None:
            return cls(view.name, at, waiting=view.waiting)
        taken = before is None or before.acquisition != holder.acquisition
        since = at - max(0.0, view.at - holder.since) if taken else at
        by = holder.worker or holder.operator
        return cls(view.name, since, holder.state, holder.acquisition, holder.task_id, by, view.waiting)

    @property
    def holder(self) -> str:
        """The worker or the operator, and the state unless that is ``"held"``."""
        return self.by if self.state == "held" else f"{self.by} ({self.state})" if self.by else self.state

    def goes_on(self, before: Change | None) -> bool:
        """Return whether the holder is the same as before, in the same state."""
        return before is not None and (before.acquisition, before.state) == (self.acquisition, self.state)

    def same(self, before: Change | None) -> bool:
        """Return whether the number of waiters is the same too."""
        return before is not None and self.goes_on(before) and self.waiting == before.waiting


class Samples:
    """The samples of the last hour, and the changes of each lock between them."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._changes: deque[Change] = deque(maxlen=CHANGES)
        #: The last change of each lock that is not free.
        self._now: dict[str, Change] = {}
        #: The counters of each worker, by node name: the time of its answer, its process, and its counts.
        self._told: dict[str, tuple[float, int, Mapping[Key, int]]] = {}
        self._one = Lock()

    def add(
        self, since: float, at: float, counts: Counts, locks: Mapping[str, LockView], found: Workers | None
    ) -> None:
        """Add a sample.

        Args:
            since: The time of the sample before, also of one that failed.
            at: The time of this sample.
            counts: The counts of the store.
            locks: The locks that are not free, by name.
            found: The answers of the workers.
        """
        with self._one:
            counted, counting = Counter[Key](), 0
            for view in found.workers if found else ():
                if view.counters is not None:
                    counting += 1
                    counted.update(self._growth(view, at))
            self._told = {node: told for node, told in self._told.items() if told[0] > at - HOUR}
            self._samples.append(Sample(since, at, counts.waiting, counted, counting))
            while self._samples[0].at < at - HOUR:
                self._samples.popleft()
            for name, lock in locks.items():
                self._see(Change.of(lock, at, self._now.get(name)))
            for name in self._now.keys() - locks.keys():
                self._see(Change(name, at))

    def _growth(self, view: WorkerView, at: float) -> dict[Key, int]:
        """Return what a worker counted since its last answer; nothing if this is the first one."""
        now = {
            (metric, task, value): number
            for metric, tasks in (view.counters or {}).items()
            for task, values in tasks.items()
            for value, number in values.items()
        }
        told = self._told.get(view.worker)
        self._told[view.worker] = at, view.pid, now
        if told is None:
            return {}
        before = told[2] if told[1] == view.pid else {}  # a worker that restarted counts from 0
        return {key: number - before.get(key, 0) for key, number in now.items() if number > before.get(key, 0)}

    def _see(self, change: Change) -> None:
        before = self._now.get(change.name)
        if before is None and len(self._now) >= LOCKS:
            return
        if not change.same(before):
            self._changes.append(change)
            self._now[change.name] = change
        if not change.state and not change.waiting:
            self._now.pop(change.name, None)

    def __contains__(self, name: str) -> bool:
        """Return whether the last sample saw this lock."""
        return name in self._now

    def hour(self) -> Sequence[Sample]:
        """Return the samples, the oldest first."""
        with self._one:
            return list(self._samples)

    def changes(self, name: str, view: LockView | None = None, at: float = 0.0) -> list[Change]:
        """Return the changes of a lock, the oldest first.

        Args:
            name: The lock name.
            view: The view of the lock at this moment, which no sample has seen yet.
            at: The time of the view.
        """
        with self._one:
            found = [change for change in self._changes if change.name == name]
            last = self._now.get(name)
        if last is not None and last not in found:  # the changes of other locks have displaced it
            found = [last]
        if view is not None:
            before = found[-1] if found else None
            seen = Change.of(view, at, before)
            if not seen.same(before):
                found.append(seen)
        return found


class Sampler:
    """The thread that samples.

    It starts with the first page and ends when no page was opened for an hour, or never after :meth:`always`.

    Args:
        control: Reads the store.
        workers: Returns the answers of live workers. Its argument is the number of seconds to wait for them.
        period: Seconds between two samples.
    """

    def __init__(
        self, control: LockControl, workers: Callable[[float], Workers | None], period: float = PERIOD
    ) -> None:
        self.samples = Samples()
        self._control = control
        self._workers = workers
        self._period = period
        self._before = time.time()
        self._opened = time.monotonic()
        self._always = False
        # The thread holds no strong reference, so it ends with its dashboard.
        me = weakref.ref(self)
        self._loop = Loop(
            "dashboard's sampler",
            lambda: sampler.sample() if (sampler := me()) else None,
            needed=lambda: (sampler := me()) is not None and sampler.wanted,
            begin=begin_thread("sampler"),
        )

    @property
    def wanted(self) -> bool:
        """Whether a page was opened in the last hour, or :meth:`always` was called."""
        return self._always or time.monotonic() - self._opened < HOUR

    def opened(self) -> None:
        """Note that a page was opened, and sample from now on. Never blocks."""
        self._opened = time.monotonic()
        self._loop.wake()

    def always(self, period: float = PERIOD) -> None:
        """Sample until the process ends.

        Args:
            period: Seconds between two samples.
        """
        self._always, self._period = True, period
        self._loop.wake()

    def sample(self) -> float | None:
        """Take a sample. Return the seconds until the next one; None if none is wanted."""
        if not self.wanted:
            return None
        began, at = time.monotonic(), time.time()
        locks: dict[str, LockView] = {}

        def see(view: LockView) -> None:
            if (view.holder or view.waiting) and (len(locks) < LOCKS or view.name in self.samples):
                locks[view.name] = view

        try:
            counts = self._control.counts(see)
        except StoreUnavailable:
            counts = None  # the charts show that there is no sample, and the pages show the error
        took = time.monotonic() - began
        if counts is not None:
            self.samples.add(self._before, at, counts, locks, self._workers(WORKERS_WITHIN))
        self._before = at
        return max(self._period, SHARE * took)
