"""Values of claims: calls that claim a lock name when they are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..keys.lock_name import LockName
from .holder_model import shown_time
from .model import Requester

__all__ = ["ClaimExtension", "ClaimRequest", "ExistingCall"]


class ClaimRequest(NamedTuple):
    """The request of a message to claim its lock name (``unique``).

    Args:
        task_id: The id of its task.
        generation: The position among the messages of its task id: a retry has a higher one.
        life_ms: Milliseconds that the claim lasts, unless a worker extends it.
        refuse_while_running: Refuse the claim also while another call runs.
        requester: The task and the process that publish it.
        attempt: The id of this publication, because one task id may be published twice.
    """

    task_id: str
    generation: int
    life_ms: int
    refuse_while_running: bool
    requester: Requester
    attempt: str


class ClaimExtension(NamedTuple):
    """The claim of a message that a worker has: it lasts at least ``life_ms`` milliseconds from now."""

    name: LockName
    task_id: str
    life_ms: int


@dataclass(frozen=True, slots=True)
class ExistingCall:
    """The call that already has the name that another call tried to claim.

    Args:
        state: ``"queued"``, ``"waiting"`` (parked, under the queue policy) or ``"running"``.
        task: The name of its task; None for a ``Lock`` outside any task.
        task_id: The id of its task; None for a ``Lock`` outside any task.
        node: The node name of its publisher, or of its worker if it runs; "" if it is unknown.
        since: The time when it got the name, in seconds since the epoch by the store's clock; 0.0 if it is unknown.
    """

    state: str
    task: str | None
    task_id: str | None
    node: str
    since: float

    def __str__(self) -> str:
        who = f"{self.task}[{self.task_id}]" if self.task_id else "a Lock"
        where = f"{'on' if self.state == 'running' else 'published by'} {self.node}" if self.node else ""
        since = f"since {shown_time(self.since)}" if self.since else ""
        return " ".join(filter(None, [who, "is", self.state, where and f"({where})", since]))
