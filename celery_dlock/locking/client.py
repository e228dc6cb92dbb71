"""The lock client: acquires, re-enters, renews and releases locks for the owners of one process.

Above 300 lines: acquire, renew and release share the rollback of an interrupted step, so they stay together.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable

from ..errors import LockLost, NotConfirmed, ReplyLost, ReplyTimeout, StoreNotReady, StoreUnavailable
from ..keys.lock_name import LockName
from ..store.base import QueueStore, ReleaseRequest, call_again_if_reply_lost
from ..store.circuit_breaker import CircuitBreaker, shared_words
from ..store.model import (
    Acquired,
    AcquireRequest,
    Duplicate,
    Grant,
    Held,
    Holder,
    NoMajority,
    Parked,
    Refusal,
    Released,
    Renewal,
    Requester,
    Tombstoned,
    Unknown,
    Used,
)
from ..store.queue_model import Waiting
from ..utils.clock import Clock
from ..utils.log import logger
from ..utils.rng import rng
from .events import Kind, Listeners
from .lease import Lease, drift_margin, loss_grace
from .lease_table import LeaseRecord, LeaseState, LeaseTable
from .owner import OwnerContext

__all__ = ["LockClient"]

#: Attempts per acquire. Each attempt has a new acquisition number.
ATTEMPTS = 2
#: Maximum random delay, in seconds, before each new vote while no owner gets a majority (Redlock).
VOTES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5)
#: Seconds between two polls of a waiter that gets no notification of a release.
POLL = 2.0
#: Maximum number of waiters in a listing.
NAMED = 100
#: Seconds without a scan by the watchdog after which an acquire warns. Longer than its longest round.
UNWATCHED = 10.0


class LockClient:
    """Acquires and releases locks for the owners of one process.

    Args:
        store: The lock store.
        lease_table: The lease table of this process. An acquisition is recorded there before its command is sent.
        wake: Starts the watchdog if it does not run; returns false if it cannot be started.
        clock: The clock of all deadlines.
        listeners: The receivers of events.
        publish_grant: Publishes the message of a granted waiter. Never raises because of the broker.
        breaker: The circuit breaker. If it is open, a delivered message skips the store, because it can be
            republished. A ``Lock`` always calls the store, because its caller has no other attempt.
    """

    def __init__(
        self,
        store: QueueStore,
        lease_table: LeaseTable,
        wake: Callable[[], bool],
        clock: Clock,
        listeners: Listeners,
        publish_grant: Callable[[LockName, Grant], object] = lambda name, grant: None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._store = store
        self._lease_table = lease_table
        self._wake = wake
        self._clock = clock
        self._listeners = listeners
        self._publisher = publish_grant
        self._breaker = breaker or CircuitBreaker(shared_words(), clock, 0, 0)
        self._warned = False

    def acquire(self, name: LockName, scope: OwnerContext, ttl: float, claim: AcquireRequest) -> Lease | Refusal:
        """Take the lock, or return why it was refused. An owner that holds the lock re-enters it.

        Raises:
            LockLost: The owner held the lock, and its lease is over. A nested entry never acquires the lock anew.
            StoreUnavailable: The store did not answer, or the watchdog cannot be started. A lock that was taken
                nevertheless is released.
        """
        held = scope.held.get((id(self), name))
        try:
            if held is not None:
                earlier = self._used_before(name, held, claim) if claim.once else None
                if earlier is None and claim.once and not held.seed:
                    held.seed = str(held.token)  # the lock was acquired without a run mark, so it has no stored seed
                return earlier or self._enter_again(held, scope)
            part = self._store.shard(name)
            if scope.delivered and claim.identity is not None:
                self._breaker.before_call(part)
            answer = self._ask(name, scope, ttl, claim, part)
            if isinstance(answer, NoMajority):
                answer = self._vote_again(name, scope, ttl, claim, part)
            if isinstance(answer, Lease):
                scope.held[id(self), name] = answer
                scope.entered.append(answer)
        except BaseException:
            self.delegate_release(scope)
            raise
        if isinstance(answer, Lease):
            self._tell("acquired", answer)
        return answer

    def acquire_within(
        self,
        name: LockName,
        scope: OwnerContext,
        ttl: float,
        claim: AcquireRequest,
        timeout: float | None,
        *,
        leaving: bool = False,
    ) -> Lease | Refusal:
        """Acquire the lock. If it is held, wait at most ``timeout`` seconds for its release; None: without limit.

        A release wakes the waiter. The slow poll covers holders that died and notifications that were lost.
        With ``leaving``, wait only while the holder has announced its release. Do not wait for a later holder, nor
        for a reservation for a retry.
        """
        answer = self.acquire(name, scope, ttl, claim)
        if not isinstance(answer, Held) or (timeout is not None and timeout <= 0):
            return answer
        end = None if timeout is None else self._clock.monotonic() + timeout
        with self._store.release_listener(name) as waker:
            while True:
                # Keep the rank of the first attempt. Otherwise, each poll would put the waiter behind later ones.
                claim = claim._replace(rank_us=answer.rank_us, notify=True)
                answer = self.acquire(name, scope, ttl, claim)
                left = POLL if end is None else end - self._clock.monotonic()
                if not isinstance(answer, Held) or left <= 0 or (leaving and not answer.holder.releasing):
                    return answer
                waker.wait(min(left, POLL, answer.holder.expires_in + 0.005))

    def release(self, lease: Lease, scope: OwnerContext, ending: ReleaseRequest = ReleaseRequest()) -> bool:  # noqa: B008  # frozen
        """Leave a lease once; the outermost exit releases the lock. Return false if the lease was lost before.

        Never raises because of the store: a failed release must not fail a task that is done. If the store does not
        answer, the watchdog repeats the release.
        """
        if lease.over or lease.pid != os.getpid():
            scope.drop(lease)
            return True  # an earlier exit hook released it, or the body forked this process, which must not release it
        if lease.hold_count > 1:
            lease.hold_count -= 1
            lease.inner_use = lease.inner_use or (ending if ending.used_ms else None)
            scope.drop(lease)
            return self._restated(lease)
        if lease.inner_use is not None:
            inner = lease.inner_use
            identity = ending.identity or inner.identity
            ending = ending._replace(identity=identity, used_ms=inner.used_ms, requester=inner.requester)
            ending = ending._replace(tick=inner.tick, seed=inner.seed)
        lost = lease.lost
        ours = self._free(lease, scope, ending)
        scope.held.pop((id(self), lease.lock_name), None)
        scope.open_acquisitions.discard(lease.acquisition)
        if not ours:
            self.lose(lease, "found at its release")
        lease.over = True
        # Drop the lease last. If an exception interrupts this method, the next exit hook must find it and retry.
        scope.drop(lease)
        if lost:
            logger.warning("the work under %s has ended; its lease was lost before", lease.name)
        if ours:
            self._tell("released", lease, "its lease was lost before" if lost else "")
        return ours and not lost

    def delegate_release(self, scope: OwnerContext) -> None:
        """Delegate the release of interrupted acquisitions to the watchdog.

        A soft time limit, another signal's exception or the kill of a greenlet can interrupt any step. Blocking
        signals does not help: a mask covers one thread. Another thread gets the signal, and Python raises in the main
        thread.
        """
        for acquisition in scope.open_acquisitions - {lease.acquisition for lease in scope.entered}:
            record = self._lease_table.find(acquisition)
            if record is not None and record.state is not LeaseState.RELEASE_DELEGATED:
                record.delegate_release(scope.rollback.text)
            for key in [key for key, lease in scope.held.items() if lease.acquisition == acquisition]:
                del scope.held[key]
            scope.open_acquisitions.discard(acquisition)
        self._wake()

    def announce_release(self, lease: Lease, reserved_for: str = "") -> None:
        """Record in the lock that the body has ended. Call this before the next message is published.

        ``reserved_for`` is the identity of the retry for which the release will reserve the lock; "" for none.
        """
        if not lease.releasing and not lease.over and lease.pid == os.getpid():
            lease.releasing = True
            try:
                self.renew(
                    lease, lease.ttl, (("releasing", "1"), *((("reserved_for", reserved_for),) if reserved_for else ()))
                )
            except StoreUnavailable as error:
                logger.warning("could not say that %s is about to be released: %s", lease.name, error)

    def renew(self, lease: Lease, seconds: float, notes: tuple[tuple[str, str], ...] = ()) -> bool:
        """Renew the lease now, in addition to the watchdog's renewals. Return false if the lease is over."""
        sent = self._clock.monotonic()
        if 0 < lease.record.max_hold_until <= sent:
            self.lose(lease, "it was held for as long as max_hold allows")
            return False
        renewal = Renewal(
            lease.lock_name, lease.acquisition, max(1, round(seconds * 1000)), notes, lease.record.durability
        )
        # A reply that comes after the lease's end is of no use to the caller.
        within = max(0.001, lease.remaining() - loss_grace(lease.ttl))
        part = self._store.shard(lease.lock_name)
        renew = functools.partial(self._breaker.call, self._store.renew, part=part)
        # Repeat here, not in the store: the watchdog also calls the store, and repeats renewals at its next tick.
        (renewed,) = call_again_if_reply_lost(renew, [renewal], within)
        if renewed is None:
            raise StoreNotReady(f"the renewal of {lease.name} was not confirmed by all that keep it")
        if renewed:
            lease.record.renewed(sent + seconds - drift_margin(seconds))
        else:
            self.lose(lease, "the store no longer knows it")
        return renewed

    def lose(self, lease: Lease, reason: str) -> None:
        """Mark the lease as lost and report it, once."""
        if not lease.lost and not lease.over:
            lease.record.lose()
            logger.warning("the lease of %s is lost: %s", lease.name, reason)
            self._tell("lost", lease, reason)

    def held(self, name: LockName, scope: OwnerContext) -> Lease | None:
        """Return the lease under which this owner has entered the lock; None if it has not."""
        lease = scope.held.get((id(self), name))
        return lease if lease in scope.entered else None

    def holder(self, name: LockName) -> Holder | None:
        """Return the current holder of the lock; None if it is free."""
        return self._store.inspect(name)

    def waiting(self, name: LockName) -> Waiting:
        """Return the waiters of the lock under the queue policy."""
        return self._store.list_waiters(name, NAMED)

    def _vote_again(
        self, name: LockName, scope: OwnerContext, ttl: float, claim: AcquireRequest, part: int
    ) -> Lease | Refusal:
        for window in VOTES:
            # Several owners voted at the same moment. After different delays, one of them can get a majority.
            time.sleep(rng.uniform(0.0, window))
            answer = self._ask(name, scope, ttl, claim, part)
            if not isinstance(answer, NoMajority):
                return answer
        raise StoreNotReady(f"the lock store did not answer: its servers did not agree who gets {name}")

    def _ask(
        self, name: LockName, scope: OwnerContext, ttl: float, claim: AcquireRequest, part: int
    ) -> Lease | Refusal:
        for attempt in range(ATTEMPTS):
            acquisition = scope.next_acquisition()
            # Record the acquisition first. If this process dies before the reply, the watchdog must find it.
            record = self._lease_table.open(name, acquisition, ttl, claim.durability)
            sent = self._clock.monotonic()
            try:
                answer = self._breaker.call(self._store.acquire, name, acquisition, round(ttl * 1000), claim, part=part)
            except ReplyLost as error:
                self._take_back(record, scope, error)
                # A duplicate delivery may have set ``dup`` in the lock. The rollback deleted it: set it again.
                claim = claim._replace(republished=True)
                if attempt + 1 == ATTEMPTS:
                    raise
                continue
            except StoreUnavailable as error:
                self._undo(record, scope, error)
                raise
            if isinstance(answer, Acquired):
                record.held(sent + ttl - drift_margin(ttl))
                self._see_it_watched(record, scope, sent)
                return Lease(
                    record, answer.token, self._clock, self, owner=scope.owner, task=scope.task, task_id=scope.task_id,
                    rank_us=answer.rank_us, seed=answer.seed, after_crash=answer.after_crash,
                )  # fmt: skip
            if isinstance(answer, Parked | Duplicate | Used | Unknown):
                # Publish before the record is cleared. If this process dies first, the watchdog gets the grant.
                self._publish_grant(name, answer)
            self._forget(record, scope)
            if not isinstance(answer, Tombstoned):
                return answer
        raise StoreUnavailable(f"the lock store refused {ATTEMPTS} acquisitions of {name} in a row")

    def _take_back(self, record: LeaseRecord, scope: OwnerContext, error: ReplyLost) -> None:
        """Roll back an acquire of unknown outcome, so that it takes effect neither now nor later."""
        if isinstance(error, ReplyTimeout):
            raise error  # the watchdog rolls it back: the caller must not wait for a second timeout
        self._undo(record, scope, error)

    def _see_it_watched(self, record: LeaseRecord, scope: OwnerContext, now: float) -> None:
        """Release the lock if no watchdog can be started. Log an error if the watchdog has not scanned lately."""
        if not self._wake():
            self._give_back(record, scope)
            raise StoreNotReady(f"{record.name} is not taken: the thread that renews leases cannot be started")
        looked_at = self._lease_table.scanned_at
        unwatched = 0 < looked_at < now - UNWATCHED
        if unwatched and not self._warned:
            logger.error(
                "%s: the watchdog has not looked at the leases of this process for %.0f s; unless it does, this lease "
                "is not renewed and ends in %.0f s",
                record.name, now - looked_at, record.ttl,
            )  # fmt: skip
        self._warned = unwatched

    def _undo(self, record: LeaseRecord, scope: OwnerContext, error: StoreUnavailable) -> None:
        if isinstance(error, ReplyLost | NotConfirmed):  # other errors: the store executed nothing
            self._give_back(record, scope)
        else:
            self._forget(record, scope)

    def _give_back(self, record: LeaseRecord, scope: OwnerContext) -> None:
        name, part = record.name, self._store.shard(record.name)
        released = self._breaker.call(self._store.release, name, record.acquisition, scope.rollback, part=part)
        self._publish_grant(record.name, released)
        self._forget(record, scope)

    def _publish_grant(self, name: LockName, answer: Released | Parked | Duplicate | Used | Unknown) -> None:
        if answer.granted:
            self._publisher(name, answer.granted)

    def _forget(self, record: LeaseRecord, scope: OwnerContext) -> None:
        record.clear()
        scope.open_acquisitions.discard(record.acquisition)

    def _used_before(self, name: LockName, held: Lease, claim: AcquireRequest) -> Used | None:
        """Return the earlier successful run of the name (``once_per``), nested or not; None if there is none."""
        if held.inner_use is not None and held.inner_use.tick == claim.tick:
            by = Requester(*json.loads(held.inner_use.requester))
            return Used(Holder(by.task, by.task_id, by.node, int(by.pid), self._clock.wall()), same_message=False)
        use = self._store.last_run(name, claim.tick)
        if use is None or use.state != "used":
            return None
        return Used(Holder(use.task, use.task_id, use.node, None, use.since), same_message=False)

    def _enter_again(self, lease: Lease, scope: OwnerContext) -> Lease:
        # Send the absolute count: if an increment were sent twice, it would count twice.
        if lease.lost or not self.renew(lease, lease.ttl, (("count", str(lease.hold_count + 1)),)):
            raise LockLost(f"the lease of {lease.name} is over; it cannot be entered again")
        # Keep this order. If an exception interrupts it, the lock is released too early instead of never.
        scope.entered.append(lease)
        lease.hold_count += 1
        return lease

    def _restated(self, lease: Lease) -> bool:
        """Store the lower hold count. If the store does not answer, its count stays too high until the release."""
        try:
            return self.renew(lease, lease.ttl, (("count", str(lease.hold_count)),))
        except StoreUnavailable:
            return True

    def _free(self, lease: Lease, scope: OwnerContext, ending: ReleaseRequest) -> bool:
        try:
            if not lease.record.begin_release():
                return True  # an earlier attempt was interrupted: the watchdog releases the lock, or has released it
            part = self._store.shard(lease.lock_name)
            if scope.delivered:
                self._breaker.before_call(part)  # otherwise, each body would wait for a dead store's timeout
            released = self._breaker.call(
                self._store.release, lease.lock_name, lease.acquisition, ending, lease.record.durability, part=part
            )
            # Publish first: a crash after the acknowledgement, or after the record is cleared, would lose the grant.
            self._publish_grant(lease.record.name, released)
        except BaseException as error:
            lease.record.delegate_release(ending.text)
            self._wake()
            if isinstance(error, StoreUnavailable):
                logger.warning("could not release %s, the watchdog will retry it: %s", lease.name, error)
                return True
            raise
        lease.record.clear()
        return released.ours

    def _tell(self, kind: Kind, lease: Lease, reason: str = "") -> None:
        if self._listeners.wants(kind):
            facts = {"task": lease.task, "task_id": lease.task_id, "token": lease.token, "reason": reason}
            self._listeners.emit(kind, name=lease.name, owner=lease.owner, **facts)
