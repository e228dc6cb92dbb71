"""The ``eta`` and ``expires`` of a message, read by Celery's own parser."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["seconds_until", "start_delay"]


def seconds_until(value: Any) -> float | None:
    """Return the seconds until the time that a message names, negative once it is past; None if it names none.

    Celery reads forms that ``datetime.fromisoformat`` refuses, and which ones depends on the version of Python.

    Args:
        value: What stands in a header or an option: None, text in an ISO 8601 form, or a datetime.

    Raises:
        ValueError: Celery cannot read it either.
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
    """Return the seconds until a call may start, from the options of ``apply_async``. A countdown precedes an ETA.

    Raises:
        ValueError: Celery cannot read the ETA either.
    """
    if options.get("countdown"):
        return max(0.0, float(options["countdown"]))
    return max(0.0, seconds_until(options.get("eta") or None) or 0.0)
