"""A clock that stands still, and a store in memory, for unit tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from celery_dlock.errors import StoreUnavailable
from celery_dlock.events import Event, Listeners
from celery_dlock.keeper import TICK, Keeper
from celery_dlock.keys import LockKeys, LockName, shared_name
from celery_dlock.lease import Lease, margin
from celery_dlock.locker import Locker
from celery_dlock.owner import Scope
from celery_dlock.records import PRIMARY, Acquired, By, Claim, Durability, Held, Holder, Released, Renewal
from celery_dlock.runtime import KEEPER_TIMEOUT
from celery_dlock.slots import LocalSlots, Slot
from celery_dlock.store import Ending, Waker


class FakeClock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


@dataclass
class Kept:
    acquisition: str
    until: float
    token: int
    notes: dict[str, str] = field(default_factory=dict)


class FakeStore:
    """The contract's plain part: locks, leases and endings, without marks.

    Attributes:
        away: Every call takes ``call_time`` and fails so.
        call_time: Seconds of the clock that each call takes.
        asked: Every renewal asked for.
        ended: Every release asked for.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.locks: dict[str, Kept] = {}
        self.away: StoreUnavailable | None = None
        self.call_time = 0.0
        self.asked: list[Renewal] = []
        self.ended: list[tuple[str, Ending]] = []
        self.calls = 0
        self.tokens = 0
        self.closed = False

    def acquire(self, keys: LockKeys, acquisition: str, ttl_ms: int, claim: Claim) -> Acquired | Held:
        self._call()
        kept = self._kept(keys.lock)
        if kept is None:
            self.tokens += 1
            kept = self.locks[keys.lock] = Kept(acquisition, self.clock.now + ttl_ms / 1000, self.tokens)
        if kept.acquisition != acquisition:
            return Held(self._holder(kept), twin=False, rank_us=1)
        return Acquired(kept.token, self.clock.wall(), 1)

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool]:
        self.asked += renewals
        self._call(within)
        return [self._renew(renewal) for renewal in renewals]

    def release(self, keys: LockKeys, acquisition: str, ending: Ending, durability: Durability = PRIMARY) -> Released:
        self._call()
        self.ended.append((acquisition, ending))
        kept = self._kept(keys.lock)
        if kept is None or kept.acquisition != acquisition:
            return Released(ours=False, word=False)
        del self.locks[keys.lock]
        return Released(ours=True, word="word" in kept.notes)

    def inspect(self, keys: LockKeys) -> Holder | None:
        self._call()
        kept = self._kept(keys.lock)
        return self._holder(kept) if kept else None

    @contextmanager
    def waker(self, keys: LockKeys) -> Iterator[Waker]:
        self._call()
        yield FakeWaker(self.clock)

    def close(self) -> None:
        self.closed = True

    def lose(self, name: LockName) -> None:
        """The lock is gone, as after a FLUSHALL."""
        del self.locks[LockKeys.of("dlock", name).lock]

    def kept(self, name: LockName) -> Kept | None:
        return self._kept(LockKeys.of("dlock", name).lock)

    def _call(self, within: float | None = None) -> None:
        self.calls += 1
        self.clock.now += self.call_time if within is None else min(within, self.call_time)
        if self.away is not None:
            raise self.away

    def _kept(self, key: str) -> Kept | None:
        kept = self.locks.get(key)
        return kept if kept is not None and kept.until > self.clock.now else None

    def _renew(self, renewal: Renewal) -> bool:
        kept = self._kept(renewal.key)
        if kept is None or kept.acquisition != renewal.acquisition:
            return False
        kept.until = max(kept.until, self.clock.now + renewal.ttl_ms / 1000)
        kept.notes.update(renewal.notes)
        return True

    def _holder(self, kept: Kept) -> Holder:
        left, until = "left" in kept.notes, kept.until - self.clock.now
        return Holder(None, None, "node", 1, since=self.clock.wall(), expires_in=until, left=left)


