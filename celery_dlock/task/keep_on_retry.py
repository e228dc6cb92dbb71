"""The lock of a run that retries itself is reserved for the retry (``keep_on_retry``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DLockError
from ..messaging.message_times import start_delay
from ..store.model import Identity
from .call_options import ARGUMENT, call_of, headers_for

if TYPE_CHECKING:
    from celery.exceptions import Retry

    from .run import Run

__all__ = ["RetryReservation", "reservation_for_retry"]


class RetryReservation(NamedTuple):
    """A lock that is reserved for a retry.

    Args:
        identity: The digest of the retry's message identity.
        life_ms: Milliseconds until the reservation expires.
    """

    identity: str
    life_ms: int


def reservation_for_retry(run: Run, published: Retry) -> RetryReservation | None:
    """Return the reservation of a run's lock for its published retry; None if the lock is released.

    The retry may have other arguments or options than the run. It then takes another lock, or none.
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
        delay = start_delay(options)
    except (DLockError, ValueError):
        return None  # the retry itself will fail with this error
    identity = Identity.of(options["task_id"], options)
    return RetryReservation(identity.digest, round((delay + lease.ttl) * 1000))
