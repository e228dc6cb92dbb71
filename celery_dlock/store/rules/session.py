"""A transaction on the data of one lock name: what the rules read, and the changes that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .data import Head, Mark, MarkKind, QueuePart, Waiter

__all__ = ["Changes", "Session"]


@dataclass
class Changes:
    """The changes that a rule has made. A backend writes all of them, or nothing.

    Args:
        head: The new head; None if it did not change. An empty head may be deleted.
        waiters: Waiters that changed, by identity; None: the waiter is deleted.
        marks: Marks that changed, by kind and key; None: the mark is deleted.
        token: The ``next_token`` of the session, if the rule issued it. No later session may have it again.
        guard: The fencing token of a holder that guards a transaction; None: none does. The guard of this token must
            exist after the commit.
        ended_guards: Tokens whose guards end with this commit, because another call takes the lock. Before the commit,
            the engine asks whether a transaction still has one of them.
        wakes: The number of calls to wake, beginning with the one that has waited for the longest time. They wake when
            all changes are visible to them, and never if the commit fails. See ``LockStore.release_listener``.
    """

    head: Head | None = None
    waiters: dict[str, Waiter | None] = field(default_factory=dict)
    marks: dict[tuple[MarkKind, str], Mark | None] = field(default_factory=dict)
    token: int | None = None
    guard: int | None = None
    ended_guards: list[int] = field(default_factory=list)
    wakes: int = 0

    def __bool__(self) -> bool:
        return bool(self.head or self.waiters or self.marks or self.token or self.guard or self.wakes)


class Session(Protocol):
    """A transaction on one lock name. It reads what was committed when it began, without its own changes.

    The values that it returns are not changed by the caller. Records that have expired may be among them.
    """

    @property
    def now(self) -> int:
        """The time of the store in microseconds since the epoch, read after the name was locked."""
        ...

    @property
    def next_token(self) -> int:
        """The fencing token of an acquisition in this session: higher than every token of this name that was issued.

        It does not go back if the clock does, after a restore of the data, or after the head was deleted. If the store
        has a clock, it is at least :attr:`now`.
        """
        ...

    @property
    def head(self) -> Head: ...

    def mark(self, kind: MarkKind, key: str) -> Mark | None: ...
    def marks(self, kind: MarkKind) -> dict[str, Mark]:
        """Return all marks of a kind, by key. The engine asks for ``"worker"`` only, which are few."""
        ...

    def waiter(self, identity: str) -> Waiter | None: ...
    def entries(self) -> dict[str, str]:
        """Return all entries, by identity."""
        ...

    def first_in(self, part: QueuePart, most: int, low: int | None, high: int | None) -> list[tuple[str, Waiter]]:
        """Return waiters of a part by score and then by identity, with scores from ``low`` to ``high``, inclusive."""
        ...

    def count_before(self, part: QueuePart, score: int, identity: str) -> int:
        """Return how many waiters of a part precede this score and identity."""
        ...

    def end_guard(self, token: int) -> bool:
        """End the guard of a token with this transaction. Return false if an open transaction of the user has it.

        Called only with tokens of guards that :meth:`commit` has written. A session that only reads returns true.
        """
        ...

    def commit(self, changes: Changes) -> None:
        """Write the changes and wake calls. The engine calls this at most once, and then ends the session.

        Raises:
            Conflict: Nothing was written, because another transaction has changed the name.
            ReplyLost: It is unknown whether the changes were written. The engine runs the rule again on fresh data, if
                the verb is safe to send twice.
        """
        ...
