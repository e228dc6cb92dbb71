"""The requests that one run sends to the store: to acquire, to wait in the queue, and to release.

Pure functions of a :class:`~celery_dlock.task.run.Run`, apart from the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..options.validation import as_seconds
from ..store.base import ReleaseRequest
from ..store.model import AcquireRequest, QueueRequest

if TYPE_CHECKING:
    from .run import Run

__all__ = ["acquire_request", "queue_request", "release_request", "rollback_request", "run_window"]

#: Longest body in seconds that the run mark of a dead run (``once_per``) allows for, if the task has no ``max_hold``.
LONGEST_BODY = 24 * 3600.0


def run_window(run: Run) -> tuple[int, str]:
    """Return the ``once_per`` window in milliseconds (0: none), and the tick it is for ("": any)."""
    once = run.options.once_per
    if once is None or (once == "tick" and run.tick is None):
        return 0, ""  # a call by hand is for no tick
    return round((run.options.once_seconds or 0.0) * 1000), run.tick.digest if run.tick else ""


def acquire_request(run: Run, window_ms: int, tick: str) -> AcquireRequest:
    """Return the request for the run's lock. Sets the run's ``maybe_duplicated`` and ``redelivered``."""
    delivery, runtime, options = run.delivery, run.runtime, run.options
    now = runtime.clock.monotonic()
    # After the visibility timeout, or after a lost connection, the broker has delivered the message again. That holds
    # for messages that are acknowledged late and for those that wait for their ETA.
    limit = runtime.settings.doubtful_after
    overdue = delivery is not None and (
        (limit is not None and now - delivery.delivered >= limit) or delivery.delivered <= runtime.disconnected_at
    )
    flagged = bool((run.request.delivery_info or {}).get("redelivered"))
    run.maybe_duplicated = overdue or flagged or bool(delivery and delivery.maybe_duplicated)
    # A copy that carries a rank is judged by that rank, even if the broker flags the copy itself. The original may have
    # been the first message of its id to be sent after an earlier end.
    run.redelivered = bool(delivery and (delivery.redelivered or (flagged and delivery.rank_us is None)))
    return AcquireRequest(
        run.scope.requester,
        run.identity,
        redelivered=run.redelivered,
        # The original of a copy was acknowledged before, unless it is acknowledged late.
        republished=run.maybe_duplicated or bool(delivery and delivery.is_copy and (run.task.acks_late or run.queues)),
        age_us=max(0, round((now - delivery.since) * 1e6)) if delivery else 0,
        rank_us=delivery.rank_us if delivery else None,
        once=window_ms > 0,
        tick=tick,
        run_mark_ms=_run_mark_ms(run, window_ms) if window_ms else 0,
        hold_if_unknown=options.after_crash == "hold",
        min_hold_ms=round(as_seconds(options.min_hold) * 1000) if options.min_hold else 0,
        queue=queue_request(run) if run.queues else None,
        durability=runtime.settings.confirmed_by(options.confirmation),
    )


def queue_request(run: Run, entry: str = "") -> QueueRequest:
    """Return the queue part of the request to acquire.

    Args:
        run: The run.
        entry: The text to park; "" to ask for the lock only.
    """
    delivery, options = run.delivery, run.options
    predecessor = delivery.predecessor if delivery else 0
    ousts = options.queue_overflow in ("drop_oldest", "keep_latest")
    after_us = run.runtime.receive_order.rank_us(predecessor) if predecessor else 0
    return QueueRequest(entry, options.most_waiting, ousts, after_us, delivery.grant_id if delivery else "")


def rollback_request(run: Run, window_ms: int, tick: str) -> ReleaseRequest:
    """Return the release of an acquisition whose outcome is unknown and whose body has not begun."""
    return ReleaseRequest(
        identity=run.identity.digest,
        outcome_unknown=True,
        rolled_back=True,
        once=True,
        tick=tick,
        window_ms=window_ms,
    )


def release_request(run: Run, *, final: bool, success: bool, died: bool) -> ReleaseRequest:
    """Return the release at the end of the run.

    Args:
        run: The run.
        final: The message's identity has ended and must not run again.
        success: The run ended as a success.
        died: The run was unwound from outside, so how far its body got is unknown.
    """
    request = ReleaseRequest(final, run.identity.digest, queue=run.queues)
    if run.options.once_per is None:
        return request
    window_ms, tick = run_window(run)
    if not window_ms or (died and not run.returned):
        return request
    return request._replace(
        used_ms=window_ms if success or run.returned else 0,
        requester=run.scope.requester.text,
        once=True,
        tick=tick,
        seed=run.lease.seed if run.lease else "",
        window_ms=window_ms,
    )


def _run_mark_ms(run: Run, window_ms: int) -> int:
    """Return how long the run mark lives from the start of the body: a whole window after the body's death."""
    longest = run.options.max_hold
    return window_ms + round((LONGEST_BODY if longest is None else as_seconds(longest)) * 1000)
