"""What a store of locks promises; the rooms above know nothing else of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .keys import LockKeys, LockName
from .records import Acquired, Claim, Grant, Holder, Refusal, Released, Renewal, Waiting

__all__ = ["Ending", "LockStore", "QueueStore", "Taken", "Waker"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What an acquisition's end means beyond freeing the lock.

    Args:
        final: The message is acknowledged with a stored end; its identity must not run again.
        identity: Whose end it is: the digest of an :class:`Identity`; "" outside any message.
        used_ms: Milliseconds that the name stays used by this success; 0: it does not.
        by: Who used it: the text of a :class:`~celery_dlock.records.By`.
        unsure: The acquire may still be on its way: leave a tombstone that refuses it.
        queue: The task's policy is to queue, so the lock is expected to have waiters.
    """

    final: bool = False
    identity: str = ""
    used_ms: int = 0
    by: str = ""
    unsure: bool = False
    queue: bool = False

    @property
    def text(self) -> str:
        """As JSON, for a slot that is left to the keeper."""
        return json.dumps([self.final, self.identity, self.used_ms, self.by, self.unsure, self.queue])

    @classmethod
    def from_text(cls, text: str) -> Ending:
        """Reads :attr:`text`; torn text (its writer was killed) means no more than that the lock is to be freed."""
        try:
            final, identity, used_ms, by, unsure, queue = json.loads(text)
        except (ValueError, TypeError):
            return cls(unsure=True)
        return cls(final, identity, used_ms, by, unsure, queue)


class Waker(Protocol):
    """Tells of releases of one lock."""

    def wait(self, timeout: float) -> bool:
        """Block at most ``timeout`` s; true if a release was told. May be wrong either way: ask the store again."""
        ...


class LockStore(Protocol):
    """Where locks live.

    Every method is one round trip, takes effect as a whole or not at all, and is safe to be sent twice. Losing a
    race is an answer. Raises :class:`~celery_dlock.errors.StoreUnavailable` when the store did not carry a command
    out, and its subclass :class:`~celery_dlock.errors.ReplyLost` when that is not known.
    """

    def acquire(self, keys: LockKeys, acquisition: str, ttl_ms: int, claim: Claim) -> Acquired | Refusal:
        """Take the lock for ``acquisition``, or say why not; park the message where the claim brings its entry."""
        ...

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Move deadlines; false where another holds the lock or nobody does. Never creates a lock."""
        ...

    def release(self, keys: LockKeys, acquisition: str, ending: Ending) -> Released:
        """End an acquisition and grant the next waiter. Harmless for one that ended before or never was."""
        ...

    def inspect(self, keys: LockKeys) -> Holder | None:
        """Who holds the lock now."""
        ...

    def waker(self, keys: LockKeys) -> AbstractContextManager[Waker]:
        """Listen for releases; from entering on, none is missed while the connection lives."""
        ...

    def close(self) -> None:
        """Give up all connections of this process. The store may be used again afterwards."""
        ...


class Taken(NamedTuple):
    """What a step on a queue brought to light.

    Args:
        entry: Of the waiter that was taken out; "" if there was none.
        granted: The waiter for which the lock is kept now; its message is to be published.
        buried: The identity that went to the dead letters, "" if none did.
    """

    entry: str = ""
    granted: Grant | None = None
    buried: str = ""


class QueueStore(LockStore, Protocol):
    """The steps on a queue that belong to no acquisition."""

    def sweep(self, keys: LockKeys, granter: str, turn_ms: int, tries: int) -> Taken:
        """Grant a lock that is free, and end a grant that is due."""
        ...

    def published(self, keys: LockKeys, identity: str, turn_ms: int) -> bool:
        """Note that a granted message was published; false if its grant is over."""
        ...

    def take_out(
        self, keys: LockKeys, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> Taken:
        """Take a waiter out, to the dead letters with ``bury``; its turn passes on. One that runs is left alone.

        Copies of a waiter that was taken out do not run; nor, if it has ``ended``, those of one that did not wait.
        """
        ...

    def waiting(self, keys: LockKeys, most: int) -> Waiting:
        """Who waits."""
        ...

    def durable(self) -> bool:
        """Does what is parked survive a restart of the store, but for its last second?"""
        ...

    def due(self, prefix: str, buckets: Sequence[int], most: int) -> list[LockName]:
        """The locks of these buckets that a sweep has to look after now, at most so many of each."""
        ...
