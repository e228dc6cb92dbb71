"""One run of one task under its lock: taken before the body, given back however it ends."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from billiard.exceptions import SoftTimeLimitExceeded

from ..errors import LockLost, StoreUnavailable
from ..keys.key_spec import LockName
from ..locking import owner
from ..locking.lease import BypassLease, Lease
from ..messaging.message import PROPERTY, Delivery, RawMessage
from ..messaging.results import store_started
from ..messaging.ticks import Tick, tick_of, unstamped
from ..options.validation import as_seconds
from ..store.base import ReleaseRequest
from ..store.model import AcquireRequest, Held, Identity, Queued, QueueRequest, Refusal, Requester
from ..utils.log import logger
from ..utils.rng import rng
from . import outcomes as refusal
from . import policy as conflict
from . import unique as claims
from .call_options import call_of
from .keep_on_retry import RetryReservation, reservation_for_retry
from .policy import ConflictContext, Park, Wait

if TYPE_CHECKING:
    from celery.exceptions import Retry

    from .base import SingletonTask

__all__ = ["Execution", "current", "running"]


#: Seconds that a call waits in its slot for a holder whose body has ended; longer, it is republished.
LEFT_WAIT = 1.0
#: So long a message waits for the one that its worker received before it, looking so often.
PREDECESSOR_WAIT, ELDER_LOOK = 1.0, 0.002

#: Seconds that a body runs at most, as far as the mark of a name that it may have used goes (``once_per``).
LONGEST_BODY = 24 * 3600.0

_ATTRIBUTE = "_celery_dlock"
#: Where a Raw, which comes as a bare tuple, has the message's headers.
_HEADERS: Final = RawMessage._fields.index("headers")
_running: ContextVar[Execution | None] = ContextVar("celery_dlock_execution", default=None)


def current(request: Any) -> Execution | None:
    """The execution that this request belongs to."""
    execution = vars(request).get(_ATTRIBUTE)
    # Celery makes attributes of a message's headers, so a publisher may have put something else there.
    return execution if isinstance(execution, Execution) else None


#: The innermost execution of this context, or None. The variable's own method: it is asked for four times in each task.
running: Final[Callable[[], Execution | None]] = _running.get


class Execution:
    """One run of one task.

    Args:
        task: Whose run it is; its request is on top of its stack.
    """

    lease: Lease | None = None
    #: Instead of a lease, where the body runs without the lock.
    unlocked: BypassLease | None = None
    skipped = False
    #: What a skipped run returns instead of its body's value.
    skip_value: Any = None
    refused_because = ""
    #: How deep the body has called its own task directly.
    depth = 0
    #: More than one copy of the message may live.
    maybe_duplicated = False
    #: It is one of them that the broker flagged, or a copy of such a one.
    redelivered = False
    #: Its body came to its end, whatever becomes of its result and of what follows it.
    returned = False
    #: The message goes on without this run, and keeps the claim with which it was published.
    keeps_claim = False
    _over = _comes_back = False
    _heir: RetryReservation | None = None
    rank_us: int | None = None
    _claimed: LockName | None = None

    def __init__(self, task: SingletonTask) -> None:
        self.task = task
        request: Any = task.request
        self.request = request
        given = (request.properties or {}).get(PROPERTY)
        self.delivery = Delivery(*given) if given else None
        # Not the request's: a tracing tool may have put some of its own in their place.
        headers = self.delivery.raw[_HEADERS] if self.delivery else request.headers
        if not request.headers and "headers" not in (headers or ()):
            request.headers = None  # as Celery has it
        self.call = call_of(task, headers)
        self.options = self.call.options
        self._queues = self.options.on_conflict == "queue"
        self._runtime = runtime = task.dlock
        ticking = self.call.enabled and self.options.once_per == "tick"
        self.tick: Tick | None = tick_of(task.name, headers, runtime.clock.wall()) if ticking else None
        if ticking and self.tick is None and unstamped(headers) and runtime.first_of(f"unstamped {task.name}"):
            logger.warning(
                "Task %s runs as if without once_per='tick': its message is from a beat that says no due time; start "
                "that with -S celery_dlock.beat:DLockScheduler (in worker -B by beat_scheduler), or a TickScheduler",
                task.name,
            )
        self.identity = Identity(request.id, request.retries or 0, request.replaced_task_nesting or 0)
        by = Requester.of(task.name, request.id, request.hostname or runtime.node, os.getpid())
        # An eager run is nested in whatever runs it: it re-enters what this execution or this thread holds.
        outer = runtime.scope() if self.delivery is None else None
        name = self.delivery.owner if self.delivery else outer.owner if outer else uuid.uuid4().hex
        self.scope = owner.OwnerContext(name, by, task.name, request.id, outer, delivered=self.delivery is not None)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Take the lock and return, or carry out what the policy says and raise what ends the trace.

        Raises:
            Ignore: The message is dealt with and is to be acknowledged; the body does not run.
            LockHeld: The policy is to fail.
            LockKeyError: The call has no lock name, and takes a lock.
            InvalidLockOptions: The message brings options of its own that are not allowed.
            StoreUnavailable: Neither the store nor the broker could be reached.
        """
        name = self.call.spec.name_of(args, kwargs) if self.call.enabled else None
        # In this order: an interruption finds either nothing changed, or a run that the last door can end.
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
            self._acquire(name)
            self._check_misfire(name)
        finally:
            if self.delivery is not None and self.delivery.number:
                self._runtime.arrivals.note(self.delivery.number, self.rank_us or 0)

    def body(self, run_body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the body, which is stopped if its lease is lost and the task wants that."""
        stopper = self._runtime.worker.aborter if self.options.on_lost == "abort" else None
        try:
            if stopper is None or self.delivery is None or self.lease is None:
                return run_body(*args, **kwargs)
            slot = self.lease.slot
            try:
                try:
                    stopper.enter(slot)
                    if slot.lost:
                        raise LockLost  # before there was anything to stop
                    return run_body(*args, **kwargs)
                finally:
                    stopper.leave(slot)
            finally:
                stopper.leave(slot)  # a signal may strike in the first one, before it is done
        except LockLost as error:
            if self.lease is None or not self.lease.lost or self.options.after_lost == "fail":
                raise
            self._comes_back = True
            refusal.run_again(self, error)

    def leave(self, *, retries: bool = False) -> None:
        """Say, before a follower of this message is published, that the body has ended."""
        if self.lease is not None:
            heir = self.identity._replace(retries=self.identity.retries + 1).digest
            self._runtime.locker.announce_release(self.lease, heir if retries and self.options.keep_on_retry else "")

    def retried(self, published: Retry) -> None:
        """Note that the retry of this message is on its way."""
        self._heir = reservation_for_retry(self, published)

    def leave_if_followed(self) -> None:
        request = self.request
        if request.chain or request.callbacks or request.errbacks or request.chord:
            self.leave()

    def _give_claim_up(self) -> None:
        # Once more at its end, where it was not heard at its start.
        if self._claimed is not None and claims.release_claim(self._runtime, self._claimed, self.identity):
            self._claimed = None

    def finish(
        self, *, final: bool = False, success: bool = False, died: bool = False, copies_end: bool = True
    ) -> None:
        """Give back what this run took. Of the doors through which a run can end, the first one counts.

        Args:
            final: The message will be acknowledged with a stored end.
            success: ... and the end is a success.
            died: It was unwound from outside (SystemExit, a killed greenlet), so nobody knows how far its body came.
            copies_end: False: it is final, and what becomes of its message is the task's to say, which may have
                published it anew, or rejected it for another exchange. So copies of it are to run.
        """
        if self._over:
            return
        if self._claimed is not None and final and not self.keeps_claim:
            self._give_claim_up()
        scope = self.scope
        ending = ReleaseRequest(final and copies_end and not self._comes_back, self.identity.digest, queue=self._queues)
        window_ms, tick = self._window()
        if window_ms and (self.returned or not died):
            ending = ending._replace(
                used_ms=window_ms if success or self.returned else 0,
                by=scope.by.text,
                once=True,
                tick=tick,
                seed=self.lease.seed if self.lease else "",
                window_ms=window_ms,
            )
        if self._heir is not None and final and not ending.used_ms:
            ending = ending._replace(reserved_for=self._heir.identity, heir_ms=self._heir.life_ms)
        # A run that took no lock needs no store, which may not even be set.
        if self.lease is not None or scope.entered or scope.open:
            self._release(ending)
        # Only now: a soft limit may strike anywhere above, and then the next door has to find the work undone.
        owner.enter(self._outer)
        _running.set(self._before)
        self._over = True
        # Else request and run keep each other, and the call's arguments, alive until the garbage collector comes by.
        vars(self.request).pop(_ATTRIBUTE, None)

    def _release(self, ending: ReleaseRequest) -> None:
        locker, scope = self._runtime.locker, self.scope
        while len(scope.entered) > (self.lease is not None):
            lease = scope.entered[-1]
            logger.warning("%s left %s held; it is released now", self.task.name, lease.name)
            # Without a lease of its own, it was interrupted before it knew of the one it got: its body has not begun.
            rest = scope.undone if self.lease is None else ReleaseRequest()
            locker.release(lease, scope, ending if lease is self.lease else rest)
        if self.lease is not None:
            locker.release(self.lease, scope, ending)
        if scope.open:
            locker.delegate_release(scope)

    # -- taking the lock

    def _acquire(self, name: LockName) -> None:
        self._wait_for_predecessor()
        claim, patience, waited, left, leaving = self._claim(), 0.0, False, False, False
        while True:
            answer = self._ask(name, claim, patience, leaving=leaving)
            if isinstance(answer, (Lease, BypassLease)):
                return
            if self.rank_us is not None:
                claim = claim._replace(rank_us=self.rank_us)  # the place of its arrival, however often it asks
            if isinstance(answer, Held) and answer.holder.left and not left:
                left, leaving, patience = True, True, LEFT_WAIT
                continue
            parking = bool(claim.place and claim.place.entry)
            decision = conflict.decide(answer, self.options, self._situation(waited=waited, parking=parking))
            if isinstance(decision, Wait):
                waited, leaving, patience = True, False, decision.timeout
            elif isinstance(decision, Park):
                claim = claim._replace(place=self._place(refusal.parcel_text(self, name, decision, self.rank_us)))
            else:
                refusal.apply_decision(self, name, answer, decision)
                return

    def _check_misfire(self, name: LockName) -> None:
        """Only once the lock is held: before, it could be a copy of a message that runs or has run."""
        if self.tick is None or self.skipped:
            return
        late = self._runtime.clock.wall() - self.tick.due
        if late > as_seconds(self.options.misfire_grace):
            refusal.misfire(self, name, f"{self.tick.entry!r} was due {late:.0f} s ago (misfire_grace)")

    def _ask(
        self, name: LockName, claim: AcquireRequest, patience: float, *, leaving: bool
    ) -> Lease | BypassLease | Refusal:
        answer: Lease | BypassLease | Refusal
        try:
            ttl = self.options.ttl_or(self._runtime.settings.ttl)
            answer = self._runtime.locker.acquire_within(name, self.scope, ttl, claim, patience, leaving=leaving)
        except StoreUnavailable as error:
            answer = self.unlocked = refusal.apply_on_store_error(self, name, error)
        if isinstance(answer, Lease):
            self.lease = self.scope.own = answer
            self._limit_hold(answer)
            if self._claimed is not None:
                self._give_claim_up()
        if self.delivery is not None and isinstance(answer, (Lease, BypassLease)):
            self._store_started()
        if isinstance(answer, (Lease, Held, Queued)):
            self.rank_us = answer.rank_us
        return answer

    def _store_started(self) -> None:
        if self.task.stores_started:
            store_started(self.task, self.request)
        elif self._may_read_queued():
            try:
                store_started(self.task, self.request)
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:  # noqa: BLE001  # whatever the backend raises; the body runs all the same
                logger.warning("%s[%s] runs, and its state stays QUEUED: %s", self.task.name, self.request.id, error)

    def _may_read_queued(self) -> bool:
        """Return whether this delivery, or one before it, may have stored QUEUED."""
        delivery = self.delivery
        if not self._queues or delivery is None:
            return False
        flagged = bool((self.request.delivery_info or {}).get("redelivered"))
        return bool(self.refused_because or delivery.turn or delivery.is_copy or flagged)

    def _window(self) -> tuple[int, str]:
        """How many milliseconds a success uses the name (0: not at all), and for which tick ("": for any)."""
        once = self.options.once_per
        if once is None or (once == "tick" and self.tick is None):
            return 0, ""  # called by hand, it is for no tick
        return round((self.options.once_seconds or 0.0) * 1000), self.tick.digest if self.tick else ""

    def _begun_ms(self, window_ms: int) -> int:
        """How long the mark of its body lives from the body's start: for a whole window after its death."""
        longest = self.options.max_hold
        return window_ms + round((LONGEST_BODY if longest is None else as_seconds(longest)) * 1000)

    def _limit_hold(self, lease: Lease) -> None:
        # A time limit ends no lease: most pools never enforce one, and prefork does not while its broker is away.
        longest = self.options.max_hold
        if longest is not None and lease.hold_count == 1:
            lease.slot.set_max_hold(self._runtime.clock.monotonic() + as_seconds(longest))

    def _wait_for_predecessor(self) -> None:
        """On a free lock the faster child would overtake the elder message."""
        elder, clock = self.delivery.predecessor if self.delivery else 0, self._runtime.clock
        if not elder:
            return
        end = clock.monotonic() + PREDECESSOR_WAIT
        while not self._runtime.arrivals.has(elder) and clock.monotonic() < end:
            time.sleep(ELDER_LOOK)

    def _claim(self) -> AcquireRequest:
        delivery, request, runtime, options = self.delivery, self.request, self._runtime, self.options
        now = runtime.clock.monotonic()
        window_ms, tick = self._window()
        if window_ms:
            self.scope.undone = ReleaseRequest(
                identity=self.identity.digest,
                outcome_unknown=True,
                rolled_back=True,
                once=True,
                tick=tick,
                window_ms=window_ms,
            )
        # Beyond the visibility timeout, or behind a lost connection, the broker has delivered the message once more,
        # whether acknowledged late or waiting for its ETA.
        limit = runtime.settings.doubtful_after
        overdue = delivery is not None and (
            (limit is not None and now - delivery.delivered >= limit) or delivery.delivered <= runtime.disconnected_at
        )
        flagged = bool((request.delivery_info or {}).get("redelivered"))
        self.maybe_duplicated = overdue or flagged or bool(delivery and delivery.maybe_duplicated)
        # A copy that carries its rank is judged by that, however often it is delivered itself: what it copies may have
        # been the first of its id to be sent after an end.
        self.redelivered = bool(delivery and (delivery.redelivered or (flagged and delivery.rank_us is None)))
        return AcquireRequest(
            self.scope.by,
            self.identity,
            redelivered=self.redelivered,
            # The message that a copy copies was acknowledged before, unless that comes late.
            copied=self.maybe_duplicated
            or bool(delivery and delivery.is_copy and (self.task.acks_late or self._queues)),
            age_us=max(0, round((now - delivery.since) * 1e6)) if delivery else 0,
            rank_us=delivery.rank_us if delivery else None,
            once=window_ms > 0,
            tick=tick,
            begun_ms=self._begun_ms(window_ms) if window_ms else 0,
            hold=options.after_crash == "hold",
            keep_ms=round(as_seconds(options.min_hold) * 1000) if options.min_hold else 0,
            place=self._place() if self._queues else None,
            durability=runtime.settings.confirmed_by(options.confirmation),
        )

    def _place(self, entry: str = "") -> QueueRequest:
        options, elder = self.options, self.delivery.predecessor if self.delivery else 0
        ousts = options.queue_overflow in ("drop_oldest", "keep_latest")
        after_us = self._runtime.arrivals.rank_us(elder) if elder else 0
        return QueueRequest(entry, options.most_waiting, ousts, after_us, self.delivery.turn if self.delivery else "")

    def _situation(self, *, waited: bool, parking: bool) -> ConflictContext:
        return ConflictContext(
            retries=self.identity.retries,
            conflict_retries=self.delivery.conflict_retries if self.delivery else 0,
            store_retries=self.delivery.store_retries if self.delivery else 0,
            waited=waited,
            parking=parking,
            eager=self.delivery is None,
            task_id=self.identity.task_id,
            jitter=rng.random(),  # spreads retries
        )
