"""The options of a singleton task in words."""

from __future__ import annotations

from ..options.lock_options import OPTIONS, LockOptions

__all__ = ["option_lines"]


def option_lines(options: LockOptions) -> list[str]:
    """Return the options of a task as sentences for operators."""
    lines = [declaration.sentence(options, getattr(options, name)) for name, declaration in OPTIONS.items()]
    return [line for line in lines if line]
