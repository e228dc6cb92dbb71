"""Parts of lock names."""

from __future__ import annotations

from typing import Any

from celery_dlock.keys.key_spec import KeySpec


def name_text(of: KeySpec, *args: Any, **kwargs: Any) -> str:
    """Return the lock name of a call."""
    return of.name_of(args, kwargs).text


def without_digest(text: str) -> str:
    """Return the readable part of a lock name."""
    return text.rpartition(":")[0]
