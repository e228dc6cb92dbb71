"""Checks of options against one another, beyond the table of :mod:`.requirements`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .validation import as_seconds, invalid_value, unmet_requirement

if TYPE_CHECKING:
    from .lock_options import LockOptions

__all__ = ["check_combinations"]

#: A renewal can wait for the disks of replicas only with a ttl of this many seconds or more.
DISKS_TTL: Final = 15.0


def check_combinations(options: LockOptions) -> None:
    """Check options whose values are valid, each on its own.

    Raises:
        InvalidLockOptions: Two options contradict each other.
    """
    if options.scope == "shared" and options.key is None:
        raise unmet_requirement("scope", options.scope, "key, because without a key there is no name to share")
    if as_seconds(options.retry_delay_max) < as_seconds(options.retry_delay):
        raise invalid_value(
            "retry_delay", options.retry_delay, f"seconds up to retry_delay_max ({options.retry_delay_max})"
        )
    if options.max_hold is not None and as_seconds(options.max_hold) < as_seconds(options.min_hold):
        raise invalid_value("max_hold", options.max_hold, f"None or seconds from min_hold ({options.min_hold})")
    _check_queue(options)
    _check_window(options)
    _check_store_error(options)
    _check_durability(options)


def _check_queue(options: LockOptions) -> None:
    overflow, limit = options.queue_overflow, options.queue_limit
    if overflow == "keep_latest" and limit not in (None, 1):
        raise invalid_value("queue_limit", limit, "None or 1 with queue_overflow='keep_latest'")
    if overflow in ("skip", "drop_oldest") and limit is None:
        raise unmet_requirement("queue_overflow", overflow, "a queue_limit")


def _check_window(options: LockOptions) -> None:
    # If the message of a claimed call is lost, its name would stay taken for longer than after a success.
    window: object = options.once_per
    if options.claims and isinstance(window, float) and window < as_seconds(options.queued_ttl):
        raise invalid_value(
            "once_per",
            window,
            f"at least queued_ttl ({options.queued_ttl}) with unique={options.unique!r}; "
            f"raise it, or lower queued_ttl to {window:g} or less",
        )


def _check_store_error(options: LockOptions) -> None:
    if options.on_store_error != "run":
        return
    reasons = {
        "on_lost='abort', because a body without a lock has no lease to lose": options.on_lost == "abort",
        "once_per, because only the store can record a success": options.once_per is not None,
        # Its entry would stay in the queue, and the call would run once more when it is granted.
        "on_conflict='queue', because the call may already wait in the store": options.on_conflict == "queue",
    }
    for reason, holds in reasons.items():
        if holds:
            raise invalid_value("on_store_error", "run", f"'retry' or 'fail' with {reason}")


def _check_durability(options: LockOptions) -> None:
    durability = options.confirmation
    if durability is not None and durability.fsync and durability.replicas and as_seconds(options.ttl) < DISKS_TTL:
        needed = f"a ttl of at least {DISKS_TTL:g}, because a replica reports once a second what it wrote to disk"
        raise unmet_requirement("durability", options.durability, needed)
