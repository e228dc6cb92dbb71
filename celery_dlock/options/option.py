"""The declaration of one option, a field of :class:`LockOptions`: all that other modules need to know of it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .bounds import Bound
from .requirements import Requirement
from .values import Check
from .words import Words, shown

if TYPE_CHECKING:
    from .lock_options import LockOptions

__all__ = ["Chapter", "Option", "declared", "option"]

_KEY: Final = "option"


class Chapter(enum.Enum):
    """A chapter of the options reference: its title, and the label and the page of its link "More"."""

    LOCK = "What is locked", "choose a lock key", "how-to/choose-a-lock-key.md"
    CONFLICT = "A held lock", "choose a conflict policy", "how-to/choose-a-conflict-policy.md"
    TIME = "How long", "how a lock ends", "explanation/how-a-lock-ends.md"
    SUCCESS = "After a success", "exactly once", "explanation/exactly-once.md"
    PUBLISH = "At publish time", "reject duplicates when publishing", "how-to/reject-duplicates-when-publishing.md"
    LOSS = "A lost lease", "protect a resource with a fencing token", "how-to/use-fencing-tokens.md"
    STORE = "Store errors", "topologies", "explanation/topologies.md"


class Option(NamedTuple):
    """One option.

    Args:
        default: The value of a task that chooses none.
        check: Gets the name of the option and a value, and returns the value to store.
        chapter: The chapter of the reference.
        words: The option in words, for operators; None if they must not see it.
        needs: The choice of another option without which this one has no effect.
        bound: The bound of the option in a message; None if a message may choose any value.
    """

    default: Any
    check: Check
    chapter: Chapter
    words: Words | None
    needs: Requirement | None
    bound: Bound | None

    def sentence(self, options: LockOptions, value: Any) -> str:
        """Return the sentence about a task's value, for operators; "" if there is nothing to say."""
        words = self.words
        if words is None or (self.needs and not self.needs.met(options)):
            return ""
        if callable(words):
            return words(options)
        chosen = value != self.default
        if isinstance(words, Mapping):
            words = words.get(value) or (words.get("", "") if chosen else "")
            chosen = True
        return words.format(shown(value)) if chosen else ""


def option(
    default: Any,
    check: Check,
    chapter: Chapter,
    words: Words | None,
    *,
    needs: Requirement | None = None,
    bound: Bound | None = None,
) -> Any:
    """Return the field of an option. The arguments are those of :class:`Option`."""
    declaration = Option(default, check, chapter, words, needs, bound)
    return dataclasses.field(default=default, metadata={_KEY: declaration})


def declared(cls: type) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(cls)}
