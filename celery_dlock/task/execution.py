"""One run of a task under its lock: acquire before the body, release however the body ends.

Longer than 300 lines: begin, body and finish share the state of one run, and a reader follows them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from billiard.exceptions import SoftTimeLimitExceeded

from ..errors import LockLost, StoreUnavailable
from ..keys.key_spec import LockName
from ..locking import owner
from ..locking.lease import BypassLease, Lease
from ..messaging.results import store_started
from ..options.validation import as_seconds
from ..store.base import ReleaseRequest
from ..store.model import AcquireRequest, Held, Queued, Refusal
from ..utils.log import log_fields, logger
from ..utils.rng import rng
from . import outcomes, policy, unique
from .keep_on_retry import RetryReservation, reservation_for_retry
from .policy import ConflictContext, Park, Wait
from .run import Run
from .store_requests import acquire_request, queue_request, release_request, rollback_request, run_window

if TYPE_CHECKING:
    from celery.exceptions import Retry

__all__ = ["Execution", "current", "running"]


#: Seconds that a call waits in its pool slot for a holder whose body has ended. After them the policy decides.
RELEASING_WAIT = 1.0
#: Seconds that a message waits for the one that its worker received before it, and seconds between two checks.
PREDECESSOR_WAIT, PREDECESSOR_POLL = 1.0, 0.002

_ATTRIBUTE = "_celery_dlock"
_running: ContextVar[Execution | None] = ContextVar("celery_dlock_execution", default=None)


def current(request: Any) -> Execution | None:
    """Return the execution that a request belongs to."""
    execution = vars(request).get(_ATTRIBUTE)
    # Celery makes attributes of a message's headers, so a publisher may have put another value there.
    return execution if isinstance(execution, Execution) else None


#: Return the innermost execution of this context, or None. Each task calls it four times, so it has no wrapper.
running: Final[Callable[[], Execution | None]] = _running.get


class Execution(Run):
    """The life of one run: begin, body, finish."""

    #: How often the body has entered the task by calling it directly.
    _depth = 0
    _finished = _republished = False
    _reservation: RetryReservation | None = None
    #: The claim to release, once the message has started or ended.
    _claimed: LockName | None = None

    def begin(self, args: Any, kwargs: Any) -> None:
        """Acquire the lock and return, or apply the policy's decision and raise what ends the trace.

        Raises:
            Ignore: The body does not run, and the message is to be acknowledged.
            LockHeld: The policy is to fail.
            LockKeyError: The call takes a lock and its arguments give no lock name.
            StoreUnavailable: Neither the store nor the broker could be reached.
        """
        name = self.call.spec.name_of(args, kwargs) if self.call.enabled else None
        # In this order, an interruption finds either nothing changed or a run that the last exit hook can finish.
        self._before, self._outer = _running.get(), owner.entered()
        _running.set(self)
        owner.enter(self.scope)
        vars(self.request)[_ATTRIBUTE] = self
        try:
            if name is None:
                self._store_started()
                return
            if self.options.claims and self.delivery is not None:
                self._claimed = name
            if self.delivery is not None and self.delivery.predecessor:
                self._wait_for(self.delivery.predecessor)
            self._acquire(name)
            self._check_misfire(name)
        finally:
            if self.delivery is not None and self.delivery.number:
                self.runtime.receive_order.record(self.delivery.number, self.rank_us or 0)

    def body(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the body's value, or ``skip_value`` if this run skips its body."""
        if self.skipped:
            return self.skip_value
        self._depth += 1
        try:
            if self._depth > 1:
                return body(*args, **kwargs)
            value = self._abortable(body, args, kwargs)
            self.returned = True
            return value
        finally:
            self._depth -= 1
            # Celery publishes callbacks, errbacks and the chain's next step between here and after_return.
            # A body that calls its own task passes here too, and has not ended.
            if not self._depth:
                self._announce_end_if_followed()

    def announce_end(self, *, retries: bool = False) -> None:
        """Tell the store that the body has ended. Call this before a message that follows this one is published.

        Args:
            retries: The message that follows is this run's own retry.
        """
        if self.lease is not None:
            retry = self.identity._replace(retries=self.identity.retries + 1).digest
            reserved_for = retry if retries and self.options.keep_on_retry else ""
            self.runtime.lock_client.announce_release(self.lease, reserved_for)

    def reserve_for_retry(self, published: Retry) -> None:
        """Keep the lock for the retry of this run, which has been published, if ``keep_on_retry`` says so."""
        self._reservation = reservation_for_retry(self, published)

    def finish(
        self, *, final: bool = False, success: bool = False, died: bool = False, copies_end: bool = True
    ) -> None:
        """Release everything this run acquired. Idempotent: the first of the three exit hooks does the work.

        Args:
            final: The message will be acknowledged, and its end is stored.
            success: That end is a success.
            died: The run was unwound from outside (SystemExit, a killed greenlet): how far its body got is unknown.
            copies_end: Copies of the message end with it. False if the task rejected or ignored its message: it may
                have been published again, so its copies have to run.
        """
        if self._finished:
            return
        if self._claimed is not None and final and not self.keeps_claim:
            self._release_claim()
        scope = self.scope
        ends = final and copies_end and not self._republished
        ending = release_request(self, final=ends, success=success, died=died)
        if self._reservation is not None and final and not ending.used_ms:
            ending = ending._replace(reserved_for=self._reservation.identity, reserved_ms=self._reservation.life_ms)
        # A run that took no lock must not open the store, which may not even be configured.
        if self.lease is not None or scope.entered or scope.open_acquisitions:
            self._release(ending)
        # Change this state last. A soft time limit may strike anywhere above, and then the next exit hook must find
        # the run unfinished.
        owner.enter(self._outer)
        _running.set(self._before)
        self._finished = True
        # Break the cycle of request and run, which would keep the call's arguments until the next garbage collection.
        vars(self.request).pop(_ATTRIBUTE, None)

    # -- the body

    def _abortable(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the body. Under ``on_lost="abort"``, stop it when its lease is lost."""
        aborter = self.runtime.worker.aborter if self.options.on_lost == "abort" else None
        try:
            if aborter is None or self.delivery is None or self.lease is None:
                return body(*args, **kwargs)
            record = self.lease.record
            try:
                try:
                    aborter.enter(record)
                    if record.lost:
                        raise LockLost  # lost before the body began, so there is nothing to stop
                    return body(*args, **kwargs)
                finally:
                    aborter.leave(record)
            finally:
                aborter.leave(record)  # again: a signal may interrupt the first call
        except LockLost as error:
            if self.lease is None or not self.lease.lost or self.options.after_lost == "fail":
                raise
            self._republished = True
            outcomes.rerun_after_loss(self, self.lease.record.name, error)

    def _announce_end_if_followed(self) -> None:
        request = self.request
        if request.chain or request.callbacks or request.errbacks or request.chord:
            self.announce_end()

    # -- releasing

    def _release_claim(self) -> None:
        # If the store did not answer at the start of the run, its end tries again.
        if self._claimed is not None and unique.release_claim(self.task, self._claimed, self.identity):
            self._claimed = None

    def _release(self, ending: ReleaseRequest) -> None:
        lock_client, scope = self.runtime.lock_client, self.scope
        while len(scope.entered) > (self.lease is not None):
            lease = scope.entered[-1]
            logger.warning(
                "Task %s[%s] left %s held; releasing it now", self.task.name, self.request.id, lease.name,
                extra=log_fields(self.task.name, self.request.id, lease.name),
            )  # fmt: skip
            # Without a lease of its own, the run was interrupted before it knew of the one it got: no body has begun.
            rollback = scope.rollback if self.lease is None else ReleaseRequest()
            lock_client.release(lease, scope, ending if lease is self.lease else rollback)
        if self.lease is not None:
            lock_client.release(self.lease, scope, ending)
        if scope.open_acquisitions:
            lock_client.delegate_release(scope)

    # -- acquiring

    def _acquire(self, name: LockName) -> None:
        window_ms, tick = run_window(self) if self.options.once_per else (0, "")
        if window_ms:
            self.scope.rollback = rollback_request(self, window_ms, tick)
        request = acquire_request(self, window_ms, tick)
        patience, waited, met_releasing, leaving = 0.0, False, False, False
        while True:
            answer = self._try_acquire(name, request, patience, leaving=leaving)
            if isinstance(answer, (Lease, BypassLease)):
                return
            if self.rank_us is not None:
                request = request._replace(rank_us=self.rank_us)  # every attempt keeps the rank of the first
            if isinstance(answer, Held) and answer.holder.releasing and not met_releasing:
                met_releasing, leaving, patience = True, True, RELEASING_WAIT
                continue
            parking = bool(request.queue and request.queue.entry)
            decision = policy.decide(answer, self.options, self._conflict_context(waited=waited, parking=parking))
            if isinstance(decision, Wait):
                waited, leaving, patience = True, False, decision.timeout
            elif isinstance(decision, Park):
                entry = outcomes.parked_entry(self, name, decision, self.rank_us)
                request = request._replace(queue=queue_request(self, entry))
            else:
                outcomes.apply_decision(self, name, answer, decision)
                return

    def _try_acquire(
        self, name: LockName, request: AcquireRequest, patience: float, *, leaving: bool
    ) -> Lease | BypassLease | Refusal:
        answer: Lease | BypassLease | Refusal
        try:
            ttl = self.options.ttl_or(self.runtime.settings.ttl)
            answer = self.runtime.lock_client.acquire_within(name, self.scope, ttl, request, patience, leaving=leaving)
        except StoreUnavailable as error:
            answer = self.bypass = outcomes.apply_on_store_error(self, name, error)
        if isinstance(answer, Lease):
            self.lease = self.scope.own = answer
            if self.options.max_hold is not None and answer.hold_count == 1:
                # A time limit ends no lease: most pools never enforce one, and prefork does not while its broker is
                # away.
                max_hold = as_seconds(self.options.max_hold)
                answer.record.set_max_hold(self.runtime.clock.monotonic() + max_hold)
            if self._claimed is not None:
                self._release_claim()
        if self.delivery is not None and isinstance(answer, (Lease, BypassLease)):
            self._store_started()
        if isinstance(answer, (Lease, Held, Queued)):
            self.rank_us = answer.rank_us
        return answer

    def _check_misfire(self, name: LockName) -> None:
        """End a run that is too late for its tick.

        Check this under the lock only: before it, the message may be a copy of one that runs or has run.
        """
        if self.tick is None or self.skipped:
            return
        late = self.runtime.clock.wall() - self.tick.due
        if late > as_seconds(self.options.misfire_grace):
            reason = f"{self.tick.entry!r} was due {late:.0f} s ago (misfire_grace)"
            misfire = outcomes.report_misfire(self, name, reason)
            # The next tick may already ask for the lock, and must not be refused because of this run.
            self.announce_end()
            outcomes.skip(self, name, misfire)

    def _store_started(self) -> None:
        if self.task.stores_started:
            store_started(self.task, self.request)
        elif self._may_read_queued():
            try:
                store_started(self.task, self.request)
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:  # noqa: BLE001  # the backend may raise anything, and the body runs all the same
                logger.warning(
                    "Task %s[%s] runs, but its stored state stays QUEUED: %s", self.task.name, self.request.id, error,
                    extra=log_fields(self.task.name, self.request.id, self.lease.name if self.lease else ""),
                )  # fmt: skip

    def _may_read_queued(self) -> bool:
        """Return whether this delivery, or one before it, may have stored QUEUED."""
        delivery = self.delivery
        if not self.queues or delivery is None:
            return False
        flagged = bool((self.request.delivery_info or {}).get("redelivered"))
        return bool(self.refused_because or delivery.grant_id or delivery.is_copy or flagged)

    def _wait_for(self, predecessor: int) -> None:
        """Wait until the message received before this one has its rank. Else a faster child would overtake it."""
        clock = self.runtime.clock
        end = clock.monotonic() + PREDECESSOR_WAIT
        while not self.runtime.receive_order.has_recorded(predecessor) and clock.monotonic() < end:
            time.sleep(PREDECESSOR_POLL)

    def _conflict_context(self, *, waited: bool, parking: bool) -> ConflictContext:
        return ConflictContext(
            retries=self.identity.retries,
            conflict_retries=self.delivery.conflict_retries if self.delivery else 0,
            store_retries=self.delivery.store_retries if self.delivery else 0,
            waited=waited,
            parking=parking,
            eager=self.delivery is None,
            task_id=self.identity.task_id,
            jitter=rng.random(),
        )
