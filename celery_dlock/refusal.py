"""What becomes of a task that did not get its lock."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, NoReturn

from celery.exceptions import Ignore, Reject

from .conflict import Again, Await, Decision, Drop, Fail, Park, PutBack, Skip
from .errors import DLockError, LockHeld, StoreUnavailable
from .keys import LockName
from .message import publish_again
from .parcel import Parcel
from .records import Held, Parked, Queued, Refusal
from .results import end_revoked, store_queued

if TYPE_CHECKING:
    from .events import Kind
    from .execution import Execution

__all__ = ["Skipped", "carry_out", "parcel_text", "store_away"]

logger = logging.getLogger("celery_dlock")

#: Longest delay of a message that comes back because the store did not answer, in seconds.
STORE_DELAY_MAX = 60.0
#: Seconds to hold a message that the broker did not take, before it goes back to it.
REQUEUE_DELAY = 1.0


class Skipped(Ignore):
    """Ends a trace with whose message we have dealt; ``str()`` of it is the reason."""


def carry_out(run: Execution, name: LockName, answer: Refusal, decision: Decision) -> None:
    """Do what was decided. Returns only if the run goes on with the ``skip_result`` instead of its body.

    Raises:
        Skipped: The message is dealt with and is to be acknowledged.
        LockHeld: The task is to fail.
    """
    reason = f"{name}: {decision.reason}"
    task, task_id = run.task, run.request.id
    holder = answer.holder if isinstance(answer, Held | Queued) else None
    held = LockHeld(reason, name.text, *((holder.task_id, holder.node, holder.since) if holder else ()))
    if isinstance(answer, Held | Queued):
        _tell(run, "refused", name, reason)
    match decision:
        case Skip():
            _skip(run, name, reason)
        case Drop():
            logger.info("Task %s[%s] is a duplicate: %s", task.name, task_id, reason)
            raise Skipped(reason)
        case Again(delay) | PutBack(delay):
            rank_us = answer.rank_us if isinstance(answer, Held | Queued) else None
            _publish_again(run, rank_us, delay, held, copy=isinstance(decision, PutBack))
            logger.info("Task %s[%s] comes back in %.3g s: %s", task.name, task_id, delay, reason)
            raise Skipped(reason)
        case Await():
            _await_turn(run, name, answer, reason)
        case Fail():
            raise held


def parcel_text(run: Execution, name: LockName, decision: Park, rank_us: int | None) -> str:
    """The message as it will be parked; its state says so before, lest a slow process write it over the end.

    Raises:
        DLockError: It could not be published again.
    """
    if run.delivery is None or rank_us is None:
        raise AssertionError(decision)  # an eager run is never parked, and who is refused has a place
    parcel = Parcel.of(run.delivery.raw, run.task.dlock.handover.broker, rank_us, run.delivery.tries)
    text = parcel.text()
    copied = bool(run.delivery.tries or (run.request.delivery_info or {}).get("redelivered"))
    store_queued(run.task, run.request, decision.position, decision.reason, copied=copied)
    run.refused_because = decision.reason
    _tell(run, "refused", name, f"{name}: {decision.reason}")
    return text


def _await_turn(run: Execution, name: LockName, answer: Refusal, reason: str) -> NoReturn:
    if isinstance(answer, Parked):
        place = f"{name}: {run.refused_because or 'it waits already'}; at place {answer.position}"
        if answer.ousted:
            run.task.dlock.handover.oust(name, answer.ousted, "a newer call took its place (queue_overflow)")
        if not answer.ousted or answer.ousted.identity != run.identity.digest:
            logger.info("Task %s[%s] is parked: %s", run.task.name, run.request.id, place)
            _tell(run, "queued", name, place)
    raise Skipped(reason)


def store_away(run: Execution, error: StoreUnavailable) -> NoReturn:
    """The store did not answer: the message comes back later. If the broker is away too, the task fails loudly."""
    tries = run.delivery.tries if run.delivery else 0
    delay = min(STORE_DELAY_MAX, 2.0 ** min(tries, 10)) * (0.5 + 0.5 * random.random())  # noqa: S311  # spreads retries
    _publish_again(run, run.delivery.rank_us if run.delivery else None, delay, error)
    logger.warning("Task %s[%s] comes back in %.3g s: %s", run.task.name, run.request.id, delay, error)
    raise Skipped(str(error))


def _skip(run: Execution, name: LockName, reason: str) -> None:
    task, request = run.task, run.request
    logger.info("Task %s[%s] skipped: %s", task.name, request.id, reason)
    _tell(run, "skipped", name, reason)
    if task.lock_options.skips_with_result:
        run.skipped = True
        return
    if run.delivery is not None:
        end_revoked(task, request, reason)
        if run.delivery.monitored:
            # Ends STARTED in monitors; ours alone would leave the task running there for ever.
            task.send_event("task-revoked", terminated=False, signum=None, expired=False)
    raise Skipped(reason)


def _publish_again(
    run: Execution, rank_us: int | None, delay: float, otherwise: Exception, *, copy: bool = False
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
        publish_again(task.app, delivery, run.identity, rank_us=rank_us, delay=delay, expires=not copy)
    except Exception as error:
        logger.exception("cannot publish %s[%s] again", task.name, run.request.id)
        # What no later try can cure (a message of protocol 1, or from a fanout exchange) must not go round for ever.
        if task.acks_late and not isinstance(error, DLockError):
            time.sleep(min(delay, REQUEUE_DELAY))
            raise Reject(error, requeue=True) from error
        if copy:
            raise Skipped("a copy is lost; the result belongs to the run that it copied") from error
        raise otherwise from error


def _tell(run: Execution, kind: Kind, name: LockName, reason: str) -> None:
    facts = {"task": run.task.name, "task_id": run.request.id, "reason": reason}
    run.task.dlock.listeners.tell(kind, name=name.text, owner=run.scope.owner, **facts)
