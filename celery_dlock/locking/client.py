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


#: Attempts of one acquire. Each one after a lost reply has an acquisition number of its own.
ATTEMPTS = 2
#: Upper limits, in seconds, of the random delays between votes that gave no owner a majority (Redlock).
VOTES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5)
#: Seconds between two polls of a waiter that gets no release notification.
POLL = 2.0
#: Maximum number of waiters that a listing names.
NAMED = 100
#: Seconds without a scan by the watchdog after which an acquire warns. Longer than its longest round.
UNWATCHED = 10.0


class LockClient:
    """Acquires and releases locks for the owners of one process.

    Args:
        store: The lock store.
        slots: The lease table of this process. Each acquisition is recorded there before its command is sent.
        wake: Starts the watchdog if it does not run; returns false if it cannot be started.
        clock: The clock of all deadlines.
        listeners: The receivers of events.
        hand_over: Publishes the message of a granted waiter. Never raises because of the broker.
        breaker: The circuit breaker. If it is open, a delivered message skips the store, because it can be
            republished. A ``Lock`` always calls the store, because its caller has no other attempt.
    """

    def __init__(
        self,
        store: QueueStore,
        slots: LeaseTable,
        wake: Callable[[], bool],
        clock: Clock,
        listeners: Listeners,
        hand_over: Callable[[LockName, Grant], object] = lambda name, grant: None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._store = store
        self._slots = slots
        self._wake = wake
        self._clock = clock
        self._listeners = listeners
        self._hand_over = hand_over
        self._breaker = breaker or CircuitBreaker(shared_words(), clock, 0, 0)
        self._warned = False

    def acquire(self, name: LockName, scope: OwnerContext, ttl: float, claim: AcquireRequest) -> Lease | Refusal:
        """Take the lock, or return why it was refused. An owner that holds the lock re-enters it.

        Raises:
            LockLost: The owner held the lock, and its lease is over. An inner entry never acquires anew.
            StoreUnavailable: The store did not answer, or the watchdog cannot be started to renew the lease. If the
                store took the lock, the watchdog releases it.
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
        """Acquire the lock, and wait for a release if it is held.

        A release wakes the waiter. The slow poll covers holders that died and notifications that were lost.

        Args:
            name: The lock name.
            scope: The context of the owner.
            ttl: The lease duration in seconds.
            claim: The request to the store.
            timeout: Seconds to wait at most; None: for ever.
            leaving: Wait only for a holder that announced its release. Do not wait for a later holder, nor for the
                retry that the lock is reserved for.
        """
        answer = self.acquire(name, scope, ttl, claim)
        if not isinstance(answer, Held) or (timeout is not None and timeout <= 0):
            return answer
        end = None if timeout is None else self._clock.monotonic() + timeout
        with self._store.release_listener(name) as waker:
            while True:
                # Keep the rank of the first attempt. Else the waiter would lose its place at each poll.
                claim = claim._replace(rank_us=answer.rank_us, notify=True)
                answer = self.acquire(name, scope, ttl, claim)
                left = POLL if end is None else end - self._clock.monotonic()
                if not isinstance(answer, Held) or left <= 0 or (leaving and not answer.holder.releasing):
                    return answer
                waker.wait(min(left, POLL, answer.holder.expires_in + 0.005))

    def release(self, lease: Lease, scope: OwnerContext, ending: ReleaseRequest = ReleaseRequest()) -> bool:  # noqa: B008  # frozen
        """Leave a lease once. The outermost exit releases the lock.

        Never raises because of the store: a failed release must not fail a task that is done. The watchdog repeats
        a release that the store did not answer.

        Returns:
            False if the lease was lost before.
        """
        if lease.over or lease.pid != os.getpid():
            scope.drop(lease)
            return True  # released by an earlier exit hook, or this is a fork of the body, which must not release
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
        # Drop the lease last. If an exception interrupts this method, the next exit hook must find the lease and retry.
        scope.drop(lease)
        if lost:
            logger.warning("the work under %s has ended; its lease was lost before", lease.name)
        if ours:
            self._tell("released", lease, "its lease was lost before" if lost else "")
        return ours and not lost

    def delegate_release(self, scope: OwnerContext) -> None:
        """Delegate to the watchdog the release of acquisitions that were interrupted.

        A soft time limit, another signal's exception or the kill of a greenlet can interrupt any step of an acquire.
        Blocking signals does not help. A signal mask belongs to one thread, but Python raises in the main thread.
        """
        for acquisition in scope.open_acquisitions - {lease.acquisition for lease in scope.entered}:
            slot = self._slots.find(acquisition)
            if slot is not None and slot.state is not LeaseState.RELEASE_DELEGATED:
                slot.delegate_release(scope.rollback.text)
            for key in [key for key, lease in scope.held.items() if lease.acquisition == acquisition]:
                del scope.held[key]
            scope.open_acquisitions.discard(acquisition)
        self._wake()

    def announce_release(self, lease: Lease, reserved_for: str = "") -> None:
        """Record in the lock that the body has ended, before the next message is published.

        Args:
            lease: The lease of the body.
            reserved_for: The identity of the retry that may take the lock meanwhile; "" for none.
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
        """Move the deadline now, in addition to the renewals of the watchdog."""
        sent = self._clock.monotonic()
        if 0 < lease.record.max_hold_until <= sent:
            self.lose(lease, "it was held for as long as max_hold allows")
            return False
        renewal = Renewal(
            lease.lock_name, lease.acquisition, max(1, round(seconds * 1000)), notes, lease.record.durability
        )
        # A reply after the lease's end is of no use to the caller.
        within = max(0.001, lease.remaining() - loss_grace(lease.ttl))
        part = self._store.shard(lease.lock_name)
        renew = functools.partial(self._breaker.call, self._store.renew, part=part)
        # Repeat here and not in the store: the watchdog needs no repetition, its next tick is one.
        (renewed,) = call_again_if_reply_lost(renew, [renewal], within)
        if renewed is None:
            raise StoreNotReady(f"the renewal of {lease.name} was not confirmed by all that keep it")
        if renewed:
            lease.record.renewed(sent + seconds - drift_margin(seconds))
        else:
            self.lose(lease, "the store no longer knows it")
        return renewed

    def lose(self, lease: Lease, reason: str) -> None:
        """Mark a lease as lost and report it, once."""
        if not lease.lost and not lease.over:
            lease.record.lose()
            logger.warning("the lease of %s is lost: %s", lease.name, reason)
            self._tell("lost", lease, reason)

    def held(self, name: LockName, scope: OwnerContext) -> Lease | None:
        """Return the lease under which this owner entered the lock."""
        lease = scope.held.get((id(self), name))
        return lease if lease in scope.entered else None

    def holder(self, name: LockName) -> Holder | None:
        """Return the current holder of the lock."""
        return self._store.inspect(name)

    def waiting(self, name: LockName) -> Waiting:
        """Return the waiters of the lock under the queue policy."""
        return self._store.list_waiters(name, NAMED)

    def _vote_again(
        self, name: LockName, scope: OwnerContext, ttl: float, claim: AcquireRequest, part: int
    ) -> Lease | Refusal:
        for window in VOTES:
            # Other owners voted at the same moment. After a random delay, one of them gets a majority.
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
            slot = self._slots.open(name, acquisition, ttl, claim.durability)
            sent = self._clock.monotonic()
            try:
                answer = self._breaker.call(self._store.acquire, name, acquisition, round(ttl * 1000), claim, part=part)
            except ReplyLost as error:
                self._take_back(slot, scope, error)
                # A duplicate delivery may have met this acquisition; its mark is gone with the rollback.
                claim = claim._replace(republished=True)
                if attempt + 1 == ATTEMPTS:
                    raise
                continue
            except StoreUnavailable as error:
                self._undo(slot, scope, error)
                raise
            if isinstance(answer, Acquired):
                slot.held(sent + ttl - drift_margin(ttl))
                self._see_it_watched(slot, scope, sent)
                return Lease(
                    slot, answer.token, self._clock, self, owner=scope.owner, task=scope.task, task_id=scope.task_id,
                    rank_us=answer.rank_us, seed=answer.seed, after_crash=answer.after_crash,
                )  # fmt: skip
            if isinstance(answer, Parked | Duplicate | Used | Unknown):
                # Publish before the record is cleared. If this process dies now, the watchdog finds the grant.
                self._publish_grant(name, answer)
            self._forget(slot, scope)
            if not isinstance(answer, Tombstoned):
                return answer
        raise StoreUnavailable(f"the lock store refused {ATTEMPTS} acquisitions of {name} in a row")

    def _take_back(self, slot: LeaseRecord, scope: OwnerContext, error: ReplyLost) -> None:
        """Make sure that an acquire of unknown outcome takes effect neither now nor later."""
        if isinstance(error, ReplyTimeout):
            raise error  # the watchdog rolls it back: the caller has waited for one timeout already
        self._undo(slot, scope, error)

    def _see_it_watched(self, slot: LeaseRecord, scope: OwnerContext, now: float) -> None:
        """Release the lock if no watchdog can renew it. Log if the watchdog has not scanned the leases lately."""
        if not self._wake():
            self._give_back(slot, scope)
            raise StoreNotReady(f"{slot.name} is not taken: the thread that renews leases cannot be started")
        looked_at = self._slots.scanned_at
        unwatched = 0 < looked_at < now - UNWATCHED
        if unwatched and not self._warned:
            logger.error(
                "%s: the watchdog has not looked at the leases of this process for %.0f s; unless it does, this lease "
                "is not renewed and ends in %.0f s",
                slot.name, now - looked_at, slot.ttl,
            )  # fmt: skip
        self._warned = unwatched

    def _undo(self, slot: LeaseRecord, scope: OwnerContext, error: StoreUnavailable) -> None:
        if isinstance(error, ReplyLost | NotConfirmed):  # after other errors, the store has carried out nothing
            self._give_back(slot, scope)
        else:
            self._forget(slot, scope)

    def _give_back(self, slot: LeaseRecord, scope: OwnerContext) -> None:
        name, part = slot.name, self._store.shard(slot.name)
        undone = self._breaker.call(self._store.release, name, slot.acquisition, scope.rollback, part=part)
        self._publish_grant(slot.name, undone)
        self._forget(slot, scope)

    def _publish_grant(self, name: LockName, answer: Released | Parked | Duplicate | Used | Unknown) -> None:
        if answer.granted:
            self._hand_over(name, answer.granted)

    def _forget(self, slot: LeaseRecord, scope: OwnerContext) -> None:
        slot.clear()
        scope.open_acquisitions.discard(slot.acquisition)

    def _used_before(self, name: LockName, held: Lease, claim: AcquireRequest) -> Used | None:
        """Return the run that used the name before: an inner run of this lease, or an earlier one."""
        if held.inner_use is not None and held.inner_use.tick == claim.tick:
            by = Requester(*json.loads(held.inner_use.requester))
            return Used(Holder(by.task, by.task_id, by.node, int(by.pid), self._clock.wall()), same_message=False)
        use = self._store.last_run(name, claim.tick)
        if use is None or use.state != "used":
            return None
        return Used(Holder(use.task, use.task_id, use.node, None, use.since), same_message=False)

    def _enter_again(self, lease: Lease, scope: OwnerContext) -> Lease:
        # Store the absolute count: an increment that is sent twice would count twice.
        if lease.lost or not self.renew(lease, lease.ttl, (("count", str(lease.hold_count + 1)),)):
            raise LockLost(f"the lease of {lease.name} is over; it cannot be entered again")
        # Keep this order. An interrupted entry must be released too early rather than never.
        scope.entered.append(lease)
        lease.hold_count += 1
        return lease

    def _restated(self, lease: Lease) -> bool:
        """Store the lower hold count. If the store does not answer, the outermost release corrects it."""
        try:
            return self.renew(lease, lease.ttl, (("count", str(lease.hold_count)),))
        except StoreUnavailable:
            return True

    def _free(self, lease: Lease, scope: OwnerContext, ending: ReleaseRequest) -> bool:
        try:
            if not lease.record.begin_release():
                return True  # an interrupted release: the watchdog does it, or has done it
            part = self._store.shard(lease.lock_name)
            if scope.delivered:
                self._breaker.before_call(part)  # else each body would end with the timeout of a dead store
            released = self._breaker.call(
                self._store.release, lease.lock_name, lease.acquisition, ending, lease.record.durability, part=part
            )
            # Publish before the releaser's message is acknowledged and before its record is cleared.
            self._publish_grant(lease.record.name, released)
        except BaseException as error:
            lease.record.delegate_release(ending.text)
            self._wake()
            if isinstance(error, StoreUnavailable):
                logger.warning(
                    "could not release %s, the watchdog retries it until the store answers: %s", lease.name, error
                )
                return True
            raise
        lease.record.clear()
        return released.ours

    def _tell(self, kind: Kind, lease: Lease, reason: str = "") -> None:
        if self._listeners.wants(kind):
            facts = {"task": lease.task, "task_id": lease.task_id, "token": lease.token, "reason": reason}
            self._listeners.emit(kind, name=lease.name, owner=lease.owner, **facts)
