"""One run of a task under its lock: acquire before the body, release however the body ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from billiard.exceptions import SoftTimeLimitExceeded

from ..errors import StoreUnavailable
from ..keys.lock_name import LockName
from ..locking import owner
from ..locking.lease import BypassLease, Lease
from ..locking.owner import OwnerContext
from ..messaging.message import PROPERTY, Delivery, RawMessage
from ..messaging.results import Replaced, store_started
from ..messaging.tick_header import Tick, tick_of, unstamped
from ..options.durations import as_seconds
from ..store.base import ReleaseRequest
from ..store.model import AcquireRequest, Held, Identity, Queued, QueueRequest, Refusal, Requester
from ..utils.log import log_fields, logger
from ..utils.rng import rng
from . import lock_file, outcomes, policy, unique
from .body_stop import end_stopped, run_stoppable
from .call_options import call_of
from .policy import ConflictContext, Park, ParkDuplicate, Wait
from .store_requests import (
    RetryReservation,
    acquire_request,
    queue_request,
    release_request,
    reservation_for_retry,
    rollback_request,
)

if TYPE_CHECKING:
    from celery.exceptions import Retry

    from .base import SingletonTask

__all__ = ["Execution", "current", "running"]

#: Position of the headers in a :class:`RawMessage`, which the pool child receives as a bare tuple.
_HEADERS: Final = RawMessage._fields.index("headers")

#: Seconds that a call waits in its pool slot for a holder whose body has ended. If the lock is still held then,
#: :func:`.policy.decide` decides what happens. Usually the message is republished.
RELEASING_WAIT = 1.0
#: Seconds that a message waits until its predecessor in the receive order has a rank, and seconds between two checks.
PREDECESSOR_WAIT, PREDECESSOR_POLL = 1.0, 0.002

_running: ContextVar[Execution | None] = ContextVar("celery_dlock_execution", default=None)


def current(request: Any) -> Execution | None:
    """Return the execution that a request belongs to."""
    execution = getattr(request, "dlock_execution", None)
    # Celery copies each header of a message to an attribute of the request, so a publisher may have put another value
    # there.
    return execution if isinstance(execution, Execution) else None


#: Return the innermost execution of this context, or None. Each task calls it four times, so it has no wrapper.
running: Final[Callable[[], Execution | None]] = _running.get


class Execution:
    """The life of one run: begin, body, finish.

    Args:
        task: The task that runs. The run's request is on top of the task's request stack.

    Raises:
        InvalidLockOptions: The message carries call options that the task does not allow.
        InvalidTick: The message carries a malformed due time.
    """

    #: The lease, once the lock is acquired.
    lease: Lease | None = None
    #: Replaces the lease if the body runs without the lock (``on_store_error="run"`` or ``"local"``).
    bypass: BypassLease | None = None
    #: The lock name whose lock file this run has tried to take (``on_store_error="local"``).
    file_of: LockName | None = None
    #: If the lock is held, the call waits in the lock store.
    queues = False
    #: The body does not run. The task returns ``skip_value`` instead.
    skipped = False
    skip_value: Any = None
    #: Why the message was parked; empty if this delivery did not park it.
    refused_because = ""
    #: The broker flagged this delivery as redelivered, or flagged the message of which this is a copy.
    redelivered = False
    #: The wire version of the worker that republished the message, if that is newer than this worker's; else 0.
    newer_wire = 0
    #: The tracer has called ``before_start``, and calls the body next.
    body_is_next = False
    #: A newer call has stopped the body (``on_conflict="replace"``).
    was_stopped = False
    #: The body returned a value.
    returned = False
    #: The message was republished or parked, so the claim made when it was published stays.
    keeps_claim = False
    #: Under ``once_per="tick"``: the due time that the message is for.
    tick: Tick | None = None
    #: The message's rank among the waiters of its lock, once the store has reported it.
    rank_us: int | None = None
    #: When the broker first refused to take the message again, on the monotonic clock. The run has kept its delivery.
    refused_since: float | None = None
    #: The body is running. If it calls its own task directly, that call is a part of it.
    _in_body = False
    _finished = False
    _reservation: RetryReservation | None = None
    #: The name that this message has claimed (``unique``). The claim is released once the run holds the lock, or when
    #: the message ends without it.
    _claimed: LockName | None = None

    def __init__(self, task: SingletonTask) -> None:
        self.task = task
        request: Any = task.request
        self.request = request
        given = (request.properties or {}).get(PROPERTY)
        self.delivery = delivery = Delivery(*given) if given else None
        # Use the message's headers: a tracing tool may have replaced those of the request.
        headers = delivery.raw[_HEADERS] if delivery else request.headers
        if not request.headers and "headers" not in (headers or ()):
            request.headers = None  # as in a run without this library
        if delivery and delivery.newer_wire:
            # A newer worker gets the message; this one may not be able to read its options.
            headers, self.newer_wire = None, delivery.newer_wire
        self.runtime = runtime = task.dlock
        self.call = call = call_of(task, headers, enabled=runtime.switch.on)
        self.options = options = call.options
        if not options.is_simple:
            self.queues = options.parks
            if options.once_per == "tick" and call.enabled:
                self.tick = self._tick_of(headers)
        task_id, name = request.id, task.name
        self.identity = Identity(task_id, request.retries or 0, request.replaced_task_nesting or 0)
        by = Requester.of(name, task_id, request.hostname or runtime.node, os.getpid())
        if delivery is None:
            # An eager run is nested in its caller, so it re-enters the locks that the caller holds.
            outer = runtime.owner_context()
            self.context = OwnerContext(outer.owner, by, name, task_id, outer)
        else:
            self.context = OwnerContext(delivery.owner, by, name, task_id, delivered=True)

    @property
    def known_rank_us(self) -> int | None:
        """The rank that the store has reported, in this run or before it; None: it has not reported one."""
        return self.rank_us if self.rank_us is not None or self.delivery is None else self.delivery.rank_us

    def record_order(self) -> None:
        """Record that the message holds its lock, is parked or needs neither: its acknowledgement may be sent now."""
        if self.delivery is not None and self.delivery.number:
            self.runtime.receive_order.record(self.delivery.number, self.rank_us or 0)

    @property
    def debounces(self) -> bool:
        """Whether the call waits for newer ones. A retry and an eager call do not."""
        return self.options.debounce is not None and self.delivery is not None and not self.identity.retries

    def begin(self, args: Any, kwargs: Any) -> None:
        """Acquire the lock and return. If the lock is refused, apply the policy's decision.

        Raises:
            Ignore: The body does not run, and the message is to be acknowledged.
            LockHeld, NameUsed, UnknownOutcome: The policy's decision is to fail the task.
            LockKeyError: The call takes a lock and its arguments give no lock name.
            StoreUnavailable: Neither the store nor the broker could be reached.
            Reject: The message could not be republished, so this delivery is requeued.
        """
        call, delivery = self.call, self.delivery
        name = call.spec.name_of(args, kwargs) if call.enabled else None
        # Store the old values before anything is changed. If an exception interrupts these lines, the exit hook of the
        # tracer or of the eager call (:mod:`.hooks`) can still restore them.
        self._before, self._outer = running(), owner.entered()
        _running.set(self)
        owner.enter(self.context)
        self.request.dlock_execution = self
        try:
            if name is None:
                self._store_started()
                return
            if delivery is not None and not self.options.is_simple:
                if self.options.claims:
                    self._claimed = name
                if delivery.predecessor:
                    self._wait_for(delivery.predecessor)
            self._acquire(name)
            if delivery is not None and (self.task.stores_started or self.queues) and (self.lease or self.bypass):
                self._store_started()
            if self.tick is not None:
                self._check_misfire(name, self.tick)
        finally:
            if delivery is not None and delivery.number:
                self.record_order()

    def body(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the body's value, or ``skip_value`` if this run skips its body."""
        self.body_is_next = False
        if self.skipped:
            return self.skip_value
        if self._in_body:
            return body(*args, **kwargs)
        self._in_body = True
        try:
            value = run_stoppable(self, body, args, kwargs) if self.options.is_stoppable else body(*args, **kwargs)
        except Replaced:
            if self.lease is not None and self.lease.replaced:
                self.was_stopped = True
                end_stopped(self, self.lease)
            raise
        else:
            self.returned = True
            return value
        finally:
            self._in_body = False
            # Celery publishes callbacks, errbacks and the chain's next step between here and after_return.
            request = self.request
            if request.chain or request.callbacks or request.errbacks or request.chord:
                self.announce_end()

    def announce_end(self, *, retries: bool = False) -> None:
        """Tell the store that the body has ended. Call this before a message that follows this one is published.

        Args:
            retries: The message that follows is this run's own retry.
        """
        lock_file.announce_end(self)
        if self.lease is not None:
            retry = self.identity._replace(retries=self.identity.retries + 1).digest
            reserved_for = retry if retries and self.options.keep_on_retry else ""
            self.runtime.lock_client.announce_release(self.lease, reserved_for)

    def reserve_for_retry(self, published: Retry) -> None:
        """Under ``keep_on_retry``, reserve the lock for the retry that this run has just published."""
        self._reservation = reservation_for_retry(self, published)

    def finish(
        self, *, final: bool = False, success: bool = False, died: bool = False, copies_end: bool = True
    ) -> None:
        """Release everything this run acquired. Idempotent: the first exit hook (see :mod:`.hooks`) does the work.

        Args:
            final: The message will be acknowledged, and its end is stored.
            success: That end is a success.
            died: The run was unwound from outside (SystemExit, a killed greenlet): how far its body got is unknown.
            copies_end: Duplicates of the message must not run. False if the task rejected or ignored the message: the
                task may have published it again, so the new copy has to run.
        """
        if self._finished:
            return
        ends = final and copies_end
        ending = release_request(self, final=ends, success=success, died=died)
        if not self.options.is_simple:
            ending = self._finish_options(ending, final=final)
        # A run that took no lock must not open the store, which may not even be configured.
        if self.lease is not None or self.context.entered or self.context.open_acquisitions:
            self._release(ending)
        # Change this state last. A soft time limit may strike anywhere above, and then the next exit hook must find
        # the run unfinished.
        owner.enter(self._outer)
        _running.set(self._before)
        self._finished = True
        # Break the cycle of request and run, which would keep the call's arguments until the next garbage collection.
        self.request.dlock_execution = None

    # -- releasing

    def _finish_options(self, ending: ReleaseRequest, *, final: bool) -> ReleaseRequest:
        """Release the claim and the lock file, if the run has them. Return the request, with the lock's reservation."""
        if self._claimed is not None and final and not self.keeps_claim:
            self._release_claim()
        if self._reservation is not None and final and not ending.used_ms:
            ending = ending._replace(reserved_for=self._reservation.identity, reserved_ms=self._reservation.life_ms)
        lock_file.free(self)
        return ending

    def _release_claim(self) -> None:
        # Called at the start and at the end of the run. If the store did not answer at the start, the end tries again.
        if self._claimed is not None and unique.release_claim(self.task, self._claimed, self.identity):
            self._claimed = None

    def _release(self, ending: ReleaseRequest) -> None:
        context, own = self.context, self.lease
        while len(context.entered) > (own is not None):
            lease = context.entered[-1]
            logger.warning(
                "Task %s[%s] left %s held; releasing it now", self.task.name, self.request.id, lease.name,
                extra=log_fields(self.task.name, self.request.id, lease.name),
            )  # fmt: skip
            # If the run has no lease, the acquire may have been interrupted after the store granted it: roll it back.
            rollback = context.rollback if own is None else ReleaseRequest()
            lease.client.release(lease, context, ending if lease is own else rollback)
        if own is not None:
            own.client.release(own, context, ending)
        if context.open_acquisitions:
            for client in set(context.open_acquisitions.values()):
                client.delegate_release(context)

    # -- acquiring

    def _acquire(self, name: LockName) -> None:
        if not self.options.is_simple and (rollback := rollback_request(self)):
            self.context.rollback = rollback
        request = acquire_request(self)
        while True:
            try:
                if self.newer_wire:
                    outcomes.leave_to_newer_worker(self, name, self.newer_wire)
                refusal = self._try_acquire(name, request)
                if refusal is not None:
                    self._settle(name, request, refusal)
            except outcomes.NotRepublished as refused:
                delay = refused.delay
            else:
                return
            time.sleep(delay)
            request = acquire_request(self)._replace(rank_us=self.known_rank_us)

    def _settle(self, name: LockName, request: AcquireRequest, refusal: Refusal) -> None:
        """Apply the policy to a refusal. Return if a later attempt acquired the lock, or if the body is skipped."""
        answer: Refusal | None = refusal
        timeout, waited, met_releasing, while_releasing = 0.0, False, False, False
        began = self.runtime.clock.monotonic()
        while answer is not None:
            if self.rank_us is not None:
                request = request._replace(rank_us=self.rank_us)  # every attempt keeps the rank of the first
            if isinstance(answer, Held) and answer.holder.releasing and not met_releasing:
                met_releasing, while_releasing, timeout = True, True, RELEASING_WAIT
            else:
                decision = policy.decide(answer, self.options, self._conflict_context(request.queue, waited=waited))
                if isinstance(decision, Wait):
                    waited, while_releasing, timeout = True, False, decision.timeout
                elif isinstance(decision, Park | ParkDuplicate) and (queue := self._queue_request(name, decision)):
                    request, timeout = request._replace(queue=queue), 0.0
                else:
                    if isinstance(decision, ParkDuplicate):
                        decision = decision.otherwise
                    outcomes.apply_decision(self, name, answer, decision)
                    return
            answer = self._try_within(name, request, timeout, answer, while_releasing=while_releasing)
        self.runtime.spans.waited(self.runtime.clock.monotonic() - began)

    def _queue_request(self, name: LockName, decision: Park | ParkDuplicate) -> QueueRequest | None:
        """Return the request to park this message; None if it is a duplicate that cannot be parked."""
        if isinstance(decision, Park):
            return queue_request(self, outcomes.parked_entry(self, name, decision, self.rank_us))
        entry = outcomes.duplicate_entry(self, name)
        return queue_request(self, entry)._replace(park_duplicate=True) if entry else None

    def _try_within(
        self, name: LockName, request: AcquireRequest, timeout: float, answer: Refusal, *, while_releasing: bool
    ) -> Refusal | None:
        """Ask for the lock again, and wait for it at most ``timeout`` seconds after the refusal ``answer``."""
        attempt = partial(self._try_acquire, name, request, while_releasing=while_releasing)
        refused: Refusal | None = answer
        until = self.runtime.clock.monotonic() + timeout
        if not lock_file.held_in_file(answer):
            # With notify, the script has marked the lock, so its release wakes this call: wait without asking again.
            refused = attempt(timeout, refused=answer if request.notify else None)
        if self.file_of is None:
            return refused
        return lock_file.retry_within(self, name, refused, until, attempt, while_releasing=while_releasing)

    def _try_acquire(
        self,
        name: LockName,
        request: AcquireRequest,
        timeout: float = 0.0,
        *,
        while_releasing: bool = False,
        refused: Refusal | None = None,
    ) -> Refusal | None:
        """Ask for the lock. Return the refusal; None if the body may run: under its lease, or without the lock."""
        context = self.context
        try:
            ttl = self.options.ttl_or(self.runtime.settings.ttl)
            client = self.runtime.lock_client
            if timeout:
                answer = client.acquire_within(
                    name, context, ttl, request, timeout, while_releasing=while_releasing, refused=refused
                )
            else:
                answer = client.acquire(name, context, ttl, request)
        except StoreUnavailable as error:
            return self._without_store(name, error)
        if not isinstance(answer, Lease):
            if isinstance(answer, (Held, Queued)):
                self.rank_us = answer.rank_us
            return answer
        self.rank_us = answer.rank_us
        if not self.options.is_simple:
            return self._hold(name, answer)
        self.lease = context.own = answer
        return None

    def _hold(self, name: LockName, lease: Lease) -> Refusal | None:
        """Hold the lease as the options say. If another owner has the lock file, return that refusal instead."""
        if self.options.on_store_error == "local" and (refusal := lock_file.take_beside(self, name, lease)):
            return refusal
        self.lease = self.context.own = lease
        if self.options.once_per is not None and lease.hold_count == 1:
            lease.success = release_request(self, final=False, success=True, died=False)
        if self.options.max_hold is not None and lease.hold_count == 1:
            # The watchdog enforces max_hold. Celery's time limit is not enough: most pools never enforce it, and
            # prefork does not enforce it while the broker is unreachable.
            max_hold = as_seconds(self.options.max_hold)
            lease.record.set_max_hold(self.runtime.clock.monotonic() + max_hold)
        self._release_claim()
        return None

    def _without_store(self, name: LockName, error: StoreUnavailable) -> Held | None:
        """Apply ``on_store_error``. Return the refusal of a lock file; None if the body may run without the lock."""
        instead = outcomes.apply_on_store_error(self, name, error)
        if isinstance(instead, Held):
            return instead
        self.bypass = instead
        return None

    def _check_misfire(self, name: LockName, tick: Tick) -> None:
        """End a run that is too late for its tick.

        Call this only after the lock is acquired. Before that, the message may be a duplicate of a running or finished
        one.
        """
        if self.skipped:
            return
        late = self.runtime.clock.wall() - tick.due
        if late > as_seconds(self.options.misfire_grace):
            reason = f"{tick.entry!r} was due {late:.0f} s ago (misfire_grace)"
            misfire = outcomes.report_misfire(self, name, reason)
            # The next tick may already ask for the lock, and must not be refused because of this run.
            self.announce_end()
            outcomes.skip(self, name, misfire)

    def _store_started(self) -> None:
        if self.delivery is not None and self.delivery.grant_id and self.delivery.rank_us:
            self.runtime.spans.waited(self.runtime.clock.wall() - self.delivery.rank_us / 1e6)
        if not (self.task.stores_started or (self.queues and self._may_have_stored_queued())):
            return
        try:
            store_started(self.task, self.request)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001  # the backend may raise anything, and the body runs all the same
            logger.warning(
                "Task %s[%s] runs, but its state STARTED cannot be stored: %s", self.task.name, self.request.id, error,
                extra=log_fields(self.task.name, self.request.id, self.lease.name if self.lease else ""),
            )  # fmt: skip

    def _may_have_stored_queued(self) -> bool:
        """Return whether this delivery, or one before it, may have stored QUEUED."""
        delivery = self.delivery
        if delivery is None:
            return False
        flagged = bool((self.request.delivery_info or {}).get("redelivered"))
        return bool(self.refused_because or delivery.grant_id or delivery.is_copy or flagged)

    def _wait_for(self, predecessor: int) -> None:
        """Wait until the predecessor has a rank. Otherwise a faster pool child would overtake the predecessor."""
        clock = self.runtime.clock
        end = clock.monotonic() + PREDECESSOR_WAIT
        while not self.runtime.receive_order.has_recorded(predecessor) and clock.monotonic() < end:
            time.sleep(PREDECESSOR_POLL)

    def _conflict_context(self, queue: QueueRequest | None, *, waited: bool) -> ConflictContext:
        return ConflictContext(
            retries=self.identity.retries,
            conflict_retries=self.delivery.conflict_retries if self.delivery else 0,
            store_retries=self.delivery.store_retries if self.delivery else 0,
            waited=waited,
            parking=queue is not None and queue.entry != "",
            parking_duplicate=queue is not None and queue.park_duplicate,
            eager=self.delivery is None,
            task_id=self.identity.task_id,
            jitter=rng.random(),
        )

    def _tick_of(self, headers: Any) -> Tick | None:
        task, runtime = self.task, self.runtime
        tick = tick_of(task.name, headers, runtime.clock.wall())
        if tick is None and unstamped(headers) and runtime.first_of(f"unstamped {task.name}"):
            logger.warning(
                "Task %s[%s] has once_per='tick' but its message carries no due time, so once_per is ignored. Start "
                "beat with -S celery_dlock.beat:DLockScheduler (worker -B: beat_scheduler), or use a TickScheduler",
                task.name, self.request.id, extra=log_fields(task.name, self.request.id),
            )  # fmt: skip
        return tick
