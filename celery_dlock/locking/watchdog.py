"""The watchdog: one thread per process that renews leases and releases those of dead processes.

Above 300 lines: renewal, loss and release share one scan and its time budget, so they stay together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import StoreRefused, StoreUnavailable
from ..store.base import LockStore, ReleaseRequest
from ..store.model import Released, Renewal
from ..utils import threads
from ..utils.background import Loop
from ..utils.clock import Clock
from ..utils.log import logger
from .lease import drift_margin
from .lease_table import LeaseRecord, LeaseState

__all__ = ["KILL_GRACE", "LeaseSource", "Watchdog"]


#: Seconds between two scans of the lease tables, unless a child dies.
TICK = 0.2
#: Maximum seconds for a renewal at the other servers while one server does not answer.
QUICK = 0.1
#: Consecutive ticks with nothing to watch after which the watchdog ends.
IDLE_TICKS = 50
#: Maximum seconds that a process needs to end after Celery kills it for its hard time limit.
KILL_GRACE = 10.0
#: Seconds after which an unfinished release counts as failed. The runtime raises it if the store timeout is long.
LINGER = 15.0


class LeaseSource(Protocol):
    """A process whose leases the watchdog renews: this process or a pool child."""

    def records(self) -> Sequence[LeaseRecord]: ...
    def is_dead(self) -> bool:
        """Return whether the process is dead. The watchdog then releases its leases."""
        ...

    def pidfd(self) -> int | None:
        """Return a descriptor that becomes readable when the process dies; None if there is none."""
        ...

    def is_closed(self) -> bool:
        """Return whether the watchdog may end while this source has no leases."""
        ...

    def on_scan(self, now: float) -> None:
        """Record that the watchdog scanned all sources at ``now``; 0: the watchdog ends."""
        ...

    def on_released(self, record: LeaseRecord, released: Released) -> None:
        """Handle the watchdog's release of a lock, for example publish the grant that it made."""
        ...


