"""What becomes of a task that did not get its lock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NoReturn

from celery import states
from celery.exceptions import Ignore, Reject

from ..errors import (
    DLockError,
    LockHeld,
    LockLost,
    NameUsed,
    NotConfirmed,
    ReplyLost,
    StoreQuarantined,
    StoreUnavailable,
    UnknownOutcome,
)
from ..keys.key_spec import LockName
from ..locking.lease import BypassLease
from ..messaging.message import publish_again
from ..messaging.parked import ParkedMessage
from ..messaging.results import CallSkipped, has_backend, store_queued, store_revoked
from ..store.model import Held, Parked, Queued, Refusal, Unknown, Used
from ..utils.log import logger
from ..utils.rng import rng
from .policy import (
    AckParked,
    Decision,
    DropDuplicate,
    Fail,
    Park,
    RequeueDuplicate,
    RetryLater,
    ReturnFirstResult,
    Skip,
)

if TYPE_CHECKING:
    from ..locking.events import Kind
    from .run import Run

__all__ = [
    "HandledElsewhere",
    "Postponed",
    "Replaced",
    "Skipped",
    "apply_decision",
    "apply_on_store_error",
    "parked_entry",
    "report_misfire",
    "rerun_after_loss",
    "skip",
]


_ERRORS: Final[dict[str, type[DLockError]]] = {"held": LockHeld, "used": NameUsed, "unknown": UnknownOutcome}

#: Longest delay of a message that comes back because the store did not answer or its lease was lost, in seconds.
COMEBACK_MAX = 60.0
#: Seconds to hold a message that the broker did not take, before it goes back to it.
REQUEUE_DELAY = 1.0


class Skipped(Ignore):
    """Ends a trace whose end we have stored.

    Args:
        error: That end.
    """

    def __init__(self, error: CallSkipped) -> None:
        super().__init__(error)
        self.error = error


class HandledElsewhere(Ignore):
    """Ends a trace whose message lives on, or has ended, in another delivery; ``str()`` of it is the reason."""


class Postponed(HandledElsewhere):
    """Ends a trace whose message was republished or parked, so that it runs later; ``str()`` of it is the reason."""


class Replaced(Ignore):
    """Ends a trace whose task has replaced itself: as Celery's own, and known for what it is."""


def apply_decision(run: Run, name: LockName, answer: Refusal, decision: Decision) -> None:
    """Do what was decided. Returns only if the run goes on with the ``skip_result`` instead of its body.

    Raises:
        Skipped, Elsewhere: The message is dealt with and is to be acknowledged.
        LockHeld, NameUsed, UnknownOutcome: The task is to fail.
    """
    reason = f"{name}: {decision.reason}"
    task, task_id = run.task, run.request.id
    facts = (reason, name.text, *_earlier(answer))
    if isinstance(answer, Held | Queued) or isinstance(decision, Fail):
        _tell(run, "refused", name, reason)
    match decision:
        case Skip():
            skip(run, name, CallSkipped(*facts))
        case ReturnFirstResult(first):
            _recall(run, name, first, CallSkipped(*facts))
        case DropDuplicate():
            logger.info("Task %s[%s] is a duplicate: %s", task.name, task_id, reason)
            raise HandledElsewhere(reason)
        case RetryLater(delay) | RequeueDuplicate(delay):
            rank_us = answer.rank_us if isinstance(answer, Held | Queued) else None
            tries = isinstance(decision, RetryLater) and decision.counts
            _publish_again(
                run, rank_us, delay, LockHeld(*facts), conflict=tries, copy=isinstance(decision, RequeueDuplicate)
            )
            logger.info("Task %s[%s] comes back in %.3g s: %s", task.name, task_id, delay, reason)
            # Monitors have one state for all copies of a message, and another copy of this one runs.
            raise HandledElsewhere(reason) if isinstance(decision, RequeueDuplicate) else Postponed(reason)
        case AckParked():
            _await_turn(run, name, answer, reason)
        case Fail():
            raise _ERRORS[decision.why](*facts)


