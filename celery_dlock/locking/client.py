"""The story of a lock in order: name, store, lease, keeper, events."""

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


#: Tries under a new number after an answer was lost.
ATTEMPTS = 2
#: Seconds, at random up to so many, between the votes on a lock that no majority of several servers gave to anybody.
VOTES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5)
#: Seconds between two looks of a waiter whom nobody wakes.
POLL = 2.0
#: How many waiters are named, at most.
NAMED = 100
#: Seconds without a look of the watchdog after which an acquire warns; longer than its longest round.
UNWATCHED = 10.0


class LockClient:
    """Takes and gives back locks for the owners of one process.

    Args:
        store: Where locks live.
        slots: The slots of this process; what is held is written there before it is asked for.
        wake: Makes sure that a watchdog reads those slots; false if none can be started.
        clock: Where deadlines are read.
        listeners: Whom to tell.
        hand_over: Publishes the message of a waiter whose turn it is; never raises for the broker's sake.
        breaker: Knows whether the store answers. Messages can come back, so they do not ask one that does not; a
            ``Lock`` always asks, because who called it has nothing else.
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
        """Take the lock or say why not; an owner that holds it re-enters.

        Raises:
            LockLost: The owner held the lock, and its lease is over: an inner entry never acquires anew.
            StoreUnavailable: The store did not answer; if it took the lock, the keeper gives it back. Or the watchdog
                cannot be started, so the lease would not be renewed.
        """
        held = scope.held.get((id(self), name))
        try:
            if held is not None:
                earlier = self._used_before(name, held, claim) if claim.once else None
                if earlier is None and claim.once and not held.seed:
                    held.seed = str(held.token)  # it was taken without a mark, and so without a seed that lasts
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
        """As :meth:`acquire`, but wait for a release, at most ``timeout`` s (None: for ever).

        A waiter is woken by the release; the slow poll is for holders that died and for messages that got lost.

        Args:
            name: Of the lock.
            scope: Of the owner.
            ttl: In seconds.
            claim: What the store needs to know.
            timeout: How long.
            leaving: Only for a holder that has said that it is about to release: not for whoever got it after that,
                nor for the retry for which it was kept.
        """
        answer = self.acquire(name, scope, ttl, claim)
        if not isinstance(answer, Held) or (timeout is not None and timeout <= 0):
            return answer
        end = None if timeout is None else self._clock.monotonic() + timeout
        with self._store.release_listener(name) as waker:
            while True:
                # Its rank is that of its arrival, however often it asks.
                claim = claim._replace(rank_us=answer.rank_us, notify=True)
                answer = self.acquire(name, scope, ttl, claim)
                left = POLL if end is None else end - self._clock.monotonic()
                if not isinstance(answer, Held) or left <= 0 or (leaving and not answer.holder.releasing):
                    return answer
                waker.wait(min(left, POLL, answer.holder.expires_in + 0.005))

    def release(self, lease: Lease, scope: OwnerContext, ending: ReleaseRequest = ReleaseRequest()) -> bool:  # noqa: B008  # frozen
        """Leave a lease once; its outermost leaving frees the lock. False if the lease turned out to be lost.

        Never raises for the store's sake: a failed release must not fail a task that is done. What the store did
        not hear of the keeper repeats.
        """
        if lease.over or lease.pid != os.getpid():
            scope.drop(lease)
            return True  # a second door, or a process that the body forked: the lock is not its to free
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
        # Only now: who is interrupted before this comes back, through another door, and finds the work undone.
        scope.drop(lease)
        if lost:
            logger.warning("the work under %s has ended; its lease was lost before", lease.name)
        if ours:
            self._tell("released", lease, "its lease was lost before" if lost else "")
        return ours and not lost

    def delegate_release(self, scope: OwnerContext) -> None:
        """Leave to the keeper what this scope began, and neither ended nor holds on record.

        A soft limit, another signal's exception or a greenlet's kill can strike between any two steps here. Blocking
        the signals instead does not help: a mask is one thread's, and Python raises in the main thread whichever
        thread the kernel chose.
        """
        for acquisition in scope.open_acquisitions - {lease.acquisition for lease in scope.entered}:
            slot = self._slots.find(acquisition)
            if slot is not None and slot.state is not LeaseState.RELEASE_DELEGATED:
                slot.delegate_release(scope.rollback.text)
            for key in [key for key, lease in scope.held.items() if lease.acquisition == acquisition]:
                del scope.held[key]
            scope.open_acquisitions.discard(acquisition)
        self._wake()

    def announce_release(self, lease: Lease, heir: str = "") -> None:
        """Say that the body has ended, before a follower of the message is published.

        Args:
            lease: Whose body it was.
            heir: The identity of its retry, which is no rival; "" for none.
        """
        if not lease.releasing and not lease.over and lease.pid == os.getpid():
            lease.releasing = True
            try:
                self.renew(lease, lease.ttl, (("releasing", "1"), *((("reserved_for", heir),) if heir else ())))
            except StoreUnavailable as error:
                logger.warning("could not say that %s is about to be released: %s", lease.name, error)

    def renew(self, lease: Lease, seconds: float, notes: tuple[tuple[str, str], ...] = ()) -> bool:
        """Move the deadline now, beside the keeper's renewals."""
        sent = self._clock.monotonic()
        if 0 < lease.record.max_hold_until <= sent:
            self.lose(lease, "it was held for as long as max_hold allows")
            return False
        renewal = Renewal(
            lease.lock_name, lease.acquisition, max(1, round(seconds * 1000)), notes, lease.record.durability
        )
        # An answer that comes after the lease's end is too late for whoever asked whether it lives.
        within = max(0.001, lease.remaining() - loss_grace(lease.ttl))
        part = self._store.shard(lease.lock_name)
        renew = functools.partial(self._breaker.call, self._store.renew, part=part)
        # Here, not in the store: the watchdog's next tick is its second try.
        (renewed,) = call_again_if_reply_lost(renew, [renewal], within)
        if renewed is None:
            raise StoreNotReady(f"the renewal of {lease.name} was not confirmed by all that keep it")
        if renewed:
            lease.record.renewed(sent + seconds - drift_margin(seconds))
        else:
            self.lose(lease, "the store no longer knows it")
        return renewed

    def lose(self, lease: Lease, reason: str) -> None:
        """Note, and tell once, that a lease is over although its holder has not released it."""
        if not lease.lost and not lease.over:
            lease.record.lose()
            logger.warning("the lease of %s is lost: %s", lease.name, reason)
            self._tell("lost", lease, reason)

    def held(self, name: LockName, scope: OwnerContext) -> Lease | None:
        """The lease under which this scope entered the lock."""
        lease = scope.held.get((id(self), name))
        return lease if lease in scope.entered else None

    def holder(self, name: LockName) -> Holder | None:
        """Who holds the lock now."""
        return self._store.inspect(name)

    def waiting(self, name: LockName) -> Waiting:
        """Who waits for the lock under the queue policy."""
        return self._store.list_waiters(name, NAMED)

    def _vote_again(
        self, name: LockName, scope: OwnerContext, ttl: float, claim: AcquireRequest, part: int
    ) -> Lease | Refusal:
        for window in VOTES:
            # Others asked at the same moment; who comes back at another one finds a majority, or gets it.
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
            # Written first: whoever dies between here and the answer leaves a trace for the keeper.
            slot = self._slots.open(name, acquisition, ttl, claim.durability)
            sent = self._clock.monotonic()
            try:
                answer = self._breaker.call(self._store.acquire, name, acquisition, round(ttl * 1000), claim, part=part)
            except ReplyLost as error:
                self._take_back(slot, scope, error)
                # A twin may have met it and left word, which went with it.
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
                    slot,
                    answer.token,
                    self._clock,
                    self,
                    owner=scope.owner,
                    task=scope.task,
                    task_id=scope.task_id,
                    rank_us=answer.rank_us,
                    seed=answer.seed,
                    after_crash=answer.after_crash,
                )
            if isinstance(answer, Parked | Duplicate | Used | Unknown):
                # While the slot still stands: should this process die now, the keeper finds the grant.
                self._pass_on(name, answer)
            self._forget(slot, scope)
            if not isinstance(answer, Tombstoned):
                return answer
        raise StoreUnavailable(f"the lock store refused {ATTEMPTS} acquisitions of {name} in a row")

    def _take_back(self, slot: LeaseRecord, scope: OwnerContext, error: ReplyLost) -> None:
        """Make sure that an acquire of unknown outcome takes effect neither now nor later."""
        if isinstance(error, ReplyTimeout):
            raise error  # the keeper does it: who asks has waited long enough
        self._undo(slot, scope, error)

    def _see_it_watched(self, slot: LeaseRecord, scope: OwnerContext, now: float) -> None:
        """Give the lock back if no watchdog can renew it; log if the watchdog has not looked lately."""
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
        if isinstance(error, ReplyLost | NotConfirmed):  # of any other the store has carried out nothing
            self._give_back(slot, scope)
        else:
            self._forget(slot, scope)

    def _give_back(self, slot: LeaseRecord, scope: OwnerContext) -> None:
        name, part = slot.name, self._store.shard(slot.name)
        undone = self._breaker.call(self._store.release, name, slot.acquisition, scope.rollback, part=part)
        self._pass_on(slot.name, undone)
        self._forget(slot, scope)

    def _pass_on(self, name: LockName, answer: Released | Parked | Duplicate | Used | Unknown) -> None:
        if answer.granted:
            self._hand_over(name, answer.granted)

    def _forget(self, slot: LeaseRecord, scope: OwnerContext) -> None:
        slot.clear()
        scope.open_acquisitions.discard(slot.acquisition)

    def _used_before(self, name: LockName, held: Lease, claim: AcquireRequest) -> Used | None:
        """Who used the name that is entered once more: an inner run just now, or one before."""
        if held.inner_use is not None and held.inner_use.tick == claim.tick:
            by = Requester(*json.loads(held.inner_use.requester))
            return Used(Holder(by.task, by.task_id, by.node, int(by.pid), self._clock.wall()), same_message=False)
        use = self._store.last_run(name, claim.tick)
        if use is None or use.state != "used":
            return None
        return Used(Holder(use.task, use.task_id, use.node, None, use.since), same_message=False)

    def _enter_again(self, lease: Lease, scope: OwnerContext) -> Lease:
        # The count is stated absolutely: an increment would count twice when it is sent twice.
        if lease.lost or not self.renew(lease, lease.ttl, (("count", str(lease.hold_count + 1)),)):
            raise LockLost(f"the lease of {lease.name} is over; it cannot be entered again")
        # In this order: an entry that is on record and was not counted ends too early, one only counted never ends.
        scope.entered.append(lease)
        lease.hold_count += 1
        return lease

    def _restated(self, lease: Lease) -> bool:
        """Tell the store of an inner leaving; what it does not hear of, the outermost leaving makes good."""
        try:
            return self.renew(lease, lease.ttl, (("count", str(lease.hold_count)),))
        except StoreUnavailable:
            return True

    def _free(self, lease: Lease, scope: OwnerContext, ending: ReleaseRequest) -> bool:
        try:
            if not lease.record.begin_release():
                return True  # an interrupted release: the keeper has it, or had it
            part = self._store.shard(lease.lock_name)
            if scope.delivered:
                self._breaker.before_call(part)  # else each body that ends would wait for a dead store's timeout
            released = self._breaker.call(
                self._store.release, lease.lock_name, lease.acquisition, ending, lease.record.durability, part=part
            )
            # Before the releaser's own message is acknowledged, and before its slot forgets it.
            self._pass_on(lease.record.name, released)
        except BaseException as error:
            lease.record.delegate_release(ending.text)
            self._wake()
            if isinstance(error, StoreUnavailable):
                logger.warning("could not release %s, the keeper will: %s", lease.name, error)
                return True
            raise
        lease.record.clear()
        return released.ours

    def _tell(self, kind: Kind, lease: Lease, reason: str = "") -> None:
        if self._listeners.wants(kind):
            facts = {"task": lease.task, "task_id": lease.task_id, "token": lease.token, "reason": reason}
            self._listeners.emit(kind, name=lease.name, owner=lease.owner, **facts)
