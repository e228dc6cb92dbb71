"""The memory backend: a dictionary with a mutex, and a clock that tests move."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Final

from ...errors import StoreUnavailable
from ...keys.lock_name import LockName, split_seat
from ...utils import threads
from ..engine.backend import Backend, Changes, Listed, Session, Wanted
from ..operator import ListCursor
from ..rules.data import Head, Mark, MarkKind, QueuePart, Waiter
from ..server_model import StoreInfo

__all__ = ["MemoryBackend", "MemoryClock", "NameData"]

#: Microseconds that a wake-up waits for a call that begins to wait after the release.
_WAKE_US: Final = 2_000_000
#: Seconds between two checks by a call that waits in its thread: the first pause and the longest one.
_LOOK: Final = 0.002, 0.02
#: Transactions after which expired marks are removed.
_PURGE_STEPS: Final = 10_000


class MemoryClock:
    """The clock of a memory store. It never goes back, and tests move it forward.

    Args:
        source: Returns the microseconds since the epoch.
    """

    def __init__(self, source: Callable[[], int] | None = None) -> None:
        self._source = source or (lambda: time.time_ns() // 1000)
        self._last = 0
        #: Seconds by which the clock is ahead of its source.
        self.ahead = 0.0

    def now_us(self) -> int:
        self._last = max(self._last, self._source() + round(self.ahead * 1e6))
        return self._last

    def travel(self, seconds: float) -> None:
        """Move the clock forward."""
        self.ahead += seconds


@dataclass(eq=False)  # each call is another one, also if none is woken
class _Ticket:
    """A call that waits in its thread for a release."""

    woken: bool = False


@dataclass
class NameData:
    """The data of one lock name, and the calls that wait for its release."""

    head: Head = field(default_factory=Head)
    waiters: dict[str, Waiter] = field(default_factory=dict)
    marks: dict[tuple[MarkKind, str], Mark] = field(default_factory=dict)
    tickets: deque[_Ticket] = field(default_factory=deque)
    #: Until then, a call that begins to wait is woken at once.
    wake_until: int = 0

    def wake(self, now: int) -> None:
        if self.tickets:
            self.tickets.popleft().woken = True
        elif self.wake_until <= now:
            self.wake_until = now + _WAKE_US

    def details(self, listed: Listed, now: int) -> list[str]:
        """Return the details of this name in a list."""
        runs = [key for (kind, key), mark in self.marks.items() if kind == "run" and mark.until > now]
        if listed == "run":
            return runs
        if listed == "dead":
            return [identity for identity, waiter in self.waiters.items() if waiter.shown]
        return [""] if (self.head.sweeps if listed == "queue" else "" in runs or self.head != Head()) else []


class MemoryBackend(Backend):
    """The data of a memory store. Every store of one app and prefix uses the same."""

    shown = "memory://"
    timeout = 1.0

    def __init__(self, clock: MemoryClock | None = None) -> None:
        self.clock = clock or MemoryClock()
        #: By bucket and text.
        self.names: dict[tuple[int, str], NameData] = {}
        #: The highest fencing token of all names.
        self.last_token = 0
        #: Every transaction fails with this text; "" for none. For tests.
        self.failure = ""
        self._pid = os.getpid()
        self._steps = 0
        # A native lock: background threads are native under gevent too. No step switches greenlets while it has it.
        self.mutex = threads.lock()

    @contextmanager
    def step(self) -> Iterator[int]:
        """Return a context in which no other thread uses the data. Its value is the time.

        Raises:
            StoreUnavailable: This process was forked from the one that has the data, or a test made the store fail.
        """
        if self.failure:
            raise StoreUnavailable(self.failure)
        if os.getpid() != self._pid:
            raise StoreUnavailable(
                f"the store memory:// is in the memory of process {self._pid}, and this is process {os.getpid()}: "
                "set dlock_url to a server"
            )
        with self.mutex:
            self._steps += 1
            if self._steps % _PURGE_STEPS == 0:
                self._purge()
            yield self.clock.now_us()

    def data(self, name: LockName) -> NameData:
        key = name.bucket, split_seat(name)[0]
        return self.names.get(key) or self.names.setdefault(key, NameData())

    def _purge(self) -> None:
        now = self.clock.now_us()
        for data in self.names.values():
            data.marks = {key: mark for key, mark in data.marks.items() if mark.until > now}
            if not data.waiters and not data.head.sweeps:
                # Without waiters, every record of the head expires.
                head = data.head
                timed = [*head.locks.values(), head.seats, head.claim, head.newest_call, head.replaced]
                if not any(one is not None and (one.until is None or one.until > now) for one in timed):
                    data.head = Head()
        unused = [key for key, data in self.names.items() if data == NameData(wake_until=data.wake_until)]
        for key in unused:
            del self.names[key]

    @contextmanager
    def open(self, name: LockName, wanted: Wanted) -> Iterator[Session]:
        del wanted
        with self.step() as now:
            yield _MemorySession(self, self.data(name), now)

    def cursors(self, listed: Listed, after: ListCursor | None, most: int) -> list[ListCursor]:
        with self.step() as now:
            found = (
                ListCursor(bucket, text, detail)
                for (bucket, text), data in self.names.items()
                for detail in data.details(listed, now)
            )
            return nsmallest(most, (one for one in found if after is None or one > after))

    def due(self, buckets: Sequence[int], most: int, within_us: int) -> list[LockName]:
        found: list[LockName] = []
        with self.step() as now:
            sweeps = sorted(
                (bucket, when, text, seats)
                for (bucket, text), data in self.names.items()
                for seats, when in data.head.sweeps.items()
                if when <= now + within_us
            )
        for wanted in sorted(set(buckets)):
            found += [LockName(text, bucket, seats) for bucket, _, text, seats in sweeps if bucket == wanted][:most]
        return found

    def count(self) -> int:
        return len(self.names)

    def release_listener(self, name: LockName) -> MemoryListener:
        return MemoryListener(self, name)

    def now(self) -> float:
        with self.step() as now:
            return now / 1e6

    def info(self) -> StoreInfo:
        # There is no server whose restart could lose data that this process still needs.
        return StoreInfo(durability_cure="", eviction="noeviction", replicas=0)

    def close(self) -> None:
        """Do nothing: the data stay."""


class _MemorySession:
    """A transaction (:class:`~celery_dlock.store.rules.session.Session`). The mutex is held until it ends."""

    def __init__(self, backend: MemoryBackend, data: NameData, now: int) -> None:
        self._backend, self._data = backend, data
        self.now, self.head = now, data.head
        self.next_token = max(now, backend.last_token + 1)

    def mark(self, kind: MarkKind, key: str) -> Mark | None:
        return self._data.marks.get((kind, key))

    def marks(self, kind: MarkKind) -> dict[str, Mark]:
        return {key: mark for (of, key), mark in self._data.marks.items() if of == kind}

    def waiter(self, identity: str) -> Waiter | None:
        return self._data.waiters.get(identity)

    def entries(self) -> dict[str, str]:
        return {one: waiter.entry for one, waiter in self._data.waiters.items() if waiter.entry is not None}

    def _scores(self, part: QueuePart) -> Iterator[tuple[int, str]]:
        for identity, waiter in self._data.waiters.items():
            score = waiter.waiting if part == "waiting" else waiter.delayed
            if score is not None:
                yield score, identity

    def first_in(self, part: QueuePart, most: int, low: int | None, high: int | None) -> list[tuple[str, Waiter]]:
        found = (
            one for one in self._scores(part) if (low is None or one[0] >= low) and (high is None or one[0] <= high)
        )
        return [(identity, self._data.waiters[identity]) for _, identity in nsmallest(most, found)]

    def count_before(self, part: QueuePart, score: int, identity: str) -> int:
        return sum(one < (score, identity) for one in self._scores(part))

    def end_guard(self, token: int) -> bool:
        del token
        return True  # it makes no guards

    def commit(self, changes: Changes) -> None:
        data = self._data
        data.head = changes.head or data.head
        for identity, waiter in changes.waiters.items():
            if waiter is None:
                data.waiters.pop(identity, None)
            else:
                data.waiters[identity] = waiter
        for key, mark in changes.marks.items():
            if mark is None:
                data.marks.pop(key, None)
            else:
                data.marks[key] = mark
        self._backend.last_token = changes.token or self._backend.last_token
        for _ in range(changes.wakes):
            data.wake(self.now)


class MemoryListener:
    """A call that waits for releases of one lock, in its thread or greenlet."""

    def __init__(self, backend: MemoryBackend, name: LockName) -> None:
        self._backend = backend
        self._name = name

    def wait(self, timeout: float) -> bool:
        ticket = _Ticket()
        with self._backend.step() as now:
            data = self._backend.data(self._name)
            if data.wake_until > now:
                data.wake_until = 0
                return True
            data.tickets.append(ticket)
        end, pause = time.monotonic() + timeout, _LOOK[0]
        try:
            # Python's sleep, which gevent patches: a native condition would block all greenlets of the thread.
            while not ticket.woken and (left := end - time.monotonic()) > 0:
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LOOK[1])
        finally:
            # It may have been woken in this moment.
            with self._backend.mutex, suppress(ValueError):
                data.tickets.remove(ticket)
        return ticket.woken

    def pass_on(self) -> None:
        with suppress(StoreUnavailable), self._backend.step() as now:
            self._backend.data(self._name).wake(now)
