"""The lock client: acquires, re-enters, renews and releases locks for the owners of one process."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..counters.recorder import Recorder
from ..errors import (
    LockLost,
    NotConfirmed,
    ReplyLost,
    ReplyTimeout,
    ScriptStopped,
    StoreNotReady,
    StoreRefused,
    StoreUnavailable,
)
from ..keys.lock_name import LockName
from ..store.base import LineListener, LockStore, ReleaseRequest, call_again_if_reply_lost
from ..store.circuit_breaker import CircuitBreaker, shared_states
from ..store.holder_model import Holder
from ..store.model import (
    Acquired,
    AcquireRequest,
    Contended,
    Duplicate,
    Grant,
    Held,
    Parked,
    Queued,
    Refusal,
    Renewal,
    Requester,
    StopRequest,
    Tombstoned,
    Unknown,
    Used,
)
from ..store.operator_model import Waiting
from ..utils.clock import Clock
from ..utils.log import logger
from .events import FORGOTTEN, MAX_HOLD_OVER, Kind, Listeners, Loss, LossCause
from .lease import Lease, drift_margin, loss_grace
from .lease_table import LeaseRecord, LeaseState, LeaseTable
from .owner import OwnerContext
from .waiting import Line, RecentWake

__all__ = ["LockClient"]

#: Attempts per acquire. Each attempt has a new acquisition number.
ATTEMPTS = 2
#: Seconds without a scan by the watchdog after which an acquire logs an error. Longer than any round of it.
UNWATCHED = 10.0
#: Maximum number of waiters in a listing.
NAMED = 100


class LockClient:
    """The lock client of one process. All its owners share it.

    Args:
        store: The lock store.
        lease_table: The lease table of this process. An acquisition is recorded there before its command is sent.
        clock: The clock of all deadlines.
        listeners: The receivers of events.
        publish_grant: Publishes the message of a granted waiter. Never raises because of the broker.
        breaker: The circuit breaker. If the breaker is open, a delivered message does not call the store: the message
            can be republished. A ``Lock`` always calls the store, because its caller has no other attempt.
        recorder: Counts for the metrics; None while they are off.
    """

    def __init__(
        self,
        store: LockStore,
        lease_table: LeaseTable,
        clock: Clock,
        listeners: Listeners,
        publish_grant: Callable[[LockName, Grant], object] = lambda name, grant: None,
        breaker: CircuitBreaker | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._store = store
        self._has_shards = store.clustered
        self._lease_table = lease_table
        self._clock = clock
        self._listeners = listeners
        self._publisher = publish_grant
        self._breaker = breaker or CircuitBreaker(shared_states(), clock, 0, 0)
        self._recent_wake = RecentWake(clock)
        self._recorder = recorder
        if recorder is not None:
            self._breaker.time_next(2, recorder.store_took)
        #: Whether the error was logged that no watchdog looks at the lease table. It is logged again only after a scan.
        self._unwatched = False

    def acquire(self, name: LockName, context: OwnerContext, ttl: float, request: AcquireRequest) -> Lease | Refusal:
        """Take the lock, or return why it was refused. An owner that holds the lock re-enters it.

        Raises:
            LockLost: The owner held the lock, and its lease is over. A nested entry never acquires the lock anew.
            StoreUnavailable: The store did not answer, or the watchdog cannot be started. A lock that was taken
                nevertheless is released.
        """
        held = context.lease_of(self, name) if context.held else None
        try:
            if held is not None:
                return self._enter_again(held, name, context, request)
            shard = self._store.shard(name) if self._has_shards else 0
            if self._breaker.failed_at[shard] and context.delivered and request.identity is not None:
                self._breaker.before_call(shard)
            answer = self._ask(name, context, ttl, request, shard)
            if isinstance(answer, Contended):
                answer = self._ask_again(name, context, ttl, request, shard, answer.pauses)
        except BaseException:
            self.delegate_release(context)
            raise
        if isinstance(answer, Lease):
            self._report_acquired(answer)
        return answer

    def acquire_within(
        self,
        name: LockName,
        context: OwnerContext,
        ttl: float,
        request: AcquireRequest,
        timeout: float | None,
        *,
        while_releasing: bool = False,
        refused: Refusal | None = None,
    ) -> Lease | Refusal:
        """Acquire the lock. If it is held, wait at most ``timeout`` seconds for its release; None: without limit.

        A release wakes the caller that has waited for the longest time. With ``while_releasing``, wait only for a
        holder that has announced its release. ``refused``: the answer of an earlier acquire that set ``notify``.
        """
        if timeout is not None and timeout <= 0:
            return refused or self.acquire(name, context, ttl, request)
        if not request.notify:
            request = request._replace(notify=True)
        entered = context.lease_of(self, name) is not None
        joins = not (refused or while_releasing or entered) and self._recent_wake.joins_line(name)
        answer = None if joins else refused or self.acquire(name, context, ttl, request)
        if answer is not None and not (isinstance(answer, Held | Queued) and answer.awaited):
            return answer
        ask = functools.partial(self.acquire, name, context, ttl)
        listener = self._store.release_listener(name)
        wait = (
            functools.partial(self._wait_in_line, name, context, ttl, listener)
            if isinstance(listener, LineListener)
            else None
        )
        line = Line(name, ask, listener, self._clock, self._recent_wake, wait)
        began = self._clock.monotonic()
        answer = line.wait(request, answer, timeout, while_releasing=while_releasing)
        if self._recorder is not None and isinstance(answer, Lease):
            self._recorder.waited(answer.task, self._clock.monotonic() - began, conflict=not while_releasing)
        return answer

    def release(self, lease: Lease, context: OwnerContext, ending: ReleaseRequest = ReleaseRequest()) -> bool:  # noqa: B008  # frozen
        """Leave a lease once; the outermost exit releases the lock. Return false if the lease was lost before.

        Never raises because of the store: a failed release must not fail a task that is done. If the store does not
        answer, the watchdog repeats the release.
        """
        if lease.over or lease.pid != os.getpid():
            context.drop(lease)
            return True  # an earlier exit hook released it, or the body forked this process, which must not release it
        if lease.hold_count > 1:
            return self._leave_entry(lease, context, ending)
        if lease.inner_use is not None:
            ending = _with_use(ending, lease.inner_use)
        lost = lease.record.lost
        ours = self._free(lease, context, ending)
        context.held.pop((self, lease.lock_name), None)
        context.open_acquisitions.pop(lease.record.acquisition, None)
        if not ours:
            self.lose(lease, Loss(LossCause.FORGOTTEN, "found at its release"))
        lease.over = True
        # Drop the lease last. If an exception interrupts this method, the next exit hook must find it and retry.
        context.drop(lease)
        if lost:
            logger.warning("the work under %s has ended; its lease was lost before", lease.name)
            self._listeners.after_loss(lease.name, lease.owner)
        if ours:
            self._report_release(lease, "its lease was lost before" if lost else "")
        return ours and not lost

    def delegate_release(self, context: OwnerContext) -> None:
        """Delegate the release of interrupted acquisitions to the watchdog.

        A soft time limit, another signal's exception or the kill of a greenlet can interrupt any step. To block the
        signals does not help: a signal mask covers one thread only. The system would deliver the signal to another
        thread, and Python would still run its handler in the main thread.
        """
        if context.pid != os.getpid():
            return  # the body forked this process, which must not release its parent's leases
        entered = {lease.acquisition for lease in context.entered}
        for acquisition, client in list(context.open_acquisitions.items()):
            if client is not self or acquisition in entered:
                continue
            record = self._lease_table.find(acquisition)
            if record is not None and record.state is not LeaseState.RELEASE_DELEGATED:
                record.delegate_release(context.rollback.text)
            for key in [key for key, lease in context.held.items() if lease.acquisition == acquisition]:
                del context.held[key]
            context.open_acquisitions.pop(acquisition, None)
        self._lease_table.wake()

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
                logger.warning("cannot mark %s as about to be released: %s", lease.name, error)

    def guard(self, lease: Lease, connection: Any, settles: ReleaseRequest | None = None) -> bool:
        """Guard the open transaction of a connection of the user. Return false if the lease is over.

        ``settles``: the end of a run that succeeds, if its run mark is to commit with the transaction.
        """
        shard = self._store.shard(lease.lock_name)
        return self._breaker.call(
            self._store.guard, lease.lock_name, lease.acquisition, connection, settles, shard=shard
        )  # fmt: skip

    def renew(self, lease: Lease, seconds: float, notes: tuple[tuple[str, str], ...] = ()) -> bool:
        """Renew the lease now, in addition to the watchdog's renewals. Return false if the lease is over."""
        sent = self._clock.monotonic()
        if 0 < lease.record.max_hold_until <= sent:
            self.lose(lease, MAX_HOLD_OVER)
            return False
        renewal = Renewal(
            lease.lock_name, lease.acquisition, max(1, round(seconds * 1000)), fields=notes,
            stoppable=lease.stop_error is not None,
        )  # fmt: skip
        # A reply that comes after the lease's end is of no use to the caller.
        within = max(0.001, lease.remaining() - loss_grace(lease.ttl))
        shard = self._store.shard(lease.lock_name)
        renew = functools.partial(self._breaker.call, self._store.renew, shard=shard)
        # Repeat here, not in the store: the watchdog also calls the store, and repeats renewals in its next round.
        (renewed,) = call_again_if_reply_lost(renew, [renewal], within)
        if renewed is None:
            raise StoreNotReady(f"too few servers confirmed the renewal of {lease.name}")
        if renewed:
            lease.record.renewed(sent + seconds - drift_margin(seconds))
            if isinstance(renewed, StopRequest):
                lease.replaced_by = renewed.by
                lease.record.request_stop(renewed.by)
        else:
            self.lose(lease, FORGOTTEN)
        return bool(renewed)

    def lose(self, lease: Lease, reason: Loss) -> None:
        """Mark the lease as lost and report it, once."""
        if not lease.lost and not lease.over:
            lease.record.lose()
            logger.warning("the lease of %s is lost: %s", lease.name, reason.text)
            self._tell("lost", lease, reason.text)
            if self._recorder is not None:
                self._recorder.count("lost", lease.task, reason.cause.value)

    def held(self, name: LockName, context: OwnerContext) -> Lease | None:
        """Return the lease under which this owner has entered the lock; None if it has not."""
        lease = context.lease_of(self, name)
        return lease if lease in context.entered else None

    def holder(self, name: LockName) -> Holder | None:
        """Return the current holder of the lock; None if it is free."""
        return self._store.inspect(name)

    def waiting(self, name: LockName) -> Waiting:
        """Return the waiters of the lock under the queue policy."""
        return self._store.list_waiters(name, NAMED)

    def _ask_again(
        self,
        name: LockName,
        context: OwnerContext,
        ttl: float,
        request: AcquireRequest,
        shard: int,
        pauses: Iterable[float],
    ) -> Lease | Refusal:
        began = self._clock.monotonic()
        for pause in pauses:
            time.sleep(pause)
            answer = self._ask(name, context, ttl, self._aged(request, began), shard)
            if not isinstance(answer, Contended):
                return answer
        raise StoreNotReady(f"the lock store did not answer: several callers asked for {name} at once, and none got it")

    def _ask(
        self, name: LockName, context: OwnerContext, ttl: float, request: AcquireRequest, shard: int
    ) -> Lease | Refusal:
        for attempt in range(ATTEMPTS):
            acquisition = context.next_acquisition(self)
            # Record the acquisition first. If this process dies before the reply, the watchdog must find it.
            record = self._lease_table.open(name, acquisition, ttl)
            sent = self._clock.monotonic()
            try:
                answer = self._breaker.call(
                    self._store.acquire, name, acquisition, round(ttl * 1000), request, shard=shard
                )
            except StoreUnavailable as error:
                self._undo(record, context, error)
                if not isinstance(error, ReplyLost) or isinstance(error, ReplyTimeout) or attempt + 1 == ATTEMPTS:
                    raise
                # A duplicate delivery may have set ``dup`` in the lock that the rollback deleted: set it again.
                request = self._aged(request, sent)._replace(republished=True)
                continue
            if isinstance(answer, Acquired):
                return self._begin(record, context, answer, sent + ttl - drift_margin(ttl))
            self._forget_refused(record, context, answer)
            if not isinstance(answer, Tombstoned):
                return answer
        raise StoreUnavailable(f"the lock store dropped {ATTEMPTS} acquisitions of {name} in a row as abandoned")

    def _wait_in_line(
        self,
        name: LockName,
        context: OwnerContext,
        ttl: float,
        listener: LineListener,
        request: AcquireRequest,
        seconds: float,
    ) -> Lease | bool:
        """Wait for a release that transfers the lock. Return the lease, or whether a release may have woken this call.

        The circuit breaker does not time this call, because most of it is the wait.
        """
        acquisition = context.next_acquisition(self)
        record = self._lease_table.open(name, acquisition, ttl)
        sent = self._clock.monotonic()
        try:
            answer = listener.wait_in_line(acquisition, round(ttl * 1000), request, seconds)
            if isinstance(answer, bool):
                self._forget(record, context)
                return answer
            deadline = sent + answer.left - drift_margin(answer.left)
            if deadline <= self._clock.monotonic():
                self._give_back(record, context)  # this process was paused, and the lease is over
                return True
            lease = self._begin(record, context, answer.acquired, deadline)
        except StoreUnavailable as error:
            self._undo(record, context, error)
            raise
        except BaseException:
            self.delegate_release(context)
            raise
        self._report_acquired(lease)
        return lease

    def _begin(self, record: LeaseRecord, context: OwnerContext, acquired: Acquired, deadline: float) -> Lease:
        """Return the lease of a lock that was taken. The watchdog renews it from now on."""
        record.held(deadline)
        if not self._is_watched(record, self._clock.monotonic()):
            self._give_back(record, context)
            raise StoreNotReady(f"{record.name} is not taken: the thread that renews leases cannot be started")
        lease = Lease(record, acquired, self._clock, self, context)
        context.held[self, record.name] = lease
        context.entered.append(lease)
        return lease

    def _is_watched(self, record: LeaseRecord, now: float) -> bool:
        """Wake the watchdog and check its last scan. Return false if no watchdog can be started.

        Args:
            record: The lease that was just acquired.
            now: The time of its acquisition on the monotonic clock.
        """
        if not self._lease_table.wake():
            return False
        scanned_at = self._lease_table.scanned_at
        if not 0 < scanned_at < now - UNWATCHED:
            self._unwatched = False
        elif not self._unwatched:
            self._unwatched = True
            logger.error(
                "%s: the watchdog has not looked at the leases of this process for %.0f s; unless it does, this lease "
                "is not renewed and ends in %.0f s",
                record.name, now - scanned_at, record.ttl,
            )  # fmt: skip
        return True

    def _aged(self, request: AcquireRequest, since: float) -> AcquireRequest:
        """Return the request with the age that its message has now. A copy of it may have ended in the meantime."""
        return request._replace(age_us=request.age_us + round((self._clock.monotonic() - since) * 1e6))

    def _undo(self, record: LeaseRecord, context: OwnerContext, error: StoreUnavailable) -> None:
        """Release an acquisition whose acquire failed, so that a late acquire has no effect either."""
        if isinstance(error, ReplyTimeout):
            return  # the watchdog rolls it back: the caller must not wait for a second timeout
        if isinstance(error, ReplyLost | NotConfirmed):
            self._give_back(record, context)
            return
        if isinstance(error, ScriptStopped):
            # The script may have taken the lock before it stopped. If this is refused too, the lock ends after its ttl.
            with suppress(StoreRefused):
                self._give_back(record, context)
        self._forget(record, context)  # other errors: the store executed nothing

    def _give_back(self, record: LeaseRecord, context: OwnerContext) -> None:
        name, shard = record.name, self._store.shard(record.name)
        released = self._breaker.call(self._store.release, name, record.acquisition, context.rollback, shard=shard)
        if released.granted:
            self._publisher(name, released.granted)
        self._forget(record, context)

    def _forget_refused(self, record: LeaseRecord, context: OwnerContext, answer: Refusal) -> None:
        if isinstance(answer, Parked | Duplicate | Used | Unknown) and answer.granted:
            # Publish before clearing the record. If this process dies first, the watchdog publishes the grant.
            self._publisher(record.name, answer.granted)
        self._forget(record, context)

    def _forget(self, record: LeaseRecord, context: OwnerContext) -> None:
        record.clear()
        context.open_acquisitions.pop(record.acquisition, None)

    def _enter_again(
        self, lease: Lease, name: LockName, context: OwnerContext, request: AcquireRequest
    ) -> Lease | Used:
        if request.once:
            if earlier := self._used_before(name, lease, request):
                return earlier
            # If the lock was taken without once_per, it has no seed for the idempotency key of this entry.
            lease.seed = lease.seed or str(lease.token)
        # Send the absolute count: if an increment were sent twice, it would count twice.
        if lease.lost or not self.renew(lease, lease.ttl, (("count", str(lease.hold_count + 1)),)):
            raise LockLost(f"the lease of {lease.name} is over; it cannot be entered again")
        # Keep this order. If an exception comes between the two steps, the lock is released too early instead of never.
        context.entered.append(lease)
        lease.hold_count += 1
        return lease

    def _used_before(self, name: LockName, held: Lease, request: AcquireRequest) -> Used | None:
        """Return the earlier successful run of a name that its owner enters again; None if there is none."""
        if held.inner_use is not None and held.inner_use.tick == request.tick:
            by = Requester(*json.loads(held.inner_use.requester))
            return Used(Holder(by.task, by.task_id, by.node, int(by.pid), self._clock.wall()), same_message=False)
        use = self._store.last_run(name, request.tick)
        if use is None or use.state != "used":
            return None
        return Used(Holder(use.task or None, use.task_id or None, use.worker, None, use.since), same_message=False)

    def _leave_entry(self, lease: Lease, context: OwnerContext, ending: ReleaseRequest) -> bool:
        lease.hold_count -= 1
        lease.inner_use = lease.inner_use or (ending if ending.used_ms else None)
        context.drop(lease)
        try:
            return self.renew(lease, lease.ttl, (("count", str(lease.hold_count)),))
        except StoreUnavailable:
            return True  # the stored count stays too high until the release

    def _free(self, lease: Lease, context: OwnerContext, ending: ReleaseRequest) -> bool:
        record, name = lease.record, lease.lock_name
        try:
            if not record.begin_release():
                return True  # an earlier attempt was interrupted: the watchdog releases the lock, or has released it
            shard = self._store.shard(name) if self._has_shards else 0
            if self._breaker.failed_at[shard] and context.delivered:
                self._breaker.before_call(shard)  # otherwise, each body would wait for a dead store's timeout
            released = self._breaker.call(self._store.release, name, record.acquisition, ending, shard=shard)
            if released.granted:
                # Publish now: a crash after the acknowledgement, or after the record is cleared, would lose the grant.
                self._publisher(name, released.granted)
        except BaseException as error:
            record.delegate_release(ending.text)
            self._lease_table.wake()
            if isinstance(error, StoreUnavailable):
                logger.warning("could not release %s, the watchdog will retry it: %s", lease.name, error)
                return True
            raise
        record.clear()
        if released.woke:
            self._recent_wake.note(lease.lock_name)
        return released.ours

    def _report_acquired(self, lease: Lease) -> None:
        if self._recorder is not None and self._recorder.taken(lease):
            self._breaker.time_next(2, self._recorder.store_took)
        if self._listeners.want("acquired"):
            self._tell("acquired", lease)

    def _report_release(self, lease: Lease, reason: str) -> None:
        if self._recorder is not None:
            self._recorder.released(lease)
        if self._listeners.want("released"):
            self._tell("released", lease, reason)

    def _tell(self, kind: Kind, lease: Lease, reason: str = "") -> None:
        facts = {"task": lease.task, "task_id": lease.task_id, "token": lease.token, "reason": reason}
        self._listeners.emit(kind, name=lease.name, owner=lease.owner, **facts)


def _with_use(ending: ReleaseRequest, inner: ReleaseRequest) -> ReleaseRequest:
    """Return the outermost release with the run mark of a nested run that succeeded."""
    return ending._replace(
        identity=ending.identity or inner.identity,
        used_ms=inner.used_ms,
        requester=inner.requester,
        tick=inner.tick,
        seed=inner.seed,
    )
