"""A clock that stands still, and a store in memory, for unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.client import LockClient
from celery_dlock.locking.events import Event, Listeners, Loss
from celery_dlock.locking.lease import Lease, drift_margin
from celery_dlock.locking.lease_source import LocalLeaseSource
from celery_dlock.locking.lease_table import LeaseRecord, LocalLeaseTable
from celery_dlock.locking.owner import OwnerContext
from celery_dlock.locking.watchdog import ROUND, Watchdog, WatchdogHooks
from celery_dlock.runtime import WATCHDOG_TIMEOUT
from celery_dlock.store.base import ReleaseListener, ReleaseRequest
from celery_dlock.store.holder_model import Holder
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Released, Renewal, Requester


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
        requests: The request of every acquire.
        asked: Every renewal asked for.
        withins: After how many seconds the answer was of no use, of every call that renews.
        ended: Every release asked for.
        inspected: Every key that was inspected.
        woken_by: Every key whose release was waited for.
        failures: What the next calls raise, each once; None: nothing.
    """

    clustered = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.locks: dict[LockName, Kept] = {}
        self.away: StoreUnavailable | None = None
        self.call_time = 0.0
        self.requests: list[AcquireRequest] = []
        self.asked: list[Renewal] = []
        self.withins: list[float | None] = []
        self.ended: list[tuple[str, ReleaseRequest]] = []
        self.inspected: list[LockName] = []
        self.woken_by: list[LockName] = []
        self.passed_on: list[float] = []
        self.failures: list[StoreUnavailable | None] = []
        self.ranks = 600
        self.calls = 0
        self.tokens = 0
        self.closed = False

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Held:
        self.requests.append(request)
        self._call()
        rank_us = request.rank_us or self._next_rank()
        kept = self._kept(name)
        if kept is None:
            self.tokens += 1
            kept = self.locks[name] = Kept(acquisition, self.clock.now + ttl_ms / 1000, self.tokens)
        if kept.acquisition != acquisition:
            return Held(self._holder(kept), same_message=False, rank_us=rank_us)
        return Acquired(kept.token, self.clock.wall(), rank_us)

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool]:
        self.asked += renewals
        self.withins.append(within)
        self._call(within)
        return [self._renew(renewal) for renewal in renewals]

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        self._call()
        self.ended.append((acquisition, ending))
        kept = self._kept(name)
        if kept is None or kept.acquisition != acquisition:
            return Released(ours=False, duplicate_seen=False)
        del self.locks[name]
        return Released(ours=True, duplicate_seen="dup" in kept.notes)

    def shard(self, name: LockName) -> int:
        return 0

    def last_run(self, name: LockName, tick: str = "") -> None:
        return None

    def inspect(self, name: LockName) -> Holder | None:
        self.inspected.append(name)
        self._call()
        kept = self._kept(name)
        return self._holder(kept) if kept else None

    def release_listener(self, name: LockName) -> ReleaseListener:
        self.woken_by.append(name)
        return FakeListener(self.clock, self.passed_on)

    def close(self) -> None:
        self.closed = True

    def lose(self, name: LockName) -> None:
        """The lock is gone, as after a FLUSHALL."""
        del self.locks[name]

    def kept(self, name: LockName) -> Kept | None:
        return self._kept(name)

    def _call(self, within: float | None = None) -> None:
        self.calls += 1
        self.clock.now += self.call_time if within is None else min(within, self.call_time)
        if (failure := self.failures.pop(0) if self.failures else self.away) is not None:
            raise failure

    def _next_rank(self) -> int:
        self.ranks += 100
        return self.ranks

    def _kept(self, name: LockName) -> Kept | None:
        kept = self.locks.get(name)
        return kept if kept is not None and kept.until > self.clock.now else None

    def _renew(self, renewal: Renewal) -> bool:
        kept = self._kept(renewal.name)
        if kept is None or kept.acquisition != renewal.acquisition:
            return False
        kept.until = max(kept.until, self.clock.now + renewal.ttl_ms / 1000)
        kept.notes.update(renewal.fields)
        return True

    def _holder(self, kept: Kept) -> Holder:
        left, until = "releasing" in kept.notes, kept.until - self.clock.now
        return Holder(None, None, "node", 1, since=self.clock.wall(), expires_in=until, releasing=left)


class SlowerStore(FakeStore):
    """The same store over connections that wait longer: away, a call takes so many seconds."""

    def __init__(self, origin: FakeStore, timeout: float) -> None:
        super().__init__(origin.clock)
        self.origin = origin
        self.timeout = timeout
        self.locks, self.asked, self.ended = origin.locks, origin.asked, origin.ended
        self.requests, self.withins = origin.requests, origin.withins

    def _call(self, within: float | None = None) -> None:
        if self.origin.away is None:
            self.origin._call(within)
            return
        self.origin.calls += 1
        self.clock.now += self.timeout if within is None else min(within, self.timeout)
        raise self.origin.away


