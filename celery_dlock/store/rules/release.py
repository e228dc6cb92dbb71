"""Renew, inspect and release."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..acquisition import KEPT, granted_to, reserved_for
from ..base import DUPLICATE_PAUSE_MS, QueueStepResult, ReleaseRequest
from ..holder_model import Holder
from ..model import Grant, Released, RenewalResult, StopRequest
from .data import LockRecord
from .queue import end_grant, grant_next, sweep, unpublished_grant
from .records import DONE_MS, TOMBSTONE_MS, Records
from .replace import is_stopped, record_end
from .runs import save_run_mark
from .views import holder_of, left_of_lock

__all__ = ["inspect", "release", "renew"]

#: Arguments of a sweep that only grants: grant timeout (ms), tries, and milliseconds for foreign workers.
_NO_DEAD_LETTERS = 60_000, 1_000_000, 10**12


def renew(
    records: Records, acquisition: str, ttl_ms: int, facts: Sequence[tuple[str, str]], *, stoppable: bool = False
) -> RenewalResult:
    """Move a lease's deadline and set facts about the holder, if the acquisition still holds the lock."""
    lock = records.lock()
    if lock is None or lock.acquisition != acquisition:
        return False
    longest, left_ms = max(ttl_ms, lock.ttl_ms or 0), records.lock_left_ms()
    if left_ms > longest:
        # No holder requested such a long lease, so the store's clock went back.
        left_ms = ttl_ms
    if lock.ttl_ms is not None:
        lock.ttl_ms = longest
    for name, text in facts:
        _set_fact(lock, name, text)
    records.put_lock(lock)
    records.expire_lock(max(left_ms, ttl_ms))
    if stoppable and lock.stop is not None and records.now - lock.since >= (lock.min_hold_ms or 0) * 1000:
        return StopRequest(lock.stop)
    return True


def _set_fact(lock: LockRecord, name: str, text: str) -> None:
    if name == "count":
        lock.count = int(text)
    elif name == "reserved_for":
        lock.reserved_for = text
    elif name in ("releasing", "dup"):
        setattr(lock, name, text == "1")
    else:
        raise ValueError(f"unknown fact {name!r}: expected count, releasing, dup or reserved_for")


def inspect(records: Records) -> Holder | None:
    """Return the holder of the lock."""
    lock = records.lock()
    return None if lock is None else holder_of(lock, left_of_lock(records, lock))


def release(
    records: Records, acquisition: str, ending: ReleaseRequest, sweep_name: Callable[..., QueueStepResult] = sweep
) -> Released:
    """End an acquisition: free its lock, set its marks, wake a caller, and grant the lock to the next waiter.

    Args:
        records: The records.
        acquisition: The acquisition.
        ending: Its end.
        sweep_name: Sweeps the name after a release under another policy. Its arguments are those of ``sweep``.
    """
    return _Release(records, acquisition, ending, sweep_name).answer()