@dataclass(slots=True)
class _Look:
    """The result of one scan of the lease tables."""

    due: list[LeaseRecord] = field(default_factory=list)
    ends: list[tuple[LeaseSource, LeaseRecord]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    held: list[LeaseRecord] = field(default_factory=list)
    ends_at: float = math.inf
    busy: bool = False
    #: The sources whose scan succeeded.
    at: list[LeaseSource] = field(default_factory=list)
    #: The last error of another source.
    error: Exception | None = None


class Watchdog:
    """The thread that renews leases, reports lost ones and releases those of dead processes.

    A lease is renewed after a third of its ttl, or one round earlier if rounds take long. The watchdog never calls
    the broker, which could delay renewals. It takes no lock that other code takes. It finds leases only in lease
    tables. It reads the time and sleeps through its arguments, so a test can be its scheduler.

    Args:
        store: A store that no other thread uses.
        clock: The clock of all deadlines.
        timeout: Seconds that one call to ``store`` may take.
        patient: Stores with longer timeouts, by timeout. They are used while no lease ends soon, so that a slow store
            costs no lease.
        lost: Called once for each lost lease, with its record and the reason. Must not block.
        doubtful: Returns whether another delivery of the acquisition's message may exist. If so, a renewal sets the
            field ``dup`` of the lock. The release then sets the done mark, which ends the other delivery.
        linger: Seconds after which an unfinished release counts as failed.
        killed_by: Returns the time by which the acquisition's process must have ended after its hard time limit; 0:
            no limit was enforced. After that time, the lease counts as lost.
    """

    def __init__(
        self,
        store: LockStore,
        clock: Clock,
        timeout: float,
        lost: Callable[[LeaseRecord, str], None],
        doubtful: Callable[[str], bool] = lambda acquisition: False,
        patient: Mapping[float, LockStore] | None = None,
        linger: float = LINGER,
        killed_by: Callable[[str], float] = lambda acquisition: 0.0,
    ) -> None:
        self._stores = {timeout: store, **(patient or {})}
        self._hasty = timeout
        self._store = store
        self._clock = clock
        # Seconds that one more failed call takes. A lease that ends sooner is reported while its holder can still act.
        self._grace = TICK + timeout + QUICK + 0.1
        self._lost = lost
        self._doubtful = doubtful
        self._linger = linger
        self._killed_by = killed_by
        self._sources: list[LeaseSource] = []
        self._refused: set[str] = set()
        self._duplicate_reported: set[str] = set()
        self._release_started: dict[str, float] = {}
        self._release_failed: dict[str, float] = {}
        #: Seconds that the last round took. If a server does not answer, the next round takes as long again.
        self._lasted = 0.0
        self._idle = 0
        self._loop = Loop("watchdog", self._turn, needed=self._busy, close=self._close, rest=self._rest)
        #: The leases that were held and not lost at the last scan.
        self.held: Sequence[LeaseRecord] = ()

    def watch(self, source: LeaseSource) -> bool:
        """Renew the leases of this source from now on. Return false if the thread cannot be started."""
        if source not in self._sources:
            self._sources.append(source)
        return self.wake()

    def wake(self) -> bool:
        """Make sure that the thread runs; return False if it cannot be started. Never blocks."""
        return self._loop.wake()

    def _turn(self) -> float | None:
        idle, self._idle = self._idle, 0  # reset also if the round fails or ends the thread
        if self.tick():
            return TICK
        if idle + 1 >= IDLE_TICKS:
            return None
        self._idle = idle + 1
        return TICK

    def _rest(self, seconds: float) -> None:
        threads.wait([fd for source in self._sources if (fd := source.pidfd()) is not None], seconds)

    def _close(self) -> None:
        for source in list(self._sources):
            source.on_scan(0.0)
        for store in self._stores.values():
            store.close()

    def _busy(self) -> bool:
        return any(source.records() or not source.is_closed() for source in list(self._sources))

    def tick(self) -> bool:
        """Scan all sources, renew and release. Return whether a source has leases or can still get some."""
        began = self._clock.monotonic()
        look = _Look()
        try:
            self._round(look)
        except Exception as error:
            # Report the leases that end before the next renewal: after any error, their holders can still act now.
            self._lose_what_ends(self.held, f"the watchdog failed: {type(error).__name__}")
            raise
        finally:
            self._lasted = self._clock.monotonic() - began
        for source in look.at:
            source.on_scan(began)
        if look.error is not None:
            raise look.error
        return look.busy

    def _round(self, look: _Look) -> None:
        for source in list(self._sources):
            try:
                self._look_at(source, look)
                look.at.append(source)
            except Exception as error:  # noqa: BLE001  # raised after the other sources' leases are renewed
                look.error = error
        self._forget_all_but(look.seen)
        self.held = look.held
        # Three calls must fit before the first lease ends: this one, and two more if it fails.
        budget = (look.ends_at - self._clock.monotonic() - TICK) / 3
        self._store = self._stores[max((t for t in self._stores if t <= budget), default=self._hasty)]
        # Renew first: a release can wait for one round trip, a lease cannot.
        if look.due and not self._renew(look.due, look.held):
            return  # the store did not answer, and no lease can wait for a second timeout
        began = self._clock.monotonic()
        # Releases that failed before come last: the server of another lock may answer.
        for source, record in sorted(look.ends, key=lambda end: end[1].acquisition in self._release_failed):
            if not self._end(source, record):
                # The store does not answer. Each further release would wait for its timeout.
                self._unanswered((), (), look.held, "the store did not answer")
                break
            if self._clock.monotonic() - began > TICK:
                break  # many releases or a slow store: the next tick renews leases before it goes on

    def _lose_what_ends(self, records: Sequence[LeaseRecord], reason: str) -> None:
        for record in records:
            if self._ends(record):
                self._lose(record, f"its deadline came unanswered: {reason}")

    def _ends(self, record: LeaseRecord) -> bool:
        """Return whether the lease would be over by the time that one more call has failed."""
        grace = min(self._grace, record.ttl * 2 / 3)  # a lease is never lost before its renewal is due
        return (
            record.state is LeaseState.HELD and not record.lost and record.deadline - grace <= self._clock.monotonic()
        )

    def _look_at(self, source: LeaseSource, look: _Look) -> None:
        now = self._clock.monotonic()
        gone, records = source.is_dead(), source.records()
        for record in records:
            look.seen.add(record.acquisition)
            if record.state is LeaseState.HELD and not record.lost and (reason := self._spent(record, now)):
                self._lose(record, reason)
            if record.state is LeaseState.HELD and not record.lost:
                look.held.append(record)
                look.ends_at = min(look.ends_at, record.deadline)
            if gone or self._left(record, now):
                look.ends.append((source, record))
            elif record.state is LeaseState.HELD and self._due(record, now):
                look.due.append(record)
        look.busy = look.busy or bool(records) or not source.is_closed()
        if gone and not records:
            self._sources.remove(source)

    def _due(self, record: LeaseRecord, now: float) -> bool:
        if record.acquisition in self._refused or self._spent(record, now):
            return False
        # A lease is due after a third of its ttl. While rounds take long, renew it one round earlier.
        return record.deadline - record.ttl * 2 / 3 <= now + self._lasted or (
            record.acquisition not in self._duplicate_reported and self._doubtful(record.acquisition)
        )

    def _left(self, record: LeaseRecord, now: float) -> bool:
        if record.state is LeaseState.RELEASE_DELEGATED:
            return True
        if record.state is not LeaseState.RELEASING:
            return False
        return now - self._release_started.setdefault(record.acquisition, now) >= self._linger

    def _renew(self, due: Sequence[LeaseRecord], held: Sequence[LeaseRecord], within: float | None = None) -> bool:
        """Renew the leases in ``due``. Return false if the store did not answer.

        Args:
            due: The leases to renew.
            held: All held leases.
            within: Seconds after which a reply is of no use.
        """
        sent = self._clock.monotonic()
        reporting = {record.acquisition for record in due if self._doubtful(record.acquisition)}
        renewals = [
            Renewal(
                record.name,
                record.acquisition,
                round(record.ttl * 1000),
                (("dup", "1"),) if record.acquisition in reporting else (),
                record.durability,
            )
            for record in due
        ]
        try:
            answers = self._store.renew(renewals, within)
        except StoreUnavailable as error:
            self._unanswered(due, due, held, str(error))
            return isinstance(error, StoreRefused)
        for record, renewed in zip(due, answers, strict=True):
            if renewed:
                record.renewed(sent + record.ttl - drift_margin(record.ttl))
                self._duplicate_reported |= reporting & {record.acquisition}
            elif renewed is False and record.state is LeaseState.HELD:
                # Read the state again: if the holder released the lock since the scan, the lease is not lost.
                self._refused.add(record.acquisition)
                self._lose(record, "the store no longer knows it")
        unknown = [record for record, renewed in zip(due, answers, strict=True) if renewed is None]
        if unknown:
            self._unanswered(unknown, due, held, "not all that keep it have confirmed it")
        return True

    def _unanswered(
        self, records: Sequence[LeaseRecord], asked: Sequence[LeaseRecord], held: Sequence[LeaseRecord], reason: str
    ) -> None:
        """Report the unanswered leases in ``records`` that end soon. Renew others that end soon.

        A lease that was not in the request is not lost yet: another server may answer for it.
        """
        self._lose_what_ends(records, reason)
        # These leases were not due, but would be over by the time that one more call has failed.
        others = [record for record in held if record not in asked and self._ends(record)]
        if others:
            left = min(record.deadline for record in others) - self._clock.monotonic()
            self._renew(others, (), min(QUICK, max(0.02, left - 0.05)))

    def _lose(self, record: LeaseRecord, reason: str) -> None:
        if not record.lost:
            record.lose()
            try:
                record.stop()  # with on_lost="abort", this raises LockLost in the body (worker/abort)
            finally:
                self._lost(record, reason)

    def _end(self, source: LeaseSource, record: LeaseRecord) -> bool:
        ending = ReleaseRequest.from_text(record.ending) if record.ending else ReleaseRequest(outcome_unknown=True)
        try:
            released = self._store.release(record.name, record.acquisition, ending, record.durability)
        except StoreUnavailable as error:
            refused = isinstance(error, StoreRefused)
            self._not_ended(record, error, refused=refused)
            return refused
        record.clear()
        source.on_released(record, released)
        return True

    def _not_ended(self, record: LeaseRecord, error: StoreUnavailable, *, refused: bool) -> None:
        now = self._clock.monotonic()
        if record.acquisition not in self._release_failed:
            self._release_failed[record.acquisition] = now
            logger.warning("cannot free %s yet: %s", record.name, error)
        elif refused and now - self._release_failed[record.acquisition] > record.ttl:
            logger.error("%s was not freed and is left to its ttl: %s", record.name, error)
            record.clear()

    def _forget_all_but(self, seen: set[str]) -> None:
        self._refused &= seen
        self._duplicate_reported &= seen
        for since in (self._release_started, self._release_failed):
            for acquisition in since.keys() - seen:
                del since[acquisition]

    def _spent(self, record: LeaseRecord, now: float) -> str:
        """Return the reason why the lease must not be renewed any more; "" if there is none."""
        if 0 < record.max_hold_until <= now:
            return "it was held for as long as max_hold allows"
        if 0 < self._killed_by(record.acquisition) <= now:
            return f"its process did not end within {KILL_GRACE:g} s after its hard time limit"
        return ""