def _earlier(answer: Refusal) -> tuple[str | None, str, float] | tuple[()]:
    """The run that is in the way: its task's id, its node, and since when; empty if there is none."""
    earlier = answer.by if isinstance(answer, Used | Unknown) else getattr(answer, "holder", None)
    return (earlier.task_id, earlier.node, earlier.since) if earlier else ()


def report_misfire(run: Run, name: LockName, late: str) -> CallSkipped:
    """Report that a run is too late for its tick, and return the end that :func:`skip` gives it."""
    reason = f"{name}: {late}"
    logger.warning("Task %s[%s] misfired: %s", run.task.name, run.request.id, reason)
    _tell(run, "misfired", name, reason)
    return CallSkipped(reason, name.text)


def parked_entry(run: Run, name: LockName, decision: Park, rank_us: int | None) -> str:
    """The message as it will be parked; its state says so before, lest a slow process write it over the end.

    Raises:
        DLockError: It could not be published again.
    """
    if run.delivery is None or rank_us is None:
        raise AssertionError(decision)  # an eager run is never parked, and who is refused has a place
    parcel = ParkedMessage.of(
        run.delivery.raw, run.task.dlock.handover.broker, rank_us, run.delivery.conflict_retries, run.redelivered
    )
    text = parcel.text()
    copied = bool(run.delivery.is_copy or (run.request.delivery_info or {}).get("redelivered"))
    store_queued(run.task, run.request, decision.position, decision.reason, copied=copied)
    run.refused_because = decision.reason
    _tell(run, "refused", name, f"{name}: {decision.reason}")
    return text


def _await_turn(run: Run, name: LockName, answer: Refusal, reason: str) -> NoReturn:
    run.keeps_claim = True
    if isinstance(answer, Parked):
        place = f"{name}: {run.refused_because or 'it waits already'}; at place {answer.position}"
        if answer.ousted:
            itself = answer.ousted.identity == run.identity.digest  # it came late, and is the oldest
            newer = None if itself else run.request.id
            error = CallSkipped(f"{name}: a newer call took its place (queue_overflow)", name.text, newer)
            run.task.dlock.handover.evict(name, answer.ousted, error)
            if itself:
                raise Skipped(error)
        logger.info("Task %s[%s] is parked: %s", run.task.name, run.request.id, place)
        _tell(run, "queued", name, place)
        raise Postponed(place)
    raise HandledElsewhere(reason)


def apply_on_store_error(run: Run, name: LockName, error: StoreUnavailable) -> BypassLease:
    """The store did not give the lock, nor refuse it. Returns only if the body is to run without the lock.

    Where the task wants nothing else, the message comes back later; if the broker is away too, the task fails loudly.

    Raises:
        Elsewhere: The message is dealt with and is to be acknowledged.
        StoreUnavailable: The task is to fail.
    """
    policy = run.options.on_store_error
    if policy == "fail":
        raise error
    if policy == "retry":
        # A twin may have met an acquire that was taken back, and left word that went with it.
        run.maybe_duplicated = run.maybe_duplicated or isinstance(error, ReplyLost | NotConfirmed)
        # Parked with nobody hearing of it, it may have had its turn and ended by then: its arrival tells.
        _come_back(run, error, run.rank_us)
    logger.warning("Task %s[%s] runs without its lock %s: %s", run.task.name, run.request.id, name, error)
    _tell(run, "bypassed", name, str(error))
    return BypassLease(name.text, run.scope.owner)


def rerun_after_loss(run: Run, error: LockLost) -> NoReturn:
    """The body has ended because its lease was lost: the message comes back."""
    run.redelivered = False  # no end of another copy is in the way of one whose body has begun
    _come_back(run, error)


