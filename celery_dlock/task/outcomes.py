"""Apply the decision about a run that did not get its lock: skip, republish, park, fail or run without the lock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from billiard.exceptions import SoftTimeLimitExceeded
from celery import states
from celery.exceptions import Ignore, Reject

from ..errors import (
    DLockError,
    LockFilesUnusable,
    LockHeld,
    NameUsed,
    StoreBusy,
    StoreQuarantined,
    StoreUnavailable,
    UnknownOutcome,
)
from ..keys.key_spec import LockName
from ..locking.lease import BypassLease
from ..messaging.message import Delivery, FirstReceipt, RawMessage, publish_again
from ..messaging.parked import ParkedMessage
from ..messaging.results import CallSkipped, has_backend, has_end, replaces_no_end, store_queued, store_revoked, try_end
from ..messaging.routing import counts_deliveries
from ..messaging.wire import NewerWireVersion
from ..store.model import Grant, Held, Parked, Queued, Refusal, Unknown, Used
from ..utils.log import log_fields, logger
from ..utils.rng import rng
from . import lock_file
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
    from .execution import Execution

__all__ = [
    "HandledElsewhere",
    "NotRepublished",
    "Postponed",
    "SelfReplaced",
    "Skipped",
    "apply_decision",
    "apply_on_store_error",
    "duplicate_entry",
    "leave_to_newer_worker",
    "parked_entry",
    "report_misfire",
    "skip",
    "store_skipped",
]


_ERRORS: Final[dict[str, type[DLockError]]] = {"held": LockHeld, "used": NameUsed, "unknown": UnknownOutcome}

#: Longest delay in seconds of a message that is republished after a store error. But if a store is in
#: quarantine, the delay is the rest of the quarantine.
STORE_RETRY_MAX = 60.0
#: Longest delay in seconds of a message that is republished for a worker of a newer version.
NEWER_WIRE_DELAY: Final = 30.0
#: Seconds to wait before a message that could not be republished is returned to the broker.
REQUEUE_DELAY = 1.0
#: Seconds for which a counted delivery is kept while its republication is refused. Then the call ends.
#: The other two values are the shortest and the longest delay between two attempts.
KEEP_FOR, KEEP_DELAY, KEEP_DELAY_MAX = 30.0, 1.0, 8.0


class Skipped(Ignore):
    """Raised to end a run that was skipped and whose result is already stored.

    Args:
        error: The stored result.
    """

    def __init__(self, error: CallSkipped) -> None:
        super().__init__(error)
        self.error = error


class HandledElsewhere(Ignore):
    """Raised to end a run whose message runs or has finished in another delivery. The exception text is the reason."""


class Postponed(HandledElsewhere):
    """Raised to end a run whose message was republished or parked. The exception text is the reason.

    The worker's main process then sends ``task-retried``. For a plain :class:`HandledElsewhere`, it sends nothing.
    """


class SelfReplaced(Ignore):
    """Raised to end a run whose task has replaced itself."""


class NotRepublished(Exception):
    """Raised if the broker refused to take a message, and the run is to ask for its lock again.

    Args:
        delay: Seconds until then.
    """

    def __init__(self, delay: float) -> None:
        super().__init__(delay)
        self.delay = delay


def apply_decision(run: Execution, name: LockName, answer: Refusal, decision: Decision) -> None:
    """Apply the policy's decision. Returns only if the task is to return ``skip_value`` without running its body.

    Raises:
        Skipped, HandledElsewhere: The message is dealt with and is to be acknowledged.
        LockHeld, NameUsed, UnknownOutcome: The task is to fail.
        NotRepublished: The broker refused the republished message. Ask for the lock again.
        Reject: The broker refused the republished message, so this delivery is requeued.
    """
    reason = f"{name}: {decision.reason}"
    facts = (reason, name.text, *_earlier_run(answer))
    if isinstance(answer, Held | Queued) or isinstance(decision, Fail):
        _emit(run, "refused", name, reason)
    _count_conflict(run, answer, decision)
    match decision:
        case Skip():
            skip(run, name, CallSkipped(*facts))
        case ReturnFirstResult(first):
            _return_first_result(run, name, first, CallSkipped(*facts))
        case DropDuplicate():
            logger.info(
                "Task %s[%s] is a duplicate and is dropped: %s", *_task_and_id(run), reason, extra=_extra(run, name)
            )
            raise HandledElsewhere(reason)
        case RetryLater(delay) | RequeueDuplicate(delay):
            duplicate = isinstance(decision, RequeueDuplicate)
            counts = isinstance(decision, RetryLater) and decision.counts
            _republish(run, name, delay, LockHeld(*facts), conflict=counts, duplicate=duplicate)
            logger.info(_REPUBLISHED, *_task_and_id(run), delay, reason, extra=_extra(run, name))
            # Postponed sends task-retried, and monitors then show RETRY. They keep one state per task id. The other
            # delivery of a duplicate is running, so they must not show RETRY for it.
            raise HandledElsewhere(reason) if duplicate else Postponed(reason)
        case AckParked():
            _acknowledge_parked(run, name, answer, reason, duplicate=decision.duplicate)
        case Fail():
            raise _ERRORS[decision.why](*facts)


#: What the metric of conflicts calls the decisions.
_CONFLICTS: Final[dict[type[Decision], str]] = {
    Skip: "skipped",
    ReturnFirstResult: "returned",
    DropDuplicate: "duplicate",
    RequeueDuplicate: "duplicate",
    RetryLater: "retried",
    AckParked: "queued",
    Fail: "raised",
}


def _count_conflict(run: Execution, answer: Refusal, decision: Decision) -> None:
    outcome = _CONFLICTS[type(decision)]
    if isinstance(decision, AckParked) and (decision.duplicate or not isinstance(answer, Parked)):
        outcome = "duplicate"  # the message runs, or is queued already
    run.runtime.counts.count("conflicts", run.task.name, outcome)
    run.runtime.spans.outcome(outcome)


#: The log line of a duplicate delivery that is parked.
_PARKED_DUPLICATE: Final = "Task %s[%s] is a duplicate and is parked, in case the running delivery dies: %s"
#: The log line of a body that runs without its lock.
_UNLOCKED: Final = "Task %s[%s] runs without its lock %s: %s"
#: The log line of each message that is republished.
_REPUBLISHED: Final = "Task %s[%s] is republished, retrying in %.3g s: %s"


def _earlier_run(answer: Refusal) -> tuple[str | None, str, float] | tuple[()]:
    """Return task id, node and start of the run that prevents this one; empty if there is none."""
    earlier = answer.by if isinstance(answer, Used | Unknown) else getattr(answer, "holder", None)
    return (earlier.task_id, earlier.node, earlier.since) if earlier else ()


def report_misfire(run: Execution, name: LockName, late: str) -> CallSkipped:
    """Report that a run is too late for its tick. Return the error to pass to :func:`skip`."""
    reason = f"{name}: {late}"
    logger.warning("Task %s[%s] misfired and is skipped: %s", *_task_and_id(run), reason, extra=_extra(run, name))
    _emit(run, "misfired", name, reason)
    run.runtime.counts.count("misfired", run.task.name)
    return CallSkipped(reason, name.text)


def parked_entry(run: Execution, name: LockName, decision: Park, rank_us: int | None) -> str:
    """Return the message as it will be parked.

    Some result backends could replace the end of the task by QUEUED. There, QUEUED is stored now, before the message is
    parked.

    Raises:
        DLockError: A message of this kind can never be published again, so it is not parked.
    """
    if run.delivery is None or rank_us is None:
        raise AssertionError(decision)  # an eager run is never parked, and the store reports a rank with each refusal
    parked = ParkedMessage.of(
        run.delivery.raw, run.task.dlock.grant_publisher.broker, rank_us, run.delivery.conflict_retries, run.redelivered
    )
    text = parked.text()
    run.refused_because = decision.reason
    if not replaces_no_end(run.task):
        _store_queued(run, name, decision.position)
    return text


def _store_queued(run: Execution, name: LockName, position: int) -> None:
    """Store QUEUED. No error decides about the call, not even a soft time limit: the message is, or will be, parked."""
    delivery, flagged = run.delivery, (run.request.delivery_info or {}).get("redelivered")
    copied = bool(run.options.replaces or (delivery and delivery.is_copy) or flagged)
    try:
        store_queued(run.task, run.request, position, run.refused_because, copied=copied)
    except Exception as error:  # noqa: BLE001  # each result backend raises errors of its own
        logger.warning(
            "Task %s[%s] waits in the queue, but its state QUEUED cannot be stored: %s", *_task_and_id(run), error,
            extra=_extra(run, name),
        )  # fmt: skip


def duplicate_entry(run: Execution, name: LockName) -> str:
    """Return a duplicate of a running message as it will be parked; "" if it cannot be parked.

    It stores no state, because the running delivery does so. It has no expiry: it must not end that run as REVOKED.
    """
    if run.delivery is None or run.rank_us is None:
        return ""
    raw = RawMessage(*run.delivery.raw)
    raw = raw._replace(headers={**raw.headers, "expires": None})
    try:
        return ParkedMessage.of(
            raw, run.task.dlock.grant_publisher.broker, run.rank_us, run.delivery.conflict_retries, run.redelivered
        ).text()
    except DLockError as error:
        logger.debug("Task %s[%s]: %s: %s", *_task_and_id(run), name, error, extra=_extra(run, name))
        return ""


def _acknowledge_parked(run: Execution, name: LockName, answer: Refusal, reason: str, *, duplicate: bool) -> NoReturn:
    run.keeps_claim = True
    if duplicate:
        logger.info(_PARKED_DUPLICATE, *_task_and_id(run), reason, extra=_extra(run, name))
    if duplicate or not isinstance(answer, Parked):
        raise HandledElsewhere(reason)
    waiting = f"{name}: {run.refused_because or 'parked already'}; position {answer.position} in the queue"
    # The store evicts the waiter with the lowest rank. That may be this message, although others were parked first.
    itself = bool(answer.evicted and answer.evicted.identity == run.identity.digest)
    if not itself:
        # The message is safe. What follows may wait for the result backend, and the acknowledgement must not.
        run.record_order()
    if run.refused_because and not run.debounces:  # a debounced call waits even if its lock is free
        _emit(run, "refused", name, f"{name}: {run.refused_because}")
    if answer.evicted:
        _end_evicted(run, name, answer.evicted, answer.newer, itself=itself)
    if run.refused_because and replaces_no_end(run.task):
        _store_queued(run, name, answer.position)
    logger.info("Task %s[%s] is parked: %s", *_task_and_id(run), waiting, extra=_extra(run, name))
    _emit(run, "queued", name, waiting)
    raise Postponed(waiting)


def _end_evicted(run: Execution, name: LockName, evicted: Grant, replaced_by: str, *, itself: bool) -> None:
    """Store the end of the waiter that was evicted when this message was parked.

    Raises:
        Skipped: This message itself was evicted.
    """
    if replaced_by:
        outcome = "replaced" if run.options.replaces else "debounced"
        error = CallSkipped(f"{name}: {outcome} by {replaced_by}", name.text, replaced_by)
        _report_replaced(run, name, evicted, outcome, str(error))
    else:
        newer = None if itself else run.request.id
        error = CallSkipped(f"{name}: replaced by a newer call (queue_overflow)", name.text, newer)
    # Under "replace", this may be a redelivered message: its body was stopped and its end stored, and then its process
    # died before the acknowledgement. Do not overwrite that end.
    keeps_end = itself and run.options.replaces
    try:
        run.task.dlock.grant_publisher.evict(name, evicted, error, keeps_end=keeps_end)
    except SoftTimeLimitExceeded:
        if itself:
            raise
        # This call is parked and will run, so its limit must not end it as a failure.
        logger.exception(
            "Task %s[%s] is parked, but its soft time limit interrupted it while it stored the end of %s, which it "
            "replaces", *_task_and_id(run), ParkedMessage.call_in(evicted.entry), extra=_extra(run, name),
        )  # fmt: skip
    if itself:
        raise Skipped(error)


def _report_replaced(run: Execution, name: LockName, evicted: Grant, outcome: str, reason: str) -> None:
    run.runtime.counts.count("conflicts", run.task.name, outcome)
    with suppress(ValueError):  # an unreadable message has no id
        task_id = ParkedMessage.read(evicted.entry).task_id
        facts = {"task": run.task.name, "task_id": task_id, "reason": reason}
        run.task.dlock.listeners.emit("skipped", name=name.text, owner=run.context.owner, **facts)


def store_skipped(run: Execution, error: CallSkipped, *, keeps_end: bool = False) -> None:
    """Store REVOKED for the run and its canvas, and tell monitors. An eager run has no result to store.

    With ``keeps_end``, an end that an earlier delivery has stored does not change.
    """
    task, request = run.task, run.request
    if run.delivery is None:
        return

    def store() -> None:
        if not (keeps_end and has_end(task, request.id)):
            store_revoked(task, request, error)

    try_end(task, request.id, store)
    if run.delivery.monitored:
        # Monitors show the task as STARTED. The signal lock_skipped alone would leave it there for ever.
        try:
            task.send_event("task-revoked", terminated=False, signum=None, expired=False)
        except SoftTimeLimitExceeded:
            raise
        except Exception as failed:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
            logger.warning("cannot send the event task-revoked of %s[%s]: %r", *_task_and_id(run), failed)


def apply_on_store_error(run: Execution, name: LockName, error: StoreUnavailable) -> BypassLease | Held:
    """Apply ``on_store_error``. Returns the lease of a body that is to run without the lock.

    By default the message is republished. If the broker is unavailable too, the log has an error. A delivery that is
    acknowledged late is then requeued. Any other one fails.

    Returns:
        The lease; with ``"local"``, the refusal if another owner on this machine holds the lock.

    Raises:
        HandledElsewhere: The message is dealt with and is to be acknowledged.
        NotRepublished: The message could not be republished. Ask for the lock again.
        Reject: The message could not be republished, so this delivery is requeued.
        StoreUnavailable: The task is to fail.
    """
    policy = run.options.on_store_error
    if policy == "retry" or isinstance(error, StoreBusy):
        # A store that is busy with this name is not away: a body without the lock could run beside another one.
        _retry_uncounted(run, name, error)
    if policy == "fail":
        raise error
    local = policy == "local"
    if local:
        try:
            refusal = lock_file.take(run, name)
        except LockFilesUnusable as unusable:
            # Do not run the body without any lock, as on_store_error="run" would.
            _retry_uncounted(run, name, StoreUnavailable(f"{error}; {unusable}"))
        if refusal is not None:
            return refusal
    text = "Task %s[%s] holds its lock %s on this machine only: %s" if local else _UNLOCKED
    logger.warning(text, *_task_and_id(run), name, error, extra=_extra(run, name))
    _emit(run, "bypassed", name, str(error), local=local)
    run.runtime.counts.count("bypassed_local" if local else "bypassed", run.task.name)
    return BypassLease(name.text, run.context.owner, local=local)


def _retry_uncounted(run: Execution, name: LockName, error: DLockError) -> NoReturn:
    """Republish the message without counting a retry, because no conflict caused it."""
    retries = run.delivery.store_retries if run.delivery else 0
    delay = min(STORE_RETRY_MAX, 2.0 ** min(retries, 10)) * (0.5 + 0.5 * rng.random())
    if isinstance(error, StoreQuarantined):
        delay = error.seconds + rng.random()  # after the quarantine, and not all messages at once
    _republish(run, name, delay, error, conflict=False)
    logger.warning(_REPUBLISHED, *_task_and_id(run), delay, f"{name}: {error}", extra=_extra(run, name))
    raise Postponed(str(error))


def leave_to_newer_worker(run: Execution, name: LockName, version: int) -> NoReturn:
    """Republish a message with its own header, because only a worker of a newer wire version can read that.

    Raises:
        NotRepublished, Postponed, Reject: As for :func:`apply_on_store_error`.
        DLockError: The broker did not take the message, which was acknowledged early: the task fails.
    """
    delay = NEWER_WIRE_DELAY * (0.5 + 0.5 * rng.random())
    newer = DLockError(f"left to a worker of a newer version: {NewerWireVersion(version)}")
    _republish(run, name, delay, newer, conflict=False)
    logger.warning(_REPUBLISHED, *_task_and_id(run), delay, f"{name}: {newer}", extra=_extra(run, name))
    raise Postponed(str(newer))


def _return_first_result(run: Execution, name: LockName, first: str, otherwise: CallSkipped) -> None:
    """Have the run return the first run's result. If the result backend does not have it, skip the run."""
    stored = _stored_success(run, name, first)
    if stored is None:
        skip(run, name, otherwise)
        return
    logger.info(
        "Task %s[%s] returns the result of %s: %s", *_task_and_id(run), first, otherwise, extra=_extra(run, name)
    )  # fmt: skip
    _emit(run, "skipped", name, str(otherwise))
    run.skipped, run.skip_value = True, stored.get("result")


