"""The retry of a run, for which its lock is kept (``keep_on_retry``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DLockError
from ..messaging.message_times import seconds_until
from ..store.model import Identity
from .call_options import ARGUMENT, call_of, headers_for

if TYPE_CHECKING:
    from celery.exceptions import Retry

    from .run import Run

__all__ = ["RetryReservation", "reservation_for_retry"]


class RetryReservation(NamedTuple):
    """Who takes the lock next.

    Args:
        identity: Of the retry's message: its digest.
        life_ms: Milliseconds that the lock is kept for it.
    """

    identity: str
    life_ms: int


def reservation_for_retry(run: Run, published: Retry) -> RetryReservation | None:
    """For whom a run keeps its lock, once its retry is published; None where it does not.

    The retry may have other arguments, or options of its own, and so another lock or none.
    """
    signature: Any = published.sig  # type: ignore[attr-defined]  # missing in the stubs
    lease = run.lease
    if not run.options.keep_on_retry or run.delivery is None or lease is None or signature is None:
        return None
    options = signature.options
    headers, chosen = options.get("headers"), options.get(ARGUMENT)
    try:
        call = call_of(run.task, headers if chosen is None else headers_for(run.task, chosen, headers))
        if not call.enabled or call.name_of(signature.args, signature.kwargs).text != lease.name:
            return None
        delay = _delay(options)
    except (DLockError, ValueError):
        return None  # it will say so itself
    identity = Identity(options["task_id"], options["retries"], options.get("replaced_task_nesting") or 0)
    return RetryReservation(identity.digest, round((delay + lease.ttl) * 1000))


def _delay(options: dict[str, Any]) -> float:
    """Until the retry starts at the earliest; as Celery reads it, the countdown comes first."""
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown or not eta:
        return max(0.0, float(countdown or 0))
    return max(0.0, seconds_until(eta) or 0.0)
