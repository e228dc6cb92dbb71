"""The holder of a lock: a value of the store contract that is shown to people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from .acquisition import OPERATOR, HolderKind

__all__ = ["Holder", "held_by", "shown_time"]


def shown_time(seconds: float) -> str:
    """Format a time of the store's clock for people: in UTC, with its zone, the same in logs, errors and results."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock, or the earlier run that a run mark describes.

    Args:
        task: The name of its task; None for a ``Lock`` outside any task.
        task_id: The id of its task; None for a ``Lock`` outside any task.
        node: The node name of its worker, or the host name. For an operator's hold: the reason.
        pid: Its process id; 0 if the lock is granted to a waiter, or held by an operator.
        since: The time of the acquisition, or of the earlier run's success, in seconds since the epoch (store's clock).
        owner: The owner; "" if there is none; ``operator:`` and a name for an operator's hold.
        identity: The digest of its message's identity; "" for a ``Lock`` outside any message.
        token: Its fencing token; None for an earlier run.
        hold_count: How often the owner has entered the lock.
        releasing: Its body has ended, and its release follows.
        expires_in: Seconds until its lease expires.
        kind: ``"owner"``: it has a lease. ``"grant"``: a waiter to which the lock is granted. ``"min_hold"`` and
            ``"keep_on_retry"``: its body has ended, and the option keeps the lock. ``"operator"``: an operator's hold.
            ``"file"``: it holds the lock file of its machine (``on_store_error="local"``), perhaps not the lock.
            ``"guard"``: its lease is over, and a transaction that it guards is still open.
    """

    task: str | None
    task_id: str | None
    node: str
    pid: int | None
    since: float
    owner: str = ""
    identity: str = ""
    token: int | None = None
    hold_count: int = 1
    releasing: bool = False
    expires_in: float = 0.0
    kind: HolderKind = "owner"

    def __str__(self) -> str:
        if self.kind == "file":
            who = f"{self.task}[{self.task_id}] on {self.node}" if self.task_id else "another process"
            return f"{who} (by the lock file of this machine)"
        if self.kind == "operator":
            return f"operator {self.owner.removeprefix(OPERATOR)} ({self.node or 'no reason given'})"
        if self.kind == "guard":
            return "an earlier holder, whose guarded transaction is still open"
        if self.kind == "grant":
            return f"{self.task}[{self.task_id}] (granted, not started)"
        who = f"{self.task}[{self.task_id}]" if self.task_id else f"a Lock in process {self.pid}"
        kept = {"min_hold": " (ended; kept by min_hold)", "keep_on_retry": " (its retry is to come: keep_on_retry)"}
        return f"{who} on {self.node}{kept.get(self.kind, '')}"


def held_by(holder: Holder) -> str:
    """Return the holder, its worker and its start, as text for people."""
    return f"held by {holder} since {shown_time(holder.since)}"
