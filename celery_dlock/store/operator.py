"""The contract of stores for operators: reading every lock name, and acting on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from ..keys.lock_name import LockName
from .base import LockStore
from .model import Grant
from .operator_model import DeadLetter, LockView, Page, RunView, State

__all__ = ["ListCursor", "OperatorStore"]


class ListCursor(NamedTuple):
    """A cursor of a list of dead letters, unsettled runs or queues: the entry after which a page begins.

    The list is sorted by these fields.

    Args:
        bucket: The bucket of the lock name.
        name: The lock name.
        detail: The identity of a dead letter, or the tick of a run; "" for a queue.
    """

    bucket: int
    name: str
    detail: str = ""

    @classmethod
    def of(cls, name: LockName, detail: str = "") -> ListCursor:
        return cls(name.bucket, name.text, detail)


class OperatorStore(LockStore, Protocol):
    """A store as operators see it.

    Every method that sends a command raises :class:`~celery_dlock.errors.StoreUnavailable` if the store did not execute
    it. No method sends a command that takes the server longer than about 1 ms.
    """

    def scan(
        self,
        kinds: Iterable[State],
        cursor: str,
        limit: int,
        wanted: Callable[[str], bool],
        accepted: Callable[[LockView], bool],
    ) -> Page[LockView]:
        """Return a page of the lock names that are in one of the states.

        A name that is in such a state from the first page to the last is returned, and may be returned twice.

        Args:
            kinds: The states.
            cursor: The cursor of the page before; "" for the first page.
            limit: A page ends when it has so many names. It may have about twice as many.
            wanted: Returns whether to look at a lock name.
            accepted: Returns whether to return a name.

        Raises:
            ValueError: The cursor is malformed, or names a server that the store no longer has.
        """
        ...

    def describe(self, name: LockName, tick: str = "") -> LockView:
        """Return what the store knows about a lock name, or about one tick of it."""
        ...

    # The order of these lists is that of ListCursor. It does not change, so a page begins behind the last entry of the
    # page before.

    def unsettled_runs(self, after: ListCursor | None = None) -> Iterator[RunView]:
        """Yield the runs behind a cursor that have not succeeded: they run, or their outcome is unknown."""
        ...

    def dead_letters(self, after: ListCursor | None = None) -> Iterator[DeadLetter]:
        """Yield the dead letters behind a cursor."""
        ...

    def queues(self, after: ListCursor | None = None) -> Iterator[LockName]:
        """Yield the names of locks that have waiters, behind a cursor."""
        ...

    def seats(self, name: LockName) -> int:
        """Return how many calls may hold the name at once (``limit``); 1 for a lock, and for the name of one seat."""
        ...

    def free(self, name: LockName, acquisition: str, *, force: bool) -> tuple[str, Grant | None]:
        """Release a lock that this acquisition holds, and grant it to the next waiter.

        Args:
            name: The lock name.
            acquisition: The acquisition, as :class:`~celery_dlock.store.operator_model.HolderView` shows it.
            force: Also if the holder is alive, or if the lock is kept on purpose.

        Returns:
            ``"freed"``, ``"free"``, ``"other"``, ``"granted"``, ``"kept"`` or ``"fresh"``, and the grant to publish.
        """
        ...

    def hold(self, name: LockName, operator: str, hold_ms: int, reason: str) -> bool:
        """Hold the lock for an operator. Return false if it takes effect when the present holder releases the lock."""
        ...

    def cancel_hold(self, name: LockName, acquisition: str, hold: str) -> bool:
        """Cancel a hold that waits for the release of this acquisition. Return false if it does not.

        Args:
            name: The lock name.
            acquisition: The acquisition that holds the lock.
            hold: The hold, as :class:`~celery_dlock.store.operator_model.HolderView` shows it.
        """
        ...

    def requeue(self, name: LockName, identity: str) -> bool:
        """Put a dead letter back into its queue. Return false if there is none."""
        ...

    def save_audit(self, at: float, record: str) -> None:
        """Store the record of an action. The oldest ones are dropped."""
        ...

    def audit(self, limit: int) -> list[str]:
        """Return the newest records, the oldest of them first."""
        ...

    def now(self) -> float:
        """Return the time by the clock of one server, in seconds since the epoch."""
        ...

    def clock_offsets(self) -> dict[str, float]:
        """Return the seconds by which the clock of each server is ahead of this host's, by the server's address."""
        ...