def _stored_success(run: Execution, name: LockName, first: str) -> Mapping[str, Any] | None:
    """Return what the result backend has of the success of the task ``first``; None, mostly after a log line."""
    why: object = "no result backend is configured"
    if has_backend(run.task):
        try:
            stored: Mapping[str, Any] = run.task.backend.get_task_meta(first, cache=False)
        except Exception as error:  # noqa: BLE001  # the backend may raise anything, and then there is no result to return
            why = error
        else:
            return stored if stored.get("status") == states.SUCCESS else None
    logger.warning(
        "Task %s[%s] cannot return the result of %s (on_used='return') and is skipped: %s",
        *_task_and_id(run), first, why, extra=_extra(run, name),
    )  # fmt: skip
    return None


def skip(run: Execution, name: LockName, error: CallSkipped) -> None:
    """End the run REVOKED, or have it return its ``skip_result`` in place of running its body.

    Raises:
        Skipped: The end is stored.
    """
    logger.info("Task %s[%s] skipped: %s", *_task_and_id(run), error, extra=_extra(run, name))
    _emit(run, "skipped", name, str(error))
    if run.options.skips_with_result:
        run.skipped, run.skip_value = True, run.options.skip_result
        return
    store_skipped(run, error)
    raise Skipped(error)


def _republish(
    run: Execution,
    name: LockName,
    delay: float,
    otherwise: Exception,
    *,
    conflict: bool,
    duplicate: bool = False,
) -> None:
    """Publish the message again. This happens before the acknowledgement, so that a crash cannot lose the message.

    The message carries when it was first received, as its rank or by this worker's clocks. If another copy of it ends
    in the meantime, the store compares that time with the done mark, and drops this copy.

    If the broker refuses the message and the task acknowledges late, the delivery is rejected and requeued. But if the
    broker drops a message that is requeued too often, the delivery is kept instead (:func:`_keep`). If the delivery was
    acknowledged early, the task fails with ``otherwise``. But a duplicate that was acknowledged early is dropped,
    because the running delivery stores the result. An eager run has no message, so it fails with ``otherwise``.
    """
    task, delivery = run.task, run.delivery
    if delivery is None:
        raise otherwise
    try:
        publish_again(
            task.app,
            delivery,
            run.identity,
            rank_us=run.known_rank_us,
            first_receipt=FirstReceipt.of(delivery, run.runtime.clock),
            delay=delay,
            conflict=conflict,
            redelivered=run.redelivered,
            expires=not duplicate,
        )
    except Exception as error:
        # A message that can never be published (protocol 1, fanout exchange) must not be requeued for ever.
        requeues = task.acks_late and not isinstance(error, DLockError)
        if requeues and _requeue_is_counted(run, delivery):
            _keep(run, name, error, duplicate=duplicate)
            requeues = False
        logger.exception(
            "Task %s[%s] cannot be republished; %s", *_task_and_id(run),
            "the broker requeues it" if requeues else "this copy is dropped" if duplicate else "it fails",
            extra=_extra(run, name),
        )  # fmt: skip
        if requeues:
            time.sleep(min(delay, REQUEUE_DELAY))
            raise Reject(error, requeue=True) from error
        if duplicate:
            raise HandledElsewhere("this copy is dropped: the running copy has the result") from error
        raise otherwise from error
    run.keeps_claim = True