class SlowerStore(FakeStore):
    """The same store over connections that wait longer: away, a call takes so many seconds."""

    def __init__(self, origin: FakeStore, timeout: float) -> None:
        super().__init__(origin.clock)
        self.origin = origin
        self.timeout = timeout
        self.locks, self.asked, self.ended = origin.locks, origin.asked, origin.ended

    def _call(self, within: float | None = None) -> None:
        if self.origin.away is None:
            self.origin._call(within)
            return
        self.origin.calls += 1
        self.clock.now += self.timeout if within is None else min(within, self.timeout)
        raise self.origin.away


class FakeWaker:
    """Nobody is ever woken: time passes."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def wait(self, timeout: float) -> bool:
        self._clock.now += timeout
        return False


class FakeSource:
    """A process whose slots are kept. ``dead``: it is gone. ``child``: it is watched also while it holds nothing."""

    def __init__(self, *, child: bool = False) -> None:
        self.slots = LocalSlots()
        self.dead = False
        self.child = child
        self.told_freed: list[tuple[str, Released]] = []

    def taken(self) -> Sequence[Slot]:
        return self.slots.taken()

    def gone(self) -> bool:
        return self.dead

    def pidfd(self) -> None:
        return None

    def closed(self) -> bool:
        return self.dead or not self.child

    def freed(self, slot: Slot, released: Released) -> None:
        self.told_freed.append((slot.acquisition, released))


def a_name(text: str = "x") -> LockName:
    return shared_name(text)


class KeeperScene:
    """One keeper, one process, and what the keeper told. No thread: the test ticks."""

    def __init__(self, *, timeout: float = KEEPER_TIMEOUT, patient: tuple[float, ...] = ()) -> None:
        self.clock = FakeClock()
        self.store = FakeStore(self.clock)
        self.source = FakeSource()
        self.lost: list[tuple[str, str, float]] = []
        self.doubted: set[str] = set()
        self.timeout = timeout
        stores = {longer: SlowerStore(self.store, longer) for longer in patient}
        self.keeper = Keeper(self.store, self.clock, "dlock", timeout, self._lost, self.doubted.__contains__, stores)
        self.keeper._running.take()  # so no thread starts
        self.keeper.watch(self.source)

    def _lost(self, slot: Slot, reason: str) -> None:
        self.lost.append((slot.acquisition, reason, self.clock.now))

    def hold(self, text: str = "x", *, ttl: float = 30.0, source: FakeSource | None = None) -> Slot:
        """Take a lock as the locker does."""
        slot = (source or self.source).slots.open(a_name(text), f"owner.{text}", ttl)
        sent = self.clock.now
        answer = self.store.acquire(
            LockKeys.of("dlock", slot.name), slot.acquisition, round(ttl * 1000), Claim(By("", "", "", ""))
        )
        assert isinstance(answer, Acquired)
        slot.held(sent + ttl - margin(ttl))
        return slot

    def run(self, seconds: float) -> None:
        """Let time pass, a tick each TICK."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += TICK
            self.keeper.tick()

    def asked_at(self, *, ticks: int) -> list[float]:
        """Seconds from now at which the store was asked for renewals."""
        start, times = self.clock.now, []
        for _ in range(ticks):
            before = len(self.store.asked)
            self.clock.now += TICK
            self.keeper.tick()
            times += [self.clock.now - start] if len(self.store.asked) > before else []
        return times


class LockerScene:
    """One process's locker, and what it told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = FakeStore(self.clock)
        self.slots = LocalSlots()
        self.woken = 0
        self.told: list[Event] = []
        listeners = Listeners()
        listeners.add(self.told.append)
        self.locker = Locker(self.store, self.slots, self._wake, self.clock, "dlock", listeners)
        self.scope = self.new_scope("me")

    def new_scope(self, owner: str) -> Scope:
        return Scope(owner, By("", "", "", ""), "app.post", "id1")

    def _wake(self) -> None:
        self.woken += 1

    def take(self, name: LockName | None = None) -> Lease:
        lease = self.locker.acquire(name or a_name(), self.scope, 30.0, Claim(self.scope.by))
        assert isinstance(lease, Lease)
        return lease

    def kinds(self) -> list[str]:
        return [event.kind for event in self.told]
