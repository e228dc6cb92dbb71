"""The ``eta`` and ``expires`` of a message, read by Celery's own parser."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, Final

from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["SENT_HEADER", "seconds_until", "start_delay", "with_sent_time"]

#: The header of a call under ``on_conflict="queue"``: when it was published, or its ETA if that is later. In
#: microseconds since the epoch, by the publisher's clock.
SENT_HEADER: Final = "dlock_sent"


def seconds_until(value: Any) -> float | None:
    """Return the seconds until a time, negative if it is past; None for None.

    Celery's parser is used because it reads more forms than ``datetime.fromisoformat`` does, on every Python.

    Args:
        value: The value of a header or an option: None, text in an ISO 8601 form, or a datetime.

    Raises:
        ValueError: Celery's parser cannot read the value.
    """
    if value is None:
        return None
    try:
        at = maybe_iso8601(value)
        if at is not None:
            return (maybe_make_aware(at) - datetime.now(timezone.utc)).total_seconds()
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"invalid time of type {type(value).__name__}: expected an ISO 8601 text") from error
    raise ValueError("invalid time: it is empty, expected an ISO 8601 text")


def start_delay(options: Mapping[str, Any]) -> float:
    """Return the seconds until a call may start, from the options of ``apply_async``.

    If both a countdown and an ETA are set, the countdown counts.

    Raises:
        ValueError: Celery's parser cannot read the ETA.
    """
    if options.get("countdown"):
        return max(0.0, float(options["countdown"]))
    return max(0.0, seconds_until(options.get("eta") or None) or 0.0)


def with_sent_time(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers of a call that is published now with these options of ``apply_async``."""
    delay = 0.0
    with suppress(TypeError, ValueError):  # Celery itself reports an invalid ETA
        delay = start_delay(options)
    return {**(options.get("headers") or {}), SENT_HEADER: round((time.time() + delay) * 1e6)}
