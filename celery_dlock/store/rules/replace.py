"""``on_conflict="replace"``: the newest call of a name is the only waiter, and asks the running one to stop.

These are the rules of ``scripts/lib/replace.lua``, which explains them.
"""

from __future__ import annotations

from typing import Final

from ..acquisition import granted_to
from ..base import ReleaseRequest
from ..model import NO_RETRY, RETRY, Grant, Parked, QueueRequest, Replace
from .data import LockRecord, ReplacedCalls
from .records import Records
from .replaced_waiter import END_WITHIN_US, ReplaceableCall

__all__ = ["ReplacingCall", "is_stopped", "record_end", "record_start"]

_RECORD_MS: Final = 24 * 3600 * 1000
#: If the last start lies further in the future than this (us), the store's clock went back. That start is ignored.
_CLOCK_STEP_US: Final = 1_000_000


def _first(*task_ids: str | None) -> str | None:
    return next((task_id for task_id in task_ids if task_id is not None), None)


class ReplacingCall(ReplaceableCall):
    """One acquire under ``on_conflict="replace"``. It may change ``rank``: a retry is as old as its first run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = calls = self.records.replaced() or ReplacedCalls()
        self.asked = self.queue.replace or Replace()
        busy_us = 0 if calls.busy_since is None else self.records.now - calls.busy_since
        #: No body has ended by itself for replace_max_ms, so the running one is left alone.
        self.left_alone = calls.busy_since is not None and busy_us >= self.asked.max_ms * 1000
        #: The newest call, if it waits and is not this one.
        self.pending = self._pending()
        #: The task id of the call that asked this one to stop.
        self.stopped_by = calls.stops.get(self.identity)
        #: The task id of a newer call that has started.
        self.started_later = self._started_later()

    def _pending(self) -> Grant | None:
        newest = self.calls.newest
        if newest is None or newest == self.identity or self.records.replaced_by(newest) is not None:
            return None
        entry = self.records.entry(newest)
        return None if entry is None else Grant(newest, entry)

    def _started_later(self) -> str | None:
        calls = self.calls
        if calls.started_rank is None or calls.started_rank > self.records.now + _CLOCK_STEP_US:
            return None
        if calls.started_id == self.task_id:
            if self.asked.repeats != NO_RETRY:
                self.rank = calls.started_rank
            return None
        return calls.started_id if self.asked.repeats == RETRY or self.rank < calls.started_rank else None

    @property
    def _another(self) -> str | None:
        """The task id of the newest call, if it waits and is a call of its own."""
        return self.calls.newest_id if self.pending is not None and self.calls.newest_id != self.task_id else None

    def take(self) -> Parked | None:
        """Return why this call, which was granted the lock, has ended. Return None if it may take the lock."""
        by = _first(self.replaced_by, self.stopped_by, self.started_later, None if self.left_alone else self._another)
        if by is None:
            return None
        if self.calls.busy_since is None:
            # No body starts while each granted call finds a newer one. So the time for replace_max_ms begins here.
            self.calls.busy_since = self.records.now
            self._keep_calls()
        self._forget_stop()
        return self._give_way(by)

    def waits(self, *, blocked: bool) -> bool:
        """Return whether this call must not take the lock. ``blocked``: it is held, or another waiter comes first."""
        return blocked or self.pending is not None or _first(self.stopped_by, self.started_later) is not None

    def park(self, held: LockRecord | None) -> Parked:
        """Park this call as the only waiter, or return which newer call replaced it."""
        records, calls, pending = self.records, self.calls, self.pending
        records.put_entry(self.identity, self.queue.entry)
        records.drop_dead(self.identity)
        newer = self._another if self.rank < calls.newest_rank else None
        by = _first(self.stopped_by, self.started_later, newer)
        if by is not None:
            self._await_end(self.identity, self.rank, by)
            self._forget_stop()
            return self._replaced(self._wait_until(records.now + END_WITHIN_US, held), by)
        evicted = None
        # A granted call that finds this newer one ends itself.
        if pending is not None and not (held is not None and held.acquisition == granted_to(pending.identity)):
            evicted = pending
            self._await_end(pending.identity, calls.newest_rank, self.task_id)
            records.put_evicted_by(self.identity, pending.identity)
        records.put_in("waiting", self.identity, self.rank)
        calls.newest, calls.newest_rank, calls.newest_id = self.identity, self.rank, self.task_id
        if held is not None and not self.left_alone:
            self._request_stop(held)
        self._keep_calls()
        return Parked(self.rank, 1, self._wait_until(None, held), evicted, self.task_id)

    def _request_stop(self, held: LockRecord) -> None:
        """Ask the holder to stop, once. Only a holder that took the lock under this policy listens."""
        # The identity is empty if an operator holds the lock, or if min_hold keeps it after its run.
        if held.replaceable and held.stop is None and held.identity and held.task_id != self.task_id:
            held.stop = self.calls.stops[held.identity] = self.task_id

    def _forget_stop(self) -> None:
        if self.calls.stops.pop(self.identity, None) is not None:
            self.records.put_replaced(self.calls, None)

    def _keep_calls(self) -> None:
        self.records.put_replaced(self.calls, _RECORD_MS + self.asked.max_ms)


def record_start(records: Records, queue: QueueRequest, rank: int, task_id: str, *, granted: bool) -> None:
    """Note the start of a call that a newer one may stop."""
    calls, asked = records.replaced() or ReplacedCalls(), queue.replace or Replace()
    is_repeated = calls.started_id == task_id and asked.repeats != NO_RETRY and calls.started_rank is not None
    if not is_repeated:
        # A retry is as old as the run that it repeats.
        calls.started_rank = rank
    calls.started_id = task_id
    if calls.busy_since is None or not granted:
        # A call that starts without a grant found no waiting call, so newer calls no longer stop one body after the
        # other.
        calls.busy_since = records.now
    records.put_replaced(calls, _RECORD_MS + asked.max_ms)


def is_stopped(records: Records, ending: ReleaseRequest) -> bool:
    """Return whether a newer call asked the run that ends to stop."""
    calls = records.replaced() if ending.queue and ending.replace else None
    return calls is not None and ending.identity in calls.stops


def record_end(records: Records, ending: ReleaseRequest, *, ours: bool, final: bool) -> None:
    """Note the end of a run that newer calls may have stopped."""
    calls = records.replaced() if ending.queue and ending.replace and ending.identity else None
    if calls is None:
        return
    if final:
        calls.stops.pop(ending.identity, None)
    if ours and ending.replace == "ended":
        calls.busy_since = None
    records.put_replaced(calls, None)
