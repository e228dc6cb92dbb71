"""The end of a waiter that a newer call replaced (``debounce``, ``on_conflict="replace"``).

These are the rules of ``scripts/lib/replaced_waiter.lua``, which explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..model import AcquireRequest, Grant, Parked, QueueRequest
from .data import LockRecord
from .queue import end_grant, grant_next, unpublished_grant
from .records import Records
from .views import left_of_lock

__all__ = ["END_WITHIN_US", "ReplaceableCall"]

#: Time in us in which the process that replaced a call stores that call's end.
END_WITHIN_US: Final = 10_000_000


@dataclass
class ReplaceableCall:
    """One acquire of a call that a newer one may replace while it waits.

    Args:
        records: The records of its lock name.
        acquisition: Its acquisition.
        request: Its request.
        queue: The request's part for the queue.
        rank: Its rank.
        queued: The message is queued already.
        evicted: The waiter that this call replaced when it was parked; None if there is none, or if that waiter's
            result is stored.
    """

    records: Records
    acquisition: str
    request: AcquireRequest
    queue: QueueRequest
    rank: int
    queued: bool
    evicted: Grant | None = None

    def __post_init__(self) -> None:
        self.identity = self.request.identity.digest if self.request.identity else ""
        self.task_id = self.request.requester.task_id
        #: The task id of the call that replaced this one; None if it was not replaced.
        self.replaced_by = self.records.replaced_by(self.identity) if self.queued else None

    def answer_queued(self) -> Parked:
        """Return the answer to a message that waits already, and was not published for a grant."""
        unpublished = unpublished_grant(self.records, self.acquisition)
        if self.replaced_by is not None:
            # A newer call replaced this one. If this is the second copy of the command that parked it, the worker
            # that sent both copies has to store its end.
            return self._replaced(unpublished, self.replaced_by)
        return Parked(self.rank, 1, unpublished, self.evicted, self.task_id)

    def _give_way(self, by: str) -> Parked:
        """End this call, which was granted the lock, and grant the lock to the next waiter."""
        self._await_end(self.identity, self.rank, by)
        return self._replaced(end_grant(self.records, self.acquisition), by)

    def _await_end(self, replaced: str, rank: int, by: str) -> None:
        """Have a replaced call wait until its end is stored."""
        records = self.records
        records.take_from("waiting", replaced)
        records.put_replaced_by(replaced, by)
        records.put_lost_grants(replaced, rank, records.lost_grants(replaced)[1])
        records.put_in("delayed", replaced, records.now + END_WITHIN_US)

    def _replaced(self, granted: Grant | None, by: str) -> Parked:
        """Return the answer to a call that has to store its own end."""
        entry = self.records.entry(self.identity) or ""
        return Parked(self.rank, 1, granted, Grant(self.identity, entry), by)

    def _wait_until(self, due: int | None, held: LockRecord | None) -> Grant | None:
        """If the lock is free, grant it to a waiter that is due. If it is held, schedule a sweep. Return the grant.

        Args:
            due: The time when this call is due; None: when the lock is free.
            held: The lock, if another call holds it or is granted it.
        """
        records = self.records
        if held is None:
            soon = records.now + END_WITHIN_US
            records.sweep_at(soon if due is None else min(due, soon), earlier=True)
            return grant_next(records, self.acquisition)
        held.has_waiters = True
        records.put_lock(held)
        free = records.now + max(0, left_of_lock(records, held)) * 1000
        records.sweep_at(free if due is None else min(due, free), earlier=True)
        return unpublished_grant(records, self.acquisition)
