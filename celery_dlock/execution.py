"""One run of one task under its lock: taken before the body, given back however it ends."""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import conflict, owner, refusal
from .conflict import Park, Situation, Wait
from .errors import StoreUnavailable
from .keys import LockName
from .lease import Lease
from .message import PROPERTY, Delivery
from .options import as_seconds
from .records import By, Claim, Held, Identity, Place, Queued, Refusal
from .results import store_started
from .store import Ending

if TYPE_CHECKING:
    from .task import SingletonTask

__all__ = ["Execution", "current", "running"]

logger = logging.getLogger("celery_dlock")

#: A holder whose body has ended is about to release; its followers wait for it so long before the policy speaks.
LEFT_WAIT = 1.0
#: So long a message waits for the one that its worker received before it, looking so often.
ELDER_WAIT, ELDER_LOOK = 1.0, 0.002

_ATTRIBUTE = "_celery_dlock"
_running: ContextVar[Execution | None] = ContextVar("celery_dlock_execution", default=None)


def current(request: Any) -> Execution | None:
    """The execution that this request belongs to."""
    execution: Execution | None = vars(request).get(_ATTRIBUTE)
    return execution


def running() -> Execution | None:
    """The innermost execution of this context."""
    return _running.get()


class Execution:
    """One run of one task.

    Args:
        task: Whose run it is; its request is on top of its stack.
    """

    def __init__(self, task: SingletonTask) -> None:
        self.task = task
        request: Any = task.request
        self.request = request
        self.lease: Lease | None = None
        self.skipped = False
        self.refused_because = ""
        #: How deep the body has called its own task directly.
        self.depth = 0
        self._over = False
        self._rank_us: int | None = None
        self._queues = task.lock_options.on_conflict == "queue"
        properties = request.properties or {}
        given = properties.get(PROPERTY)
        self.delivery = Delivery(*given) if given else None
        self.identity = Identity(request.id, request.retries or 0, request.replaced_task_nesting or 0)
        self._runtime = runtime = task.dlock
        by = By.of(task.name, request.id, request.hostname or runtime.settings.node, os.getpid())
        # An eager run is nested in whatever runs it: it re-enters what this execution or this thread holds.
        outer = runtime.scope() if self.delivery is None else None
        name = self.delivery.owner if self.delivery else outer.owner if outer else uuid.uuid4().hex
        self.scope = owner.Scope(name, by, task.name, request.id, outer)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Take the lock and return, or carry out what the policy says and raise what ends the trace.

        Raises:
            Ignore: The message is dealt with and is to be acknowledged; the body does not run.
            LockHeld: The policy is to fail.
            LockKeyError: The call has no lock name.
            StoreUnavailable: Neither the store nor the broker could be reached.
        """
        name = self.task.lock_spec.name_of(args, kwargs)
        # In this order: an interruption finds either nothing changed, or a run that the last door can end.
        self._before, self._outer = _running.get(), owner.entered()
        _running.set(self)
        owner.enter(self.scope)
        vars(self.request)[_ATTRIBUTE] = self
        try:
            self._acquire(name)
        finally:
            if self.delivery is not None and self.delivery.number:
                self._runtime.arrivals.note(self.delivery.number, self._rank_us or 0)

    def leave(self) -> None:
        """Say, before a follower of this message is published, that the body has ended."""
        if self.lease is not None:
            self._runtime.locker.leave(self.lease)

    def leave_if_followed(self) -> None:
        request = self.request
        if request.chain or request.callbacks or request.errbacks or request.chord:
            self.leave()

    def finish(self, *, final: bool = False, success: bool = False) -> None:
        """Give back what this run took. Of the doors through which a run can end, the first one counts.

        Args:
            final: The message will be acknowledged with a stored end.
            success: ... and the end is a success.
        """
        if self._over:
            return
        locker, scope = self._runtime.locker, self.scope
        once = self.task.lock_options.once_per
        used_ms = round(as_seconds(once) * 1000) if success and once else 0
        by = scope.by.text if used_ms else ""
        ending = Ending(final, self.identity.digest, used_ms, by, queue=self._queues)
        while len(scope.entered) > (self.lease is not None):
            lease = scope.entered[-1]
            logger.warning("%s left %s held; it is released now", self.task.name, lease.name)
            locker.release(lease, scope, ending if lease is self.lease else Ending())
        if self.lease is not None:
            locker.release(self.lease, scope, ending)
        if scope.open:
            locker.abandon(scope)
        # Only now: a soft limit may strike anywhere above, and then the next door has to find the work undone.
        owner.enter(self._outer)
        _running.set(self._before)
        self._over = True
        # Else request and run keep each other, and the call's arguments, alive until the garbage collector comes by.
        vars(self.request).pop(_ATTRIBUTE, None)

    # -- taking the lock

    def _acquire(self, name: LockName) -> None:
        self._wait_for_elder()
        claim, patience, waited, left = self._claim(), 0.0, False, False
        while True:
            answer = self._ask(name, claim, patience)
            if isinstance(answer, Lease):
                return
            if self._rank_us is not None:
                claim = claim._replace(rank_us=self._rank_us)  # the place of its arrival, however often it asks
            if isinstance(answer, Held) and answer.holder.left and not left:
                left, patience = True, LEFT_WAIT
                continue
            parking = bool(claim.place and claim.place.entry)
            decision = conflict.decide(
                answer, self.task.lock_options, self._situation(waited=waited, parking=parking)
            )  # fmt: skip
            if isinstance(decision, Wait):
                waited, patience = True, decision.timeout
            elif isinstance(decision, Park):
                claim = claim._replace(place=self._place(refusal.parcel_text(self, name, decision, self._rank_us)))
            else:
                refusal.carry_out(self, name, answer, decision)
                return

    def _ask(self, name: LockName, claim: Claim, patience: float) -> Lease | Refusal:
        try:
            answer = self._runtime.locker.acquire_within(name, self.scope, self.task.lock_ttl, claim, patience)
        except StoreUnavailable as error:
            refusal.store_away(self, error)
        if isinstance(answer, Lease):
            self.lease = self.scope.own = answer
            if self.delivery is not None and self.task.stores_started:
                store_started(self.task, self.request)
        if isinstance(answer, Lease | Held | Queued):
            self._rank_us = answer.rank_us
        return answer

    def _wait_for_elder(self) -> None:
        """On a free lock the faster child would overtake the elder message."""
        elder, clock = self.delivery.elder if self.delivery else 0, self._runtime.clock
        end = clock.monotonic() + ELDER_WAIT
        while elder and not self._runtime.arrivals.has(elder) and clock.monotonic() < end:
            time.sleep(ELDER_LOOK)

    def _claim(self) -> Claim:
        delivery, request, runtime, options = self.delivery, self.request, self._runtime, self.task.lock_options
        now = runtime.clock.monotonic()
        # Beyond the visibility timeout the broker has delivered the message once more, whether acknowledged late or
        # waiting for its ETA.
        limit = runtime.settings.doubtful_after
        overdue = delivery is not None and limit is not None and now - delivery.delivered >= limit
        return Claim(
            self.scope.by,
            self.identity,
            redelivered=bool((request.delivery_info or {}).get("redelivered")),
            # The message that a copy copies was acknowledged before, unless that comes late.
            copied=overdue or bool(delivery and delivery.tries and (self.task.acks_late or self._queues)),
            age_us=max(0, round((now - delivery.since) * 1e6)) if delivery else 0,
            rank_us=delivery.rank_us if delivery else None,
            once=options.once_per is not None,
            place=self._place() if self._queues else None,
        )

    def _place(self, entry: str = "") -> Place:
        options, elder = self.task.lock_options, self.delivery.elder if self.delivery else 0
        ousts = options.queue_overflow in ("drop_oldest", "keep_latest")
        after_us = self._runtime.arrivals.rank_us(elder) if elder else 0
        return Place(entry, options.most_waiting, ousts, after_us, self.delivery.turn if self.delivery else "")

    def _situation(self, *, waited: bool, parking: bool) -> Situation:
        return Situation(
            retries=self.identity.retries,
            tries=self.delivery.tries if self.delivery else 0,
            waited=waited,
            parking=parking,
            eager=self.delivery is None,
            jitter=random.random(),  # noqa: S311  # spreads retries; nothing secret
        )
