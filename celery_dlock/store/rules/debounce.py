"""``debounce``: a call waits until no newer call of its name has arrived for some time.

These are the rules of ``scripts/lib/debounce.lua``, which explains them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model import AcquireRequest, Grant, Parked, Queued, QueueRequest
from .queue import end_grant, grant_next, unpublished_grant
from .records import LockRecord, NewestCall, Records
from .views import left_of_lock

__all__ = ["DebouncedCall", "record_start"]

_RECORD_MS = 24 * 3600 * 1000
#: Time in us in which the process that replaced a call stores that call's end.
_END_WITHIN_US = 10_000_000


def record_start(records: Records, place: QueueRequest, rank: int) -> None:
    """Remember the rank of a debounced call that takes the lock."""
    newest = records.newest_call() or NewestCall()
    newest.started = rank
    records.put_newest_call(newest, _record_life(place))


def _record_life(place: QueueRequest) -> int:
    return _RECORD_MS + sum(place.debounce[1:])


@dataclass
class DebouncedCall:
    """One acquire of a debounced call.

    Args:
        records: The records of its lock name.
        acquisition: Its acquisition.
        request: Its request.
        place: The request's part for the queue.
        rank: Its rank.
        queued: The message is queued already.
        evicted: The waiter that this call replaced when it was parked; None if there is none, or if that waiter's
            result is stored.
    """

    records: Records
    acquisition: str
    request: AcquireRequest
    place: QueueRequest
    rank: int
    queued: bool
    evicted: Grant | None = None

    def __post_init__(self) -> None:
        self.identity = self.request.identity.digest if self.request.identity else ""
        self.task_id = self.request.requester.task_id
        self.newest = newest = self.records.newest_call() or NewestCall()
        #: The task id of the call that replaced this one; None if it was not replaced.
        self.over = self.records.over(self.identity) if self.queued else None
        self.older = newest.started is not None and newest.identity != self.identity and self.rank < newest.started

    def wait(self, held: LockRecord | None, *, granted: bool) -> Parked | Queued | None:
        """Return why the call waits or has ended. Return None if it may take the lock.

        Args:
            held: The lock, if another call holds it or is granted it.
            granted: This copy was published for the grant that the lock has now.
        """
        if granted:
            return self._take()
        if self.queued:
            unpublished = unpublished_grant(self.records, self.acquisition)
            if self.over is not None:
                # A newer call replaced this one. If this is the second copy of the command that parked it, the worker
                # that sent both copies has to store its end.
                return self._replaced(unpublished, self.over)
            return Parked(self.rank, 1, unpublished, self.evicted, self.task_id)
        if not self.place.entry:
            return Queued(self.records.count_in("waiting") + self.records.count_in("delayed"), self.rank, None)
        return self._park(held)

    def _take(self) -> Parked | None:
        newest = self.newest
        if self.over is None and not self.older:
            if newest.identity is None:
                # The record expired while the call waited, for example while all workers were away.
                self._become_newest(self.records.now)
            return None
        by = newest.task_id if self.over is None else self.over
        self._await_end(self.identity, self.rank, by)
        return self._replaced(end_grant(self.records, self.acquisition), by)

    def _park(self, held: LockRecord | None) -> Parked:
        records, newest, now = self.records, self.newest, self.records.now
        newest_entry = None
        if newest.identity is not None and newest.identity != self.identity:
            newest_entry = records.entry(newest.identity)
        pending = newest_entry is not None and records.over(newest.identity or "") is None
        if self.older or (pending and self.rank < newest.rank):
            records.put_entry(self.identity, self.place.entry)
            self._await_end(self.identity, self.rank, newest.task_id)
            return self._replaced(self._wait_until(now + _END_WITHIN_US, held), newest.task_id)
        records.put_entry(self.identity, self.place.entry)
        records.put_lost_grants(self.identity, self.rank, 0)
        records.drop_dead(self.identity)
        wait_ms, last_ms = (*self.place.debounce, 0, 0)[:2]
        due, last, evicted = now + wait_ms * 1000, now + last_ms * 1000, None
        # A granted call is about to start, so it is not replaced.
        starts = held is not None and held.acquisition == f"grant:{newest.identity}"
        if newest.identity is not None and newest_entry is not None and pending and not starts:
            evicted, last = Grant(newest.identity, newest_entry), newest.due_at_last
            due = max(due, records.score("delayed", newest.identity) or 0)
            self._await_end(newest.identity, newest.rank, self.task_id)
            records.put_evicted_by(self.identity, newest.identity)
        due = min(due, last)
        self._become_newest(last)
        records.put_in("delayed", self.identity, due)
        return Parked(self.rank, 1, self._wait_until(due, held), evicted, self.task_id)

    def _become_newest(self, last: int) -> None:
        newest = NewestCall(self.identity, self.rank, self.task_id, last, self.newest.started)
        self.records.put_newest_call(newest, _record_life(self.place))

    def _await_end(self, replaced: str, rank: int, by: str) -> None:
        """Have a replaced call wait until its end is stored."""
        records = self.records
        records.take_from("waiting", replaced)
        records.put_over(replaced, by)
        records.put_lost_grants(replaced, rank, records.lost_grants(replaced)[1])
        records.put_in("delayed", replaced, records.now + _END_WITHIN_US)

    def _replaced(self, granted: Grant | None, by: str) -> Parked:
        """Return the answer to a call that has to store its own end."""
        entry = self.records.entry(self.identity) or ""
        return Parked(self.rank, 1, granted, Grant(self.identity, entry), by)

    def _wait_until(self, due: int, held: LockRecord | None) -> Grant | None:
        """If the lock is free, grant it to a waiter that is due. If it is held, schedule a sweep. Return the grant."""
        records = self.records
        if held is None:
            return grant_next(records, self.acquisition)
        held.has_waiters = True
        records.put_lock(held)
        left_us = max(0, left_of_lock(records, held)) * 1000
        records.sweep_at(min(due, records.now + left_us), earlier=True)
        return unpublished_grant(records, self.acquisition)