class _Release:
    def __init__(
        self,
        records: Records,
        acquisition: str,
        ending: ReleaseRequest,
        sweep_name: Callable[..., QueueStepResult],
    ) -> None:
        self.records, self.acquisition, self.ending, self.sweep_name = records, acquisition, ending, sweep_name
        self.lock = records.lock()
        self.ours = self.lock is not None and self.lock.acquisition == acquisition

    def answer(self) -> Released:
        records, ending, lock = self.records, self.ending, self.lock
        mine = lock if self.ours else None
        duplicate_seen = mine is not None and mine.dup
        crowded = mine is not None and mine.has_waiters
        reserves = mine is not None and ending.reserved_for != ""
        # If the lock is reserved for a retry, set the mark: a late duplicate must not compete with the retry.
        # A run that was stopped may be delivered again, too.
        stopped = is_stopped(records, ending)
        final = ending.identity != "" and ending.final and (duplicate_seen or reserves or stopped or not self.ours)
        rolled_back = ending.outcome_unknown and ending.rolled_back
        hold_ms = 0
        if mine is not None and mine.min_hold_ms is not None and (not rolled_back or mine.operator is not None):
            hold_ms = self._remaining_hold_ms(mine, mine.min_hold_ms)
        retry_queued = (
            ending.queue
            and mine is not None
            and reserves
            and mine.operator is None
            and records.entry(ending.reserved_for) is not None
        )
        if retry_queued:
            # The retry precedes all waiters. Its own min_hold starts when it takes the lock.
            hold_ms, crowded = 0, True
            records.take_from("delayed", ending.reserved_for)
            records.put_in("waiting", ending.reserved_for, 0)
        elif reserves:
            hold_ms = max(hold_ms, ending.reserved_ms)
        woke = mine is not None and mine.notify
        if mine is not None:
            self._free_or_hold(mine, hold_ms)
        if woke:
            # Also if the lock stays held: the caller may be the retry, or it learns how long it has to wait.
            records.wake_waiting_call()
        self._save_marks(final=final)
        record_end(records, ending, ours=self.ours, final=final)
        granted = self._grant(hold_ms, final=final, crowded=crowded)
        return Released(self.ours, duplicate_seen, granted, woke)

    def _remaining_hold_ms(self, lock: LockRecord, min_hold_ms: int) -> int:
        # If the store's clock went back, the hold must not last longer than was asked for.
        held_us = max(0, self.records.now - lock.since)
        return -((held_us - min_hold_ms * 1000) // 1000)

    def _free_or_hold(self, lock: LockRecord, hold_ms: int) -> None:
        if hold_ms <= 0:
            self.records.drop_lock()
            return
        lock.acquisition = reserved_for(self.ending.reserved_for) if self.ending.reserved_for else KEPT
        if lock.operator is not None:
            # hold_lock asked for the lock while it was held.
            lock.acquisition, lock.task, lock.task_id, lock.token = lock.operator, "", "", 0
            lock.since, lock.node, lock.pid = self.records.now, lock.reason, "0"
            lock.operator, lock.reason, lock.asked = None, "", None
        lock.identity, lock.ttl_ms = "", hold_ms
        lock.releasing = lock.dup = False
        lock.min_hold_ms, lock.reserved_for = None, ""
        self.records.put_lock(lock)
        self.records.expire_lock(hold_ms)

    def _save_marks(self, *, final: bool) -> None:
        """Set the marks that outlive the lock, also if the lease was lost: the owner check guards the lock only."""
        records, ending = self.records, self.ending
        if ending.outcome_unknown:
            records.put_mark("tombstone", self.acquisition, "1", TOMBSTONE_MS)
        if final:
            records.put_mark("done", ending.identity, str(records.now), DONE_MS)
        if ending.identity and (ending.once or ending.used_ms > 0):
            save_run_mark(records, self.acquisition, ending)

    def _grant(self, hold_ms: int, *, final: bool, crowded: bool) -> Grant | None:
        records = self.records
        if not self.ending.queue:
            # Another policy: a sweep looks after the waiters.
            lock = None if self.ours else self.lock
            unpublished = lock is not None and lock.granter == self.acquisition and not lock.published
            if not (crowded or unpublished):
                return None
            pause_ms = DUPLICATE_PAUSE_MS if self.ending.of_dead_child else 0
            return self.sweep_name(records, self.acquisition, *_NO_DEAD_LETTERS, pause_ms).granted
        if final:
            records.drop_waiter(self.ending.identity)
            if not self.ours and self.lock and self.lock.acquisition == granted_to(self.ending.identity):
                # The lease was lost, and the lock was granted to a copy of this message, which has finished.
                return end_grant(records, self.acquisition)
        if crowded and hold_ms > 0:
            records.sweep_at(records.now + hold_ms * 1000)
            return None
        if crowded:
            return grant_next(records, self.acquisition)
        return None if self.ours else unpublished_grant(records, self.acquisition)
