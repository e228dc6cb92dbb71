"""Values of the queue and of claims: waiters, and calls that reserve a name when they are published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..options.durability import PRIMARY, Durability
from .model import Requester, shown_time

__all__ = ["ClaimRequest", "ExistingCall", "Waiter", "Waiting"]


class ClaimRequest(NamedTuple):
    """A message that claims its lock's name (``unique="queued"``).

    Args:
        task_id: Of its task.
        generation: Of two messages with one id, that which follows the other (a retry) has the higher one.
        life_ms: Milliseconds that the claim lasts while no worker knows the message.
        refuse_while_running: It is refused, too, while another task runs.
        requester: Who publishes it.
        attempt: Names this publication: an id may be published twice.
        durability: Who has to confirm the claim.
    """

    task_id: str
    generation: int
    life_ms: int
    refuse_while_running: bool
    requester: Requester
    attempt: str
    durability: Durability = PRIMARY


@dataclass(frozen=True, slots=True)
class ExistingCall:
    """The call that has a name which another call asked for.

    Args:
        state: ``"queued"``, ``"waiting"`` (parked, under the queue policy) or ``"running"``.
        task: Its task's name; None for a ``Lock`` outside any task.
        task_id: Its id; likewise.
        node: Who published it, or runs it; "" if that is not known.
        since: When it got the name, in seconds since the epoch by the store's clock; 0.0 if that is not known.
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


@dataclass(frozen=True, slots=True)
class Waiter:
    """One parked message.

    Args:
        task: Its task's name.
        task_id: Its id.
        since: When it arrived, seconds since the epoch by the store's clock.
    """

    task: str
    task_id: str
    since: float

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}] waiting since {shown_time(self.since)}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits for one lock.

    Args:
        count: How many.
        waiters: The first of them, by rank; those who lost a turn before those who did not.
    """

    count: int
    waiters: tuple[Waiter, ...]
