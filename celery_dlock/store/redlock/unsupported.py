"""The queue and claim methods of a store that supports neither queues nor claims."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidLockOptions
from ...keys.lock_name import ONE_LOCK, LockName
from ..base import QueueStepResult
from ..claim_model import ClaimRequest, ExistingCall
from ..model import AcquireRequest, Grant
from ..operator_model import Waiting

__all__ = ["QueuesUnsupported", "reject_unsupported"]


def reject_unsupported(name: LockName, request: AcquireRequest) -> None:
    """Check that a request needs neither seats nor a queue.

    Raises:
        InvalidLockOptions: It does.
    """
    if name.seats != ONE_LOCK:
        raise InvalidLockOptions("invalid limit: expected 1, because Redlock has no seats")
    if request.queue is not None:
        policy = "replace" if request.queue.replace else "queue"
        raise InvalidLockOptions(
            f"invalid on_conflict={policy!r}: expected another policy, because Redlock has no queues"
        )


class QueuesUnsupported:
    """A store without waiters, which refuses claims."""

    clustered = False

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        if publications:
            raise InvalidLockOptions("invalid unique: a Redlock has no claims; remove the option")
        return []

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        return False

    def extend_claims(self, claims: Sequence[tuple[LockName, str, int]]) -> None:
        return None

    def sweep(
        self,
        name: LockName,
        granter: str,
        grant_timeout_ms: int,
        tries: int,
        foreign_ms: int = 0,
        pause_ms: int = 0,
    ) -> QueueStepResult:
        return QueueStepResult()

    def confirm_publish(self, name: LockName, identity: str, grant_timeout_ms: int) -> bool:
        return False

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        return False

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, dead_letter: bool = False, ended: bool = False
    ) -> QueueStepResult:
        return QueueStepResult()

    def list_waiters(self, name: LockName, most: int) -> Waiting:
        return Waiting(name.text, 0, ())

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        return 0

    def announce_workers(self, broker: str, life_ms: int) -> None:
        return None

    def has_workers(self, broker: str) -> bool:
        return False

    def dead_letters_at(self, name: LockName) -> str:
        return ""

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        return []
