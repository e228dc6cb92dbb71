"""The part of a store's contract that is about queues and claims, of a store that has neither."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InvalidLockOptions
from .keys import LockKeys
from .names import LockName
from .records import First, Publication, Waiting
from .store import Taken

__all__ = ["NoQueues"]


class NoQueues:
    """Whoever looks for waiters finds none; a claim is refused."""

    def claim(self, publications: Sequence[tuple[LockKeys, Publication]]) -> list[First | None]:
        if publications:
            raise InvalidLockOptions("unique is not allowed on several servers (Redlock)")
        return []

    def unclaim(self, keys: LockKeys, task_id: str, turn: int, attempt: str = "") -> bool:
        return False

    def keep_claims(self, claims: Sequence[tuple[LockKeys, str, int]]) -> None:
        return None

    def sweep(self, keys: LockKeys, granter: str, turn_ms: int, tries: int) -> Taken:
        return Taken()

    def published(self, keys: LockKeys, identity: str, turn_ms: int) -> bool:
        return False

    def take_out(
        self, keys: LockKeys, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> Taken:
        return Taken()

    def waiting(self, keys: LockKeys, most: int) -> Waiting:
        return Waiting(0, ())

    def due(self, prefix: str, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        return []