class FakeListener:
    """No caller is ever woken: time passes."""

    def __init__(self, clock: FakeClock, passed_on: list[float]) -> None:
        self._clock = clock
        self._passed_on = passed_on

    def wait(self, timeout: float) -> bool:
        self._clock.now += timeout
        return False

    def pass_on(self) -> None:
        self._passed_on.append(self._clock.now)


class FakeSource(LocalLeaseSource):
    """A process whose records are kept. ``dead``: it is gone. ``child``: it is watched also while it holds nothing."""

    def __init__(self, *, child: bool = False) -> None:
        self.lease_table = LocalLeaseTable()
        self.dead = False
        self.child = child
        self.told_freed: list[tuple[str, Released]] = []
        super().__init__(
            self.lease_table, lambda record, released: self.told_freed.append((record.acquisition, released))
        )

    def is_dead(self) -> bool:
        return self.dead

    def is_closed(self) -> bool:
        return self.dead or not self.child


def a_name(text: str = "x") -> LockName:
    return shared_name(text)


class FakeHooks(WatchdogHooks):
    """Keeps what the watchdog told, and answers as the harness says."""

    def __init__(self, harness: WatchdogHarness) -> None:
        self._harness = harness

    def lost(self, record: LeaseRecord, reason: Loss) -> None:
        self._harness.lost.append((record.acquisition, reason.text, self._harness.clock.now))

    def may_be_redelivered(self, acquisition: str) -> bool:
        return acquisition in self._harness.doubted

    def kill_deadline(self, acquisition: str) -> float:
        return self._harness.killed_by.get(acquisition, 0.0)


class WatchdogHarness:
    """One watchdog, one process, and what the watchdog told. No thread: the test runs the rounds."""

    def __init__(
        self,
        *,
        timeout: float = WATCHDOG_TIMEOUT,
        patient: tuple[float, ...] = (),
        source: FakeSource | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.store = FakeStore(self.clock)
        self.source = source or FakeSource()
        self.lost: list[tuple[str, str, float]] = []
        self.doubted: set[str] = set()
        self.timeout = timeout
        stores = {longer: SlowerStore(self.store, longer) for longer in patient}
        #: By acquisition: when its process should have ended.
        self.killed_by: dict[str, float] = {}
        self.hooks = FakeHooks(self)
        self.watchdog = Watchdog({timeout: self.store, **stores}, self.clock, self.hooks)
        self.watchdog._loop.running.acquire(blocking=False)  # so no thread starts
        self.watchdog.watch(self.source)

    def hold(self, text: str = "x", *, ttl: float = 30.0, source: FakeSource | None = None) -> LeaseRecord:
        """Take a lock as the lock client does."""
        record = (source or self.source).lease_table.open(a_name(text), f"owner.{text}", ttl)
        sent = self.clock.now
        answer = self.store.acquire(
            record.name,
            record.acquisition,
            round(ttl * 1000),
            AcquireRequest(Requester("", "", "", "")),
        )
        assert isinstance(answer, Acquired)
        record.held(sent + ttl - drift_margin(ttl))
        return record

    def run(self, seconds: float) -> None:
        """Let time pass, with a round every ROUND seconds."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += ROUND
            self.watchdog.run_round()

    def asked_at(self, *, rounds: int) -> list[float]:
        """Seconds from now at which the store was asked for renewals."""
        start, times = self.clock.now, []
        for _ in range(rounds):
            before = len(self.store.asked)
            self.clock.now += ROUND
            self.watchdog.run_round()
            times += [self.clock.now - start] if len(self.store.asked) > before else []
        return times


class LockClientHarness:
    """One process's lock client, and what it told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = FakeStore(self.clock)
        self.lease_table = LocalLeaseTable()
        self.lease_table.wake = self._wake
        self.woken = 0
        self.wakes = True
        self.told: list[Event] = []
        listeners = Listeners()
        listeners.add(self.told.append)
        self.lock_client = LockClient(self.store, self.lease_table, self.clock, listeners)
        self.context = self.new_context("me")

    def new_context(self, owner: str) -> OwnerContext:
        return OwnerContext(owner, Requester("", "", "", ""), "app.post", "id1")

    def _wake(self) -> bool:
        self.woken += 1
        return self.wakes

    def take(self, name: LockName | None = None) -> Lease:
        lease = self.lock_client.acquire(name or a_name(), self.context, 30.0, AcquireRequest(self.context.requester))
        assert isinstance(lease, Lease)
        return lease

    def kinds(self) -> list[str]:
        return [event.kind for event in self.told]
