"""The requests that one run sends to the store: to acquire, to wait in the queue, to release, and to reserve the lock.

Pure functions of a :class:`~celery_dlock.task.execution.Execution`, apart from the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DLockError
from ..messaging.message import FirstReceipt, RawMessage, sent_us
from ..messaging.message_times import start_delay
from ..options.durations import as_seconds
from ..store.base import ReleaseRequest
from ..store.model import IN_PLACE, NO_RETRY, RETRY, AcquireRequest, Debounce, Identity, QueueRequest, Replace
from .call_options import ARGUMENT, call_of, headers_for

if TYPE_CHECKING:
    from celery.exceptions import Retry

    from .execution import Execution

__all__ = [
    "RetryReservation",
    "acquire_request",
    "queue_request",
    "release_request",
    "reservation_for_retry",
    "rollback_request",
    "run_window",
]

#: Longest body in seconds that the run mark of a dead run (``once_per``) allows for, if the task has no ``max_hold``.
LONGEST_BODY = 24 * 3600.0


def run_window(run: Execution) -> tuple[int, str]:
    """Return the ``once_per`` window in milliseconds (0: none), and the tick it is for ("": any)."""
    once = run.options.once_per
    if once is None or (once == "tick" and run.tick is None):
        return 0, ""  # a call by hand is for no tick
    return round((run.options.once_seconds or 0.0) * 1000), run.tick.digest if run.tick else ""


def acquire_request(run: Execution) -> AcquireRequest:
    """Return the request for the run's lock. Sets the run's ``redelivered``."""
    delivery, options, runtime = run.delivery, run.options, run.runtime
    settings = runtime.settings
    info = run.request.delivery_info
    flagged = bool(info and info.get("redelivered"))
    doubt_us = 0
    if delivery is None:
        age_us, rank_us, republished = 0, None, flagged
    else:
        now, delivered, rank_us = runtime.clock.monotonic(), delivery.delivered, delivery.rank_us
        # After the visibility timeout, or after a lost connection, the broker has delivered the message again. That
        # holds for messages that are acknowledged late and for those that wait for their ETA.
        limit = settings.doubtful_after
        overdue = (limit is not None and now - delivered >= limit) or delivered <= runtime.disconnected_at
        # If the broker did not receive the acknowledgement of a republished message, it delivers the original again.
        republished = overdue or flagged or delivery.is_copy
        age_us = max(0, round((now - delivery.since) * 1e6))
        if republished:
            # A copy that carries the time of its first receipt is judged by that time, even if the broker flags the
            # copy itself. The original may have been the first message of its id to be sent after an earlier end.
            dated = rank_us is not None or delivery.first_receipt is not None
            run.redelivered = delivery.redelivered or (flagged and not dated)
            if delivery.first_receipt is not None:
                age, doubt = FirstReceipt(*delivery.first_receipt).age(runtime.clock)
                age_us, doubt_us = max(age_us, round(age * 1e6)), round(doubt * 1e6)
    request = AcquireRequest(
        run.context.requester,
        run.identity,
        redelivered=run.redelivered,
        republished=republished,
        age_us=age_us,
        rank_us=rank_us,
        doubt_us=doubt_us,
    )
    if options.is_simple:
        return request
    window_ms, tick = run_window(run)
    return request._replace(
        once=window_ms > 0,
        tick=tick,
        run_mark_ms=_run_mark_ms(run, window_ms) if window_ms else 0,
        hold_if_unknown=options.after_crash == "hold",
        notify=bool(options.wait),
        min_hold_ms=round(as_seconds(options.min_hold) * 1000) if options.min_hold else 0,
        queue=queue_request(run) if run.queues else None,
    )


def queue_request(run: Execution, entry: str = "") -> QueueRequest:
    """Return the queue part of the request to acquire.

    Args:
        run: The run.
        entry: The text to park; "" to ask for the lock only.
    """
    delivery, options = run.delivery, run.options
    predecessor = delivery.predecessor if delivery else 0
    evicts_oldest = options.queue_overflow == "drop_oldest"
    after_us = run.runtime.receive_order.rank_us(predecessor) if predecessor else 0
    grant_id = delivery.grant_id if delivery else ""
    if options.replaces:
        repeats = RETRY if run.identity.retries else IN_PLACE if run.identity.nesting else NO_RETRY
        return QueueRequest(entry, after_us=after_us, grant_id=grant_id, replace=Replace(repeats=repeats))
    if run.debounces:
        return QueueRequest(entry, after_us=after_us, grant_id=grant_id, debounce=_debounce(run))
    sent = sent_us(RawMessage(*delivery.raw).headers) if delivery else 0
    return QueueRequest(entry, options.queue_limit or 0, evicts_oldest, after_us, grant_id, sent_us=sent)


def _debounce(run: Execution) -> Debounce:
    """Return what is left of ``debounce``. The time until an ETA counts."""
    wait_ms, last_ms = run.options.debounce_ms
    delivery = run.delivery
    waited_ms = round((delivery.since - delivery.delivered) * 1000) if delivery else 0
    return Debounce(max(0, wait_ms - waited_ms), last_ms)


def rollback_request(run: Execution) -> ReleaseRequest | None:
    """Return the release of an acquisition whose outcome is unknown and whose body has not begun.

    None if the run has no run mark, so that the release of every such acquisition fits.
    """
    window_ms, tick = run_window(run)
    if not window_ms:
        return None
    return ReleaseRequest(
        identity=run.identity.digest,
        outcome_unknown=True,
        rolled_back=True,
        once=True,
        tick=tick,
        window_ms=window_ms,
    )


def release_request(run: Execution, *, final: bool, success: bool, died: bool) -> ReleaseRequest:
    """Return the release at the end of the run.

    Args:
        run: The run.
        final: The message's identity has ended and must not run again.
        success: The run ended as a success.
        died: The run was unwound from outside, so how far its body got is unknown.
    """
    request = ReleaseRequest(final, run.identity.digest, queue=run.queues)
    if not run.options.marks_release:
        return request
    if run.options.replaces:
        return request._replace(replace="stopped" if run.was_stopped else "ended")
    window_ms, tick = run_window(run)
    if not window_ms or (died and not run.returned):
        return request
    succeeded = (success or run.returned) and not (run.lease and run.lease.settled)
    return request._replace(
        used_ms=window_ms if succeeded else 0,
        requester=run.context.requester.text,
        once=True,
        tick=tick,
        seed=run.lease.seed if run.lease else "",
        window_ms=window_ms,
    )


def _run_mark_ms(run: Execution, window_ms: int) -> int:
    """Return how long the run mark lives from the start of the body: a whole window after the body's death."""
    longest = run.options.max_hold
    return window_ms + round((LONGEST_BODY if longest is None else as_seconds(longest)) * 1000)


class RetryReservation(NamedTuple):
    """A lock that is reserved for a retry.

    Args:
        identity: The digest of the retry's message identity.
        life_ms: Milliseconds until the reservation expires.
    """

    identity: str
    life_ms: int


def reservation_for_retry(run: Execution, published: Retry) -> RetryReservation | None:
    """Return the reservation of a run's lock for its published retry; None if the lock is released.

    The retry may have other arguments or options than the run. It then takes another lock, or none.
    """
    signature: Any = published.sig  # type: ignore[attr-defined]  # missing in the stubs
    lease = run.lease
    if not run.options.keep_on_retry or run.delivery is None or lease is None or signature is None:
        return None
    options = signature.options
    try:
        call = call_of(run.task, headers_for(run.task, options.get(ARGUMENT), options.get("headers")))
        if not call.enabled or call.name_of(signature.args, signature.kwargs).text != lease.name:
            return None
        delay = start_delay(options)
    except (DLockError, ValueError):
        return None  # the retry itself will fail with this error
    identity = Identity.of(options["task_id"], options)
    return RetryReservation(identity.digest, round((delay + lease.ttl) * 1000))
