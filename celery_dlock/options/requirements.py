"""The options that have an effect only with a certain value of another option.

This table is the only place that states these requirements. The checks of :class:`LockOptions` refuse an option whose
requirement is not met. If an override removes the required value, the option returns to its default. The options
reference prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["REQUIRES", "Requirement", "ineffective_options"]


class Requirement(NamedTuple):
    """The choice that an option needs.

    Args:
        option: The option in which the choice is made.
        met: Returns whether the choice is made. Its argument has the fields of :class:`LockOptions`.
        text: The choice, as the errors and the reference name it.
    """

    option: str
    met: Callable[[Any], bool]
    text: str


def _can_skip(options: Any) -> bool:
    return (
        options.once_per is not None
        or options.on_conflict == "skip"
        or (options.on_conflict == "queue" and options.queue_overflow != "raise")
    )


def _can_retry(options: Any) -> bool:
    # "skip" retries a call that already ran and called self.retry(), because the work is half done.
    return options.on_conflict in ("retry", "skip")


_QUEUE: Final = Requirement("on_conflict", lambda options: options.on_conflict == "queue", "on_conflict='queue'")
_REPLACE: Final = Requirement("on_conflict", lambda options: options.on_conflict == "replace", "on_conflict='replace'")
_UNIQUE: Final = Requirement(
    "unique", lambda options: options.unique is not None, "unique='queued' or unique='queued+running'"
)
_ONCE_PER: Final = Requirement("once_per", lambda options: options.once_per is not None, "once_per")

REQUIRES: Final[Mapping[str, Requirement]] = {
    "skip_result": Requirement(
        "on_conflict",
        _can_skip,
        "on_conflict='skip', on_conflict='queue' with a queue_overflow other than 'raise', or once_per",
    ),
    "retry_limit": Requirement("on_conflict", _can_retry, "on_conflict='retry' or on_conflict='skip'"),
    "queue_limit": _QUEUE,
    "queue_overflow": _QUEUE,
    "stop": _REPLACE,
    "debounce": _QUEUE,
    "on_duplicate": _UNIQUE,
    "queued_ttl": _UNIQUE,
    "on_used": _ONCE_PER,
    "after_crash": _ONCE_PER,
    "misfire_grace": Requirement("once_per", lambda options: options.once_per == "tick", "once_per='tick'"),
}


def ineffective_options(options: Any) -> dict[str, str]:
    """Return the options whose requirement is not met, each with the text of the requirement.

    Args:
        options: An object that has the fields of :class:`LockOptions`.
    """
    return {option: needed.text for option, needed in REQUIRES.items() if not needed.met(options)}
