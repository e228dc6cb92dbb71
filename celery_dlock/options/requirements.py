"""The requirements of options that have an effect only with a certain value of another option.

The checks of :class:`LockOptions` refuse an option whose requirement is not met. If an override removes the required
value, the option returns to its default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple


class Requirement(NamedTuple):
    """The choice that an option needs.

    Args:
        met: Returns whether the choice is made. Its argument has the fields of :class:`LockOptions`.
        text: The choice, as the errors and the reference name it.
    """

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


SKIPS: Final = Requirement(
    _can_skip, "on_conflict='skip', on_conflict='queue' with a queue_overflow other than 'raise', or once_per"
)
RETRIES: Final = Requirement(_can_retry, "on_conflict='retry' or on_conflict='skip'")
QUEUE: Final = Requirement(lambda options: options.on_conflict == "queue", "on_conflict='queue'")
REPLACE: Final = Requirement(lambda options: options.on_conflict == "replace", "on_conflict='replace'")
UNIQUE: Final = Requirement(lambda options: options.unique is not None, "unique='queued' or unique='queued+running'")
ONCE_PER: Final = Requirement(lambda options: options.once_per is not None, "once_per")
TICK: Final = Requirement(lambda options: options.once_per == "tick", "once_per='tick'")
