"""Checks of options against one another, beyond the table of :mod:`.requirements`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .durations import as_seconds
from .error_texts import invalid_value, unmet_requirement

if TYPE_CHECKING:
    from .lock_options import LockOptions

__all__ = ["check_combinations"]


def check_combinations(options: LockOptions) -> None:
    """Check options against one another. Each value by itself is already known to be valid.

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
        raise invalid_value("max_hold", options.max_hold, f"None or at least min_hold ({options.min_hold})")
    _check_queue(options)
    _check_debounce(options)
    _check_limit(options)
    _check_replace(options)
    _check_window(options)
    _check_store_error(options)


def _refuse_first(option: str, value: object, expected: str, reasons: Mapping[str, bool]) -> None:
    """Raise the error for the first reason that holds.

    Args:
        option: The name of the option.
        value: Its value.
        expected: The values that the option may have, with ``{}`` for the reason.
        reasons: The choices of other options, and whether each is made.
    """
    for reason, holds in reasons.items():
        if holds:
            raise invalid_value(option, value, expected.format(reason))


def _check_queue(options: LockOptions) -> None:
    overflow, limit = options.queue_overflow, options.queue_limit
    if overflow in ("skip", "drop_oldest") and limit is None:
        raise unmet_requirement("queue_overflow", overflow, "a queue_limit")


def _check_debounce(options: LockOptions) -> None:
    if options.debounce is None:
        return
    reasons = {
        "queue_limit, because only the newest call waits": options.queue_limit is not None,
        "unique, because unique keeps the first call and debounce the last one": options.claims,
        "once_per='tick', because each tick is to run": options.once_per == "tick",
        "wait, because the call waits in the lock store from the start": bool(options.wait),
    }
    _refuse_first("debounce", options.debounce, "None with {}", reasons)


def _check_limit(options: LockOptions) -> None:
    if options.limit == 1:
        return
    reasons = {
        "on_conflict='replace', because it leaves one call to run; use another policy": options.replaces,
        "once_per, because a name has one run mark and not one for each seat; remove one of the two": (
            options.once_per is not None
        ),
        "unique='queued+running', because it lets one call run; use unique='queued'": (
            options.unique == "queued+running"
        ),
        "debounce, because it leaves one call to run; remove one of the two": options.debounce is not None,
    }
    _refuse_first("limit", options.limit, "1 with {}", reasons)


def _check_replace(options: LockOptions) -> None:
    if options.on_conflict != "replace":
        return
    reasons = {
        "once_per, because a stopped body has not succeeded, and its name must not stay used": (
            options.once_per is not None
        ),
        "keep_on_retry, because the newest call must not wait for the retry of an older one": (options.keep_on_retry),
        "unique, because unique keeps the first call and replace the last one": options.claims,
    }
    _refuse_first("on_conflict", "replace", "another policy with {}. Remove one of the two", reasons)


def _check_window(options: LockOptions) -> None:
    # A lost message blocks its name for queued_ttl. That time must not be longer than once_per, the block after a
    # success.
    window: object = options.once_per
    if options.claims and isinstance(window, float) and window < as_seconds(options.queued_ttl):
        raise invalid_value(
            "once_per",
            window,
            f"at least queued_ttl ({options.queued_ttl}) with unique={options.unique!r}; "
            f"raise it, or lower queued_ttl to {window:g} or less",
        )


def _check_store_error(options: LockOptions) -> None:
    policy = options.on_store_error
    if policy not in ("run", "local"):
        return
    if policy == "local":
        _check_lock_files(options)
    reasons = {
        "on_lost='abort', because a body without a lock has no lease to lose": options.on_lost == "abort",
        "once_per, because only the store can record a success": options.once_per is not None,
        # If a waiting call ran without the lock, its queue entry would remain and run the call once more.
        f"on_conflict={options.on_conflict!r}, because the call may already wait in the store": options.parks,
    }
    _refuse_first("on_store_error", policy, "'retry' or 'fail' with {}", reasons)


def _check_lock_files(options: LockOptions) -> None:
    reasons = {
        "with a limit above 1, because a machine has one lock file for each name": options.limit > 1,
        "on this platform, which has no flock for lock files": find_spec("fcntl") is None,
    }
    _refuse_first("on_store_error", "local", "'retry', 'fail' or 'run' {}", reasons)
