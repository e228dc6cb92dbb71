"""The part of a store's contract that is about queues and claims, of a store that has neither."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidLockOptions
from ...keys.key_spec import LockKeys
from ...keys.lock_name import LockName
from ..base import QueueStepResult
from ..model import ClaimRequest, ExistingCall, Grant, Waiting

__all__ = ["QueuesUnsupported"]


class QueuesUnsupported:
    """Whoever looks for waiters finds none; a claim is refused."""

    clustered = False

    def claim(self, publications: Sequence[tuple[LockKeys, ClaimRequest]]) -> list[ExistingCall | None]:
        if publications:
            raise InvalidLockOptions("unique is not allowed on several servers (Redlock)")
        return []

    def unclaim(self, keys: LockKeys, task_id: str, turn: int, attempt: str = "") -> bool:
        return False

    def keep_claims(self, claims: Sequence[tuple[LockKeys, str, int]]) -> None:
        return None

    def sweep(self, keys: LockKeys, granter: str, turn_ms: int, tries: int, foreign_ms: int = 0) -> QueueStepResult:
        return QueueStepResult()

    def published(self, keys: LockKeys, identity: str, turn_ms: int) -> bool:
        return False

    def pass_on(self, keys: LockKeys, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        return False

    def remove_waiter(
        self, keys: LockKeys, identity: str, granter: str, *, bury: bool = False, ended: bool = False
    ) -> QueueStepResult:
        return QueueStepResult()

    def waiting(self, keys: LockKeys, most: int) -> Waiting:
        return Waiting(0, ())

    def sweep_lease(self, key: str, worker: str, life_ms: int) -> int:
        return 0

    def due(self, prefix: str, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        return []
