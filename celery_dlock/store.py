"""What a store of locks promises; the rooms above know nothing else of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from .keys import LockKeys
from .records import Acquired, Claim, Duplicate, Held, Holder, Released, Renewal, Tombstoned, Used

__all__ = ["Ending", "LockStore", "Waker"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What an acquisition's end means beyond freeing the lock.

    Args:
        final: The message is acknowledged with a stored end; its identity must not run again.
        identity: Whose end it is: the digest of an :class:`Identity`; "" outside any message.
        used_ms: Milliseconds that the name stays used by this success; 0: it does not.
        by: Who used it: the text of a :class:`~celery_dlock.records.By`.
        unsure: The acquire may still be on its way: leave a tombstone that refuses it.
    """

    final: bool = False
    identity: str = ""
    used_ms: int = 0
    by: str = ""
    unsure: bool = False

    @property
    def text(self) -> str:
        """As JSON, for a slot that is left to the keeper."""
        return json.dumps([self.final, self.identity, self.used_ms, self.by, self.unsure])

    @classmethod
    def from_text(cls, text: str) -> Ending:
        """Reads :attr:`text`; torn text (its writer was killed) means no more than that the lock is to be freed."""
        try:
            final, identity, used_ms, by, unsure = json.loads(text)
        except (ValueError, TypeError):
            return cls(unsure=True)
        return cls(final, identity, used_ms, by, unsure)


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

    def acquire(
        self, keys: LockKeys, acquisition: str, ttl_ms: int, claim: Claim
    ) -> Acquired | Held | Used | Duplicate | Tombstoned:
        """Take the lock for ``acquisition``, or say why not."""
        ...

    def renew(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Move deadlines; false where another holds the lock or nobody does. Never creates a lock."""
        ...

    def release(self, keys: LockKeys, acquisition: str, ending: Ending) -> Released:
        """End an acquisition. Harmless for one that ended before or never was."""
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
