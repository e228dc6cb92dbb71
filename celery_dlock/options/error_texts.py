"""The texts of the errors for invalid options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..errors import InvalidLockOptions
from ..utils.text import written

__all__ = ["ALL_OPTIONS", "either", "invalid_value", "unmet_requirement"]

#: The end of an error for an unknown option.
ALL_OPTIONS: Final = "all options: docs/reference/options.md"


def invalid_value(option: str, value: object, expected: str) -> InvalidLockOptions:
    """Return the error for an option's value.

    Args:
        option: The name of the option, which may follow the call that it belongs to: ``"Lock(name).acquire: timeout"``.
        value: Its value.
        expected: The allowed values.
    """
    return InvalidLockOptions(f"{_invalid(option, value)}: expected {expected}")


def unmet_requirement(option: str, value: object, requirement: str) -> InvalidLockOptions:
    """Return the error for an option that has no effect without another one.

    Args:
        option: The name of the option.
        value: Its value.
        requirement: The choice of another option that it needs: ``"on_conflict='queue'"``.
    """
    return InvalidLockOptions(f"{_invalid(option, value)}: it needs {requirement}")


def _invalid(option: str, value: object) -> str:
    call, separator, name = option.rpartition(": ")
    return f"{call}{separator}invalid {name}={written(value)}"


def either(choices: Sequence[str]) -> str:
    """Return the choices as a list for an error: ``'skip', 'retry' or 'raise'``."""
    shown = [repr(choice) for choice in choices]
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
