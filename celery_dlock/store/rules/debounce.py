"""``debounce``: a call waits until no newer call of its name has arrived for some time.

These are the rules of ``scripts/lib/debounce.lua``, which explains them.
"""

from __future__ import annotations

from typing import Final

from ..acquisition import granted_to
from ..model import Debounce, Grant, Parked, Queued, QueueRequest
from .data import LockRecord, NewestCall
from .records import Records
from .replaced_waiter import END_WITHIN_US, ReplaceableCall

__all__ = ["DebouncedCall", "record_start"]

_RECORD_MS: Final = 24 * 3600 * 1000


def record_start(records: Records, queue: QueueRequest, rank: int) -> None:
    """Remember the rank of a debounced call that takes the lock."""
    newest = records.newest_call() or NewestCall()
    newest.started = rank
    records.put_newest_call(newest, _record_life(queue))


def _record_life(queue: QueueRequest) -> int:
    return _RECORD_MS + (queue.debounce.last_ms if queue.debounce else 0)


class DebouncedCall(ReplaceableCall):
    """One acquire of a debounced call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.newest = newest = self.records.newest_call() or NewestCall()
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
            return self.answer_queued()
        if not self.queue.entry:
            return Queued(self.records.count_in("waiting") + self.records.count_in("delayed"), self.rank, None)
        return self._park(held)

    def _take(self) -> Parked | None:
        newest = self.newest
        if self.replaced_by is None and not self.older:
            if newest.identity is None:
                # The record expired while the call waited, for example while all workers were away.
                self._become_newest(self.records.now)
            return None
        return self._give_way(newest.task_id if self.replaced_by is None else self.replaced_by)

    def _park(self, held: LockRecord | None) -> Parked:
        records, newest, now = self.records, self.newest, self.records.now
        newest_entry = None
        if newest.identity is not None and newest.identity != self.identity:
            newest_entry = records.entry(newest.identity)
        pending = newest_entry is not None and records.replaced_by(newest.identity or "") is None
        records.put_entry(self.identity, self.queue.entry)
        records.drop_dead(self.identity)
        if self.older or (pending and self.rank < newest.rank):
            self._await_end(self.identity, self.rank, newest.task_id)
            return self._replaced(self._wait_until(now + END_WITHIN_US, held), newest.task_id)
        records.put_lost_grants(self.identity, self.rank, 0)
        delays = self.queue.debounce or Debounce(0, 0)
        due, last, evicted = now + delays.wait_ms * 1000, now + delays.last_ms * 1000, None
        # A granted call is about to start, so it is not replaced.
        starts = held is not None and held.acquisition == granted_to(newest.identity or "")
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
        self.records.put_newest_call(newest, _record_life(self.queue))
