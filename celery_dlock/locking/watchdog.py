"""The watchdog: one thread per process that renews leases and releases those of dead processes."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import StoreRefused, StoreUnavailable
from ..store.base import LockStore, ReleaseRequest
from ..store.model import Renewal, StopRequest
from ..utils import threads
from ..utils.background import Loop
from ..utils.clock import Clock
from ..utils.log import logger
from .events import FORGOTTEN, MAX_HOLD_OVER, Loss, LossCause, unanswered
from .lease import drift_margin
from .lease_source import LeaseSource
from .lease_table import LeaseRecord, LeaseState
from .renewal_schedule import renewal_due

__all__ = ["FREED_WITHIN", "KILL_GRACE", "Watchdog", "WatchdogHooks"]


#: Seconds from the death of a pool child until its locks are free, if the store answers: the promise of the README. A
#: round finds the death. It may first wait for a renewal that one server does not answer, and then it releases.
FREED_WITHIN: Final = 1.0
#: Seconds from one round, a scan of the lease tables, to the next, unless a child dies.
ROUND = FREED_WITHIN / 5
#: Shortest pause in seconds between two scans. A scan that waited for the store shortens the pause after it.
PAUSE = 0.05
#: If one server does not answer, maximum seconds for the renewals at the other servers.
QUICK = 0.1
#: Rounds after which the watchdog forgets what it knows of released acquisitions.
FORGET_ROUNDS = 25
#: Consecutive rounds with nothing to watch after which the watchdog ends.
IDLE_ROUNDS = 50
#: Maximum seconds that a process needs to end after Celery kills it for its hard time limit.
KILL_GRACE = 10.0
#: Seconds after which an unfinished release counts as failed. With a long store timeout, the runtime sets more.
LINGER = 15.0
#: Maximum renewals in one call. The leases of the next call, or of another server, wait until this one is answered.
BATCH = 500

_DEADLINE = operator.attrgetter("deadline")


@dataclass(slots=True)
class _Scan:
    """The result of one scan of the lease tables."""

    due: list[LeaseRecord] = field(default_factory=list)
    ends: list[tuple[LeaseSource, LeaseRecord]] = field(default_factory=list)
    busy: bool = False
    #: The sources whose scan succeeded.
    sources: list[LeaseSource] = field(default_factory=list)
    #: The last error of a source whose scan failed.
    error: Exception | None = None


class WatchdogHooks:
    """The part of a process to which its watchdog reports, and which it asks. No method may block."""

    def lost(self, record: LeaseRecord, reason: Loss) -> None:
        """Report a lost lease. Called once for each."""

    def renewed(self, margin: float) -> None:
        """Record that a lease was renewed, and the seconds that it had left when the renewal was requested."""

    def may_be_redelivered(self, acquisition: str) -> bool:
        """Return whether another delivery of the acquisition's message may exist.

        If so, a renewal sets the field ``dup`` of the lock. The release then sets the done mark, which ends the other
        delivery.
        """
        return False

    def kill_deadline(self, acquisition: str) -> float:
        """Return the time by which the acquisition's process must have ended after its hard time limit.

        It is 0 if no limit was enforced. After that time, the lease counts as lost.
        """
        return 0.0


class Watchdog:
    """The thread that renews leases, reports lost ones and releases those of dead processes.

    A lease is renewed after a third of its ttl, or one round earlier if rounds take long. The watchdog never calls
    the broker, which could delay renewals. It waits for no ``threading.Lock`` of another thread. It finds leases only
    in lease tables. It reads the time only from ``clock``, so a test can control its schedule.

    Args:
        stores: Clients of the store that no other thread uses, by the seconds that a call may take. The watchdog uses
            the hastiest one if a lease ends soon. Otherwise it uses a more patient one, because a slow server may
            still answer in time.
        clock: The clock of all deadlines.
        hooks: Receives losses and renewals.
        linger: Seconds after which an unfinished release counts as failed.
    """

    def __init__(
        self, stores: Mapping[float, LockStore], clock: Clock, hooks: WatchdogHooks, linger: float = LINGER
    ) -> None:
        self._stores = stores
        self._hasty = min(stores)
        self._store = stores[self._hasty]
        self._clock = clock
        # Seconds that one more failed call takes. A lease that ends sooner is reported as lost now, so that its holder
        # can still stop.
        self._grace = ROUND + self._hasty + QUICK + 0.1
        self._hooks = hooks
        self._linger = linger
        self._sources: list[LeaseSource] = []
        self._refused: set[str] = set()
        self._duplicate_reported: set[str] = set()
        self._release_started: dict[str, float] = {}
        self._release_failed: dict[str, float] = {}
        #: Seconds that the last round took. If a server does not answer, the next round takes as long again.
        self._lasted = 0.0
        #: Whether the last renewal call failed.
        self._failing = False
        self._idle = 0
        #: The start of the last round that succeeded, on the monotonic clock; 0 before it.
        self.scanned_at = 0.0
        self._loop = Loop("watchdog", self._next_round, needed=self._busy, close=self._close, wait=self._wait)
        self._rounds_to_forget = FORGET_ROUNDS

    @property
    def held(self) -> list[LeaseRecord]:
        """The leases that are held and not lost. Any thread may read this."""
        return [record for source in list(self._sources) for record in source.held()]

    @property
    def has_sources(self) -> bool:
        """Whether a process is watched. A process is until it is dead and its leases are released."""
        return bool(self._sources)

    @property
    def running(self) -> bool:
        """Whether the thread runs. It ends when there is nothing to watch."""
        return bool(self._loop.running.locked())

    def watch(self, source: LeaseSource) -> bool:
        """Renew the leases of this source from now on. Return false if the thread cannot be started."""
        if source not in self._sources:
            self._sources.append(source)
        return self.wake()

    def wake(self) -> bool:
        """Make sure that the thread runs; return False if it cannot be started. Never blocks."""
        return self._loop.wake()

    def _next_round(self) -> float | None:
        idle, self._idle = self._idle, 0  # reset also if the round fails or ends the thread
        if self.run_round():
            # Count a wait for a silent server as part of the pause: more leases became due meanwhile.
            return max(PAUSE, ROUND - self._lasted)
        if idle + 1 >= IDLE_ROUNDS:
            return None
        self._idle = idle + 1
        return ROUND

    def _wait(self, seconds: float) -> None:
        threads.wait([fd for source in self._sources if (fd := source.pidfd()) is not None], seconds)

    def _close(self) -> None:
        for source in list(self._sources):
            source.on_scan(0.0)
        for store in self._stores.values():
            store.close()

    def _busy(self) -> bool:
        return any(not source.is_empty() or not source.is_closed() for source in list(self._sources))

    def run_round(self) -> bool:
        """Scan all sources, renew and release. Return whether a source has leases or can still get some."""
        began = self._clock.monotonic()
        scan = _Scan()
        try:
            self._round(scan)
        except Exception as error:
            # After any error, report the leases that end before the next renewal. Their holders can still stop now.
            self._lose_ending_soon(self.held, f"the watchdog failed: {type(error).__name__}")
            raise
        finally:
            self._lasted = self._clock.monotonic() - began
        for source in scan.sources:
            source.on_scan(began)
        if scan.error is not None:
            raise scan.error
        self.scanned_at = began
        return scan.busy

    def _round(self, scan: _Scan) -> None:
        for source in list(self._sources):
            try:
                self._scan_source(source, scan)
                scan.sources.append(source)
            except Exception as error:  # noqa: BLE001  # raised after the other sources' leases are renewed
                scan.error = error
        self._forget()
        # Renew first: a release can wait for one round trip, a lease cannot.
        if not self._renew_all(scan):
            return  # the store did not answer, and no lease can wait for a second timeout
        if scan.ends:
            self._choose_store(scan)
        began = self._clock.monotonic()
        # Releases that failed before come last: the server of another lock may answer.
        for source, record in sorted(scan.ends, key=lambda end: self._release_order(end[1])):
            if not self._end(source, record):
                # Only renew the leases that end soon. The next round tries the other releases: each could time out.
                self._unanswered((), (), "the store did not answer")
                break
            if self._clock.monotonic() - began > ROUND:
                break  # many releases or a slow store: the next round renews leases before it goes on

    def _release_order(self, record: LeaseRecord) -> tuple[float, str]:
        """Return a sort key. Releases that never failed come first, the others by the time of their first failure."""
        return self._release_failed.get(record.acquisition, 0.0), record.acquisition

    def _renew_all(self, scan: _Scan) -> bool:
        """Renew what is due, in one call for each batch. Return false if the store did not answer a call."""
        due = scan.due
        if len(due) > BATCH:
            due.sort(key=_DEADLINE)
        for start in range(0, len(due), BATCH):
            self._choose_store(scan)
            if not self._renew(due[start : start + BATCH]):
                return False
        return True

    def _choose_store(self, scan: _Scan) -> None:
        """Use the client with the longest timeout that leaves time for repetitions before the first lease ends.

        The first call may use a third of the time left. If it fails, two thirds are left, of which a repetition may use
        half: the same timeout again. If a repetition could use only a third, each would have a shorter timeout, and a
        slow store could not answer in time.
        """
        ends_at = min((source.first_deadline() for source in scan.sources), default=math.inf)
        budget = (ends_at - self._clock.monotonic() - ROUND) / (2 if self._failing else 3)
        self._store = self._stores[max((t for t in self._stores if t <= budget), default=self._hasty)]

    def _lose_ending_soon(self, records: Sequence[LeaseRecord], reason: str) -> None:
        for record in records:
            if self._ends_soon(record):
                self._lose(record, unanswered(reason))

    def _ends_soon(self, record: LeaseRecord) -> bool:
        """Return whether the lease would be over by the time that one more call has failed."""
        grace = min(self._grace, record.ttl * 2 / 3)  # a lease is never lost before its renewal is due
        return (
            record.state is LeaseState.HELD and not record.lost and record.deadline - grace <= self._clock.monotonic()
        )

    def _scan_source(self, source: LeaseSource, scan: _Scan) -> None:
        now = self._clock.monotonic()
        gone = source.is_dead()
        records = source.records() if gone else source.due_records(now, now + self._lasted)
        if gone:
            scan.ends += [(source, record) for record in records]
        for record in records:
            if record.state is not LeaseState.HELD:
                if not gone and self._release_is_pending(record, now):
                    scan.ends.append((source, record))
            elif reason := self._loss_reason(record, now):
                self._lose(record, reason)
                record.set_aside()
            elif not gone and self._due(record, now):
                scan.due.append(record)
        scan.busy = scan.busy or not source.is_closed() or not source.is_empty()
        if gone and not records:
            self._sources.remove(source)

    def _due(self, record: LeaseRecord, now: float) -> bool:
        if record.acquisition in self._refused:
            return False
        # A lease is due after a third of its ttl. While rounds take long, renew it one round earlier.
        return renewal_due(record) <= now + self._lasted or (
            record.acquisition not in self._duplicate_reported and self._hooks.may_be_redelivered(record.acquisition)
        )

    def _release_is_pending(self, record: LeaseRecord, now: float) -> bool:
        if record.state is LeaseState.RELEASE_DELEGATED:
            return True
        if record.state is not LeaseState.RELEASING:
            return False
        return now - self._release_started.setdefault(record.acquisition, now) >= self._linger

    def _renew(self, due: Sequence[LeaseRecord], within: float | None = None, *, rescue: bool = True) -> bool:
        """Renew the leases in ``due``. Return false if the store did not answer.

        Args:
            due: The leases to renew.
            within: Seconds after which a reply is of no use.
            rescue: If the store does not confirm a renewal, renew other leases that end soon.
        """
        sent = self._clock.monotonic()
        reporting = {record.acquisition for record in due if self._hooks.may_be_redelivered(record.acquisition)}
        renewals = [_renewal(record, duplicate=record.acquisition in reporting) for record in due]
        self._failing = True
        try:
            answers = self._store.renew(renewals, within)
        except StoreUnavailable as error:
            self._unanswered(due, due, str(error), rescue=rescue)
            return isinstance(error, StoreRefused)
        self._failing = False
        for record, renewed in zip(due, answers, strict=True):
            if renewed:
                self._hooks.renewed(record.deadline - sent)
                record.renewed(sent + record.ttl - drift_margin(record.ttl))
                if record.acquisition in reporting:
                    self._duplicate_reported.add(record.acquisition)
                if renewed is not True and isinstance(renewed, StopRequest):
                    record.request_stop(renewed.by)
                    record.stop("replaced")
            elif renewed is False and record.state is LeaseState.HELD:
                # Read the state again: if the holder released the lock since the scan, the lease is not lost.
                self._refused.add(record.acquisition)
                record.set_aside()
                self._lose(record, FORGOTTEN)
        unknown = [record for record, renewed in zip(due, answers, strict=True) if renewed is None]
        if unknown:
            self._unanswered(unknown, due, "too few servers confirmed the renewal", rescue=rescue)
        return True

    def _unanswered(
        self, records: Sequence[LeaseRecord], asked: Sequence[LeaseRecord], reason: str, *, rescue: bool = True
    ) -> None:
        """Report as lost those leases in ``records`` that end soon.

        Then try to renew those leases that end soon and were not in this request. They are not lost yet: another
        server may answer for them.

        Args:
            records: The leases whose renewal was not confirmed.
            asked: All leases of the request.
            reason: Why the renewal was not confirmed.
            rescue: Whether to renew the other leases that end soon.
        """
        self._lose_ending_soon(records, reason)
        if not rescue:
            return
        # Find other leases, not in this request, that would be over by the time that one more call has timed out.
        known = {record.acquisition for record in asked}
        others = [record for record in self.held if self._ends_soon(record) and record.acquisition not in known]
        if others:
            left = min(record.deadline for record in others) - self._clock.monotonic()
            self._renew(others, min(QUICK, max(0.02, left - 0.05)), rescue=False)

    def _lose(self, record: LeaseRecord, reason: Loss) -> None:
        if not record.lost:
            record.lose()
            try:
                record.stop("lost")  # with on_lost="abort", this raises LockLost in the body (worker/body_stop)
            finally:
                self._hooks.lost(record, reason)

    def _end(self, source: LeaseSource, record: LeaseRecord) -> bool:
        ending = ReleaseRequest.from_text(record.ending) if record.ending else ReleaseRequest(outcome_unknown=True)
        try:
            released = self._store.release(record.name, record.acquisition, ending)
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
            logger.warning("cannot release %s yet, retrying: %s", record.name, error)
        elif refused and now - self._release_failed[record.acquisition] > record.ttl:
            logger.error("%s was not released and is left to its ttl: %s", record.name, error)
            record.clear()

    def _forget(self) -> None:
        """Forget released acquisitions from time to time. Their ids are never used again."""
        self._rounds_to_forget -= 1
        if self._rounds_to_forget > 0:
            return
        self._rounds_to_forget = FORGET_ROUNDS
        remembered: tuple[set[str] | dict[str, float], ...]
        remembered = self._refused, self._duplicate_reported, self._release_started, self._release_failed
        if any(remembered):
            known = {record.acquisition for source in self._sources for record in source.records()}
            self._refused &= known
            self._duplicate_reported &= known
            for since in (self._release_started, self._release_failed):
                for acquisition in since.keys() - known:
                    del since[acquisition]

    def _loss_reason(self, record: LeaseRecord, now: float) -> Loss | None:
        """Return the reason why the lease must not be renewed any more; None if there is none."""
        if 0 < record.max_hold_until <= now:
            return MAX_HOLD_OVER
        if 0 < self._hooks.kill_deadline(record.acquisition) <= now:
            text = f"its process did not end within {KILL_GRACE:g} s after its hard time limit"
            return Loss(LossCause.TIME_LIMIT, text)
        return None


def _renewal(record: LeaseRecord, *, duplicate: bool) -> Renewal:
    facts = (("dup", "1"),) if duplicate else ()
    ttl_ms = round(record.ttl * 1000)
    return Renewal(record.name, record.acquisition, ttl_ms, fields=facts, stoppable=record.stoppable)
