"""Options that override others one by one: those of a decorator over its base's, those of a call over its task's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from .lock_options import LockOptions, ineffective_options

__all__ = ["overridden"]

#: Options that mean nothing where the one they belong to is switched off: by that, and by the value it needs.
_FOLLOWERS: Final[Sequence[tuple[str, Callable[[Any], bool], tuple[str, ...]]]] = (
    ("on_conflict", lambda policy: policy == "queue", ("queue_limit", "queue_overflow")),
    ("on_conflict", lambda policy: policy == "wait", ("wait_timeout", "after_wait")),
    ("once_per", lambda window: window is not None, ("on_used", "after_crash")),
    ("once_per", lambda window: window == "tick", ("misfire_grace",)),
    ("unique", lambda mode: mode is not None, ("on_duplicate", "queued_ttl")),
)


def overridden(options: LockOptions, chosen: Mapping[str, Any]) -> LockOptions:
    """Return ``options`` with the fields in ``chosen`` replaced.

    A field that is not chosen and loses its meaning gets its default: ``queue_limit``, where ``on_conflict`` becomes
    ``"skip"``.

    Args:
        options: The options to start from.
        chosen: Names of options, and their values.

    Raises:
        InvalidLockOptions: A chosen value is not allowed, or not beside the others.
    """
    return dataclasses.replace(options, **{**_left_over(options, chosen), **chosen}) if chosen else options


def _left_over(options: LockOptions, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the options that lose their meaning."""
    left = {
        follower: LockOptions.default(follower)
        for option, needed, followers in _FOLLOWERS
        if option in chosen and not needed(chosen[option])
        for follower in followers
    }
    merged = {**vars(options), **left, **chosen}
    return left | {option: LockOptions.default(option) for option in ineffective_options(SimpleNamespace(**merged))}