def _requeue_is_counted(run: Execution, delivery: Delivery) -> bool:
    # If the connection was lost, the broker has counted and delivered the message again. A requeue then does nothing.
    queues, lost = run.task.app.amqp.queues, delivery.delivered <= run.runtime.disconnected_at
    return not lost and counts_deliveries(queues, RawMessage(*delivery.raw), run.request.delivery_info or {})


def _keep(run: Execution, name: LockName, error: Exception, *, duplicate: bool) -> None:
    """Have the run ask for its lock again, while it keeps its delivery. Return if the call is to end.

    A duplicate of a running message is kept as long as that one runs. If it ended here and the running one died, the
    message would be lost.
    """
    now = run.runtime.clock.monotonic()
    if run.refused_since is None:
        run.refused_since = now
    if duplicate:  # the time does not count, but the delay grows
        run.refused_since = max(run.refused_since, now - KEEP_DELAY_MAX)
    kept = now - run.refused_since
    # About doubles the time. Calls that were refused together must not ask together: only one would get the lock.
    delay = min(KEEP_DELAY_MAX, max(KEEP_DELAY, kept)) * (0.5 + 0.5 * rng.random())
    if kept + delay > KEEP_FOR:
        return
    logger.warning(
        "Task %s[%s] cannot be republished, keeping its delivery and asking for the lock again in %.3g s: %r",
        *_task_and_id(run), delay, error, extra=_extra(run, name),
    )  # fmt: skip
    raise NotRepublished(delay) from error


def _task_and_id(run: Execution) -> tuple[str, str]:
    return run.task.name, run.request.id


def _extra(run: Execution, name: LockName) -> dict[str, str | None]:
    return log_fields(run.task.name, run.request.id, name.text)


def _emit(run: Execution, kind: Kind, name: LockName, reason: str, *, local: bool = False) -> None:
    facts = {"task": run.task.name, "task_id": run.request.id, "reason": reason, "local": local}
    run.task.dlock.listeners.emit(kind, name=name.text, owner=run.context.owner, **facts)