def _come_back(run: Run, error: DLockError, rank_us: int | None = None) -> NoReturn:
    """Not because of a conflict, so that it is no try.

    Args:
        run: Whose message comes back.
        error: Why.
        rank_us: When it arrived, where the store has said so; None if what comes back is to run in any case.
    """
    rank_us = rank_us if rank_us is not None or run.delivery is None else run.delivery.rank_us
    comebacks = run.delivery.store_retries if run.delivery else 0
    delay = min(COMEBACK_MAX, 2.0 ** min(comebacks, 10)) * (0.5 + 0.5 * rng.random())
    if isinstance(error, StoreQuarantined):
        delay = error.seconds + rng.random()  # when it is over, and not all at once
    _publish_again(run, rank_us, delay, error, conflict=False)
    logger.warning("Task %s[%s] comes back in %.3g s: %s", run.task.name, run.request.id, delay, error)
    raise Postponed(str(error))


def _recall(run: Run, name: LockName, first: str, otherwise: CallSkipped) -> None:
    """Go on with the first run's result, as long as the result backend has it."""
    if not has_backend(run.task):
        logger.warning("no result of %s can be returned (on_used='return'): no result backend is configured", first)
        skip(run, name, otherwise)
        return
    try:
        stored = run.task.backend.get_task_meta(first, cache=False)
    except Exception as error:  # noqa: BLE001  # whatever the backend raises, there is no result to return
        logger.warning("the result of %s is not known any more: %s", first, error)
        stored = {}
    if stored.get("status") != states.SUCCESS:
        skip(run, name, otherwise)
        return
    logger.info("Task %s[%s] returns the result of %s: %s", run.task.name, run.request.id, first, otherwise)
    _tell(run, "skipped", name, str(otherwise))
    run.skipped, run.skip_value = True, stored.get("result")


def skip(run: Run, name: LockName, error: CallSkipped) -> None:
    """End the run REVOKED, or have it return its ``skip_result`` instead of running its body.

    Raises:
        Skipped: The end is stored.
    """
    task, request = run.task, run.request
    logger.info("Task %s[%s] skipped: %s", task.name, request.id, error)
    _tell(run, "skipped", name, str(error))
    if run.options.skips_with_result:
        run.skipped, run.skip_value = True, run.options.skip_result
        return
    if run.delivery is not None:
        store_revoked(task, request, error)
        if run.delivery.monitored:
            # Ends STARTED in monitors; ours alone would leave the task running there for ever.
            task.send_event("task-revoked", terminated=False, signum=None, expired=False)
    raise Skipped(error)


def _publish_again(
    run: Run, rank_us: int | None, delay: float, otherwise: Exception, *, conflict: bool, copy: bool = False
) -> None:
    """Publish the message before this delivery is acknowledged, so that a crash between doubles it, never loses it.

    Where the broker does not take it, a delivery that is acknowledged late goes back as it is. One that was
    acknowledged on receipt can only end in failure, loudly; but not a copy of a running message, whose result it is.
    An eager run has no message: it fails with ``otherwise``.
    """
    task, delivery = run.task, run.delivery
    if delivery is None:
        raise otherwise
    try:
        publish_again(
            task.app,
            delivery,
            run.identity,
            rank_us=rank_us,
            delay=delay,
            conflict=conflict,
            doubted=run.maybe_duplicated,
            redelivered=run.redelivered,
            expires=not copy,
        )
    except Exception as error:
        logger.exception("cannot publish %s[%s] again", task.name, run.request.id)
        # What no later try can cure (a message of protocol 1, or from a fanout exchange) must not go round for ever.
        if task.acks_late and not isinstance(error, DLockError):
            time.sleep(min(delay, REQUEUE_DELAY))
            raise Reject(error, requeue=True) from error
        if copy:
            raise HandledElsewhere("a copy is lost; the result belongs to the run that it copied") from error
        raise otherwise from error
    run.keeps_claim = True


def _tell(run: Run, kind: Kind, name: LockName, reason: str) -> None:
    facts = {"task": run.task.name, "task_id": run.request.id, "reason": reason}
    run.task.dlock.listeners.tell(kind, name=name.text, owner=run.scope.owner, **facts)
