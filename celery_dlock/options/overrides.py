"""Override single options: those of a base class by a decorator, those of a task by a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from .lock_options import OPTIONS, LockOptions, ineffective_options

__all__ = ["overridden"]


def overridden(options: LockOptions, chosen: Mapping[str, Any]) -> LockOptions:
    """Return ``options`` with the fields in ``chosen`` replaced.

    If an option is not chosen and has no effect beside the chosen ones, it returns to its default. For example, if
    ``on_conflict`` becomes ``"skip"``, ``queue_limit`` becomes None.

    Args:
        options: The options to start from.
        chosen: Names of options, and their values.

    Raises:
        InvalidLockOptions: A chosen value is invalid, or contradicts another option.
    """
    if not chosen:
        return options
    merged = SimpleNamespace(**{**vars(options), **chosen})
    reset = {option: OPTIONS[option].default for option in ineffective_options(merged)}
    return dataclasses.replace(options, **{**reset, **chosen})
