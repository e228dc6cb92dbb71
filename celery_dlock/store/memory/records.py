"""The records of the memory store, and its clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Final

from ...errors import StoreUnavailable
from ...keys.lock_name import LockName, index_member, split_seat
from ...utils import threads
from ..rules.data import Claim, LockRecord, MarkKind, NewestCall, Place, ReplacedCalls, SeatsRecord
from .data import BucketData, HeldLock, NameData, Ticket

__all__ = ["Memory", "MemoryClock", "MemoryRecords"]

#: Microseconds that a wake-up waits for a call that begins to wait after the release.
_WAKE_US: Final = 2_000_000
#: Steps after which expired marks are removed.
_PURGE_STEPS: Final = 10_000
#: Dead letters of a bucket that operators see.
_SHOWN_DEAD: Final = 1000


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


class Memory:
    """The data of a memory store. Every store of one app and prefix uses the same."""

    def __init__(self, clock: MemoryClock | None = None) -> None:
        self.clock = clock or MemoryClock()
        self.buckets: dict[int, BucketData] = {}
        #: Records of workers and leases on duties, each with its expiry.
        self.workers: dict[tuple[str, str], tuple[str, int]] = {}
        self.audit: list[tuple[float, str]] = []
        #: Every step fails with this text; "" for none. For tests.
        self.failure = ""
        self._pid = os.getpid()
        self._steps = 0
        # A native lock: background threads are native under gevent too. No step switches greenlets while it has it.
        self._mutex = threads.lock()

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
        with self._mutex:
            self._steps += 1
            if self._steps % _PURGE_STEPS == 0:
                self._purge()
            yield self.clock.now_us()

    @contextmanager
    def records(self, name: LockName) -> Iterator[MemoryRecords]:
        """Return a context with the records of one lock name."""
        with self.step() as now:
            yield MemoryRecords(self.bucket(name), name, now)

    def bucket(self, name: LockName) -> BucketData:
        return self.buckets.setdefault(name.bucket, BucketData())

    def names(self) -> list[tuple[LockName, NameData]]:
        """Return all lock names with their data. Call this within a step."""
        return [
            (LockName(text, number), data)
            for number, bucket in sorted(self.buckets.items())
            for text, data in sorted(bucket.names.items())
        ]

    def data(self, name: LockName) -> NameData:
        return self.bucket(name).names.setdefault(split_seat(name)[0], NameData())

    def _purge(self) -> None:
        now = self.clock.now_us()
        for bucket in self.buckets.values():
            bucket.marks = {key: mark for key, mark in bucket.marks.items() if mark[1] > now}
            for data in bucket.names.values():
                data.runs = {tick: mark for tick, mark in data.runs.items() if mark[1] > now}
                data.locks = {seat: held for seat, held in data.locks.items() if held.until is None or held.until > now}
                if data.seats_until <= now:
                    data.seats = None
                if data.claim_until is not None and data.claim_until <= now:
                    data.claim = data.claim_until = None
                if data.newest_until <= now:
                    data.newest_call = None
                if data.replaced_until is not None and data.replaced_until <= now:
                    data.replaced = data.replaced_until = None
            bucket.names = {text: data for text, data in bucket.names.items() if not data.empty}


class MemoryRecords:
    """The records of one lock name during one step (:class:`~celery_dlock.store.rules.records.Records`)."""

    def __init__(self, bucket: BucketData, name: LockName, now: int) -> None:
        self._bucket = bucket
        #: ``place``: the seat whose lock these records have.
        text, self.place = split_seat(name)
        #: The name in the indexes of its bucket. The sweep of a name with seats visits all of them.
        self._member = index_member(text, name.seats)
        self._data = bucket.names.setdefault(text, NameData())
        self.now = now

    def _alive(self, until: int | None) -> bool:
        return until is None or until > self.now

    def _left_ms(self, until: int | None) -> int:
        return -1 if until is None else -((self.now - until) // 1000)

    # -- the lock

    def lock(self) -> LockRecord | None:
        held = self._data.locks.get(self.place)
        if held is not None and not self._alive(held.until):
            held = None
            del self._data.locks[self.place]
        return copy(held.lock) if held else None

    def put_lock(self, lock: LockRecord) -> None:
        until = self._data.locks[self.place].until if self.lock() is not None else None
        self._data.locks[self.place] = HeldLock(copy(lock), until)

    def drop_lock(self) -> None:
        self._data.locks.pop(self.place, None)

    def lock_left_ms(self) -> int:
        held = self._data.locks.get(self.place)
        return self._left_ms(held.until if held else None)

    def expire_lock(self, life_ms: int | None) -> None:
        self._data.locks[self.place].until = None if life_ms is None else self.now + life_ms * 1000

    def seat(self, number: int) -> MemoryRecords:
        other = copy(self)
        other.place = number
        return other

    def seats(self) -> SeatsRecord | None:
        return self._data.seats if self._data.seats_until > self.now else None

    def put_seats(self, seats: SeatsRecord, life_ms: int) -> None:
        self._data.seats, self._data.seats_until = seats, self.now + life_ms * 1000

    def last_token(self) -> int:
        return self._bucket.last_token

    def put_last_token(self, token: int) -> None:
        self._bucket.last_token = token

    def wake_waiting_call(self) -> None:
        data = self._data
        if data.tickets:
            data.tickets.popleft().woken = True
        elif data.wake_until <= self.now:
            data.wake_until = self.now + _WAKE_US

    # -- waiting in a thread

    def begin_to_wait(self) -> Ticket | None:
        """Return the place in the line of a call that waits; None if a wake-up is there already."""
        if self._data.wake_until > self.now:
            self._data.wake_until = 0
            return None
        ticket = Ticket()
        self._data.tickets.append(ticket)
        return ticket

    # -- marks

    def _marks(self, kind: MarkKind, key: str) -> tuple[dict[tuple[MarkKind, str], tuple[str, int]], tuple[str, int]]:
        marks = self._bucket.marks
        return marks, self._data.runs.get(key, ("", 0)) if kind == "run" else marks.get((kind, key), ("", 0))

    def mark(self, kind: MarkKind, key: str) -> str | None:
        text, until = self._marks(kind, key)[1]
        return text if until > self.now else None

    def mark_left_ms(self, kind: MarkKind, key: str) -> int:
        return self._left_ms(self._marks(kind, key)[1][1])

    def put_mark(self, kind: MarkKind, key: str, text: str, life_ms: int) -> None:
        made = text, self.now + life_ms * 1000
        if kind == "run":
            self._data.runs[key] = made
        else:
            self._bucket.marks[kind, key] = made

    def drop_mark(self, kind: MarkKind, key: str) -> None:
        self._data.runs.pop(key, None) if kind == "run" else self._bucket.marks.pop((kind, key), None)

    # -- the claim

    def claim(self) -> Claim | None:
        data = self._data
        if data.claim is None or not self._alive(data.claim_until):
            data.claim = data.claim_until = None
        return copy(data.claim)

    def claim_left_ms(self) -> int:
        return self._left_ms(self._data.claim_until)

    def put_claim(self, claim: Claim) -> None:
        if self.claim() is None:
            self._data.claim_until = None
        self._data.claim = copy(claim)

    def expire_claim(self, life_ms: int) -> None:
        self._data.claim_until = self.now + life_ms * 1000

    def drop_claim(self) -> None:
        self._data.claim = self._data.claim_until = None

    # -- waiters

    def has_entries(self) -> bool:
        return bool(self._data.entries)

    def entries(self) -> list[tuple[str, str]]:
        return list(self._data.entries.items())

    def entry(self, identity: str) -> str | None:
        return self._data.entries.get(identity)

    def put_entry(self, identity: str, entry: str) -> None:
        self._data.entries[identity] = entry

    def drop_waiter(self, identity: str) -> None:
        data = self._data
        for place in (*data.places.values(), data.entries, data.lost, data.evicted_by, data.replaced_by):
            place.pop(identity, None)  # type: ignore[attr-defined]  # a dict of each kind

    def score(self, place: Place, identity: str) -> int | None:
        return self._data.places[place].get(identity)

    def put_in(self, place: Place, identity: str, score: int) -> None:
        self._data.places[place][identity] = score

    def take_from(self, place: Place, identity: str) -> None:
        self._data.places[place].pop(identity, None)

    def _sorted(self, place: Place) -> list[tuple[str, int]]:
        return sorted(self._data.places[place].items(), key=lambda item: (item[1], item[0]))

    def first_in(self, place: Place, most: int, until: int | None = None) -> list[tuple[str, int]]:
        found = self._sorted(place)
        return [item for item in found if until is None or item[1] <= until][:most]

    def count_in(self, place: Place) -> int:
        return len(self._data.places[place])

    def position_in(self, place: Place, identity: str) -> int | None:
        found = [waiter for waiter, _ in self._sorted(place)]
        return found.index(identity) if identity in found else None

    def lost_grants(self, identity: str) -> tuple[int | None, int]:
        return self._data.lost.get(identity, (None, 0))

    def put_lost_grants(self, identity: str, rank: int | None, tries: int) -> None:
        if rank is None:
            self._data.lost.pop(identity, None)
        else:
            self._data.lost[identity] = rank, tries

    def evicted_by(self, identity: str) -> str:
        return self._data.evicted_by.get(identity, "")

    def put_evicted_by(self, identity: str, evicted: str) -> None:
        self._data.evicted_by[identity] = evicted

    def replaced_by(self, identity: str) -> str | None:
        return self._data.replaced_by.get(identity)

    def put_replaced_by(self, identity: str, by: str) -> None:
        self._data.replaced_by[identity] = by

    def newest_call(self) -> NewestCall | None:
        data = self._data
        return copy(data.newest_call) if data.newest_until > self.now else None

    def put_newest_call(self, newest: NewestCall, life_ms: int) -> None:
        self._data.newest_call, self._data.newest_until = copy(newest), self.now + life_ms * 1000

    def replaced(self) -> ReplacedCalls | None:
        data = self._data
        if data.replaced is None or not self._alive(data.replaced_until):
            data.replaced = data.replaced_until = None
        return deepcopy(data.replaced)

    def put_replaced(self, calls: ReplacedCalls, life_ms: int | None) -> None:
        data = self._data
        if life_ms is not None:
            data.replaced_until = self.now + life_ms * 1000
        data.replaced = deepcopy(calls) if calls != ReplacedCalls() else None

    def next_sweep(self) -> int | None:
        return self._bucket.sweeps.get(self._member)

    def sweep_at(self, when: int | None, *, earlier: bool = False) -> None:
        planned = self.next_sweep()
        if when is None:
            self._bucket.sweeps.pop(self._member, None)
        else:
            self._bucket.sweeps[self._member] = min(when, planned) if earlier and planned is not None else when

    # -- dead letters

    def dead(self, identity: str) -> str | None:
        return self._data.dead.get(identity)

    def put_dead(self, identity: str, entry: str) -> None:
        self._data.dead[identity] = entry

    def drop_dead(self, identity: str) -> None:
        self._data.dead.pop(identity, None)

    def dead_since(self, identity: str) -> int | None:
        return self._bucket.shown_dead.get((identity, self._member))

    def show_dead(self, identity: str, since: int | None) -> None:
        shown = self._bucket.shown_dead
        if since is None:
            shown.pop((identity, self._member), None)
            return
        shown[identity, self._member] = since
        if len(shown) > _SHOWN_DEAD:
            del shown[min(shown, key=lambda key: (shown[key], key))]
