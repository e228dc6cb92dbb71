"""The rules of reading and acting on a lock name as an operator."""

from __future__ import annotations

from ..acquisition import shown_acquisition
from ..model import Grant
from ..operator_model import DeadLetter, LockView
from . import views
from .data import LockRecord
from .queue import (
    count_waiters,
    grant_next,
    has_waiters,
    unpublished_grant,
)
from .records import Records
from .runs import last_run

__all__ = ["cancel_hold", "describe", "free_lock", "hold_lock", "shown_dead_letters"]


def _is_kept(lock: LockRecord) -> bool:
    """Return whether no body can run under a lock: an option or an operator keeps it."""
    return lock.kind not in ("owner", "grant")


def free_lock(records: Records, acquisition: str, *, force: bool) -> tuple[str, Grant | None]:
    """Release a lock, but only from the acquisition that the operator was shown."""
    shown, token = shown_acquisition(acquisition)
    lock = records.lock()
    current = "" if lock is None else str(lock.since if lock.kind == "operator" else lock.token)
    if lock is None or lock.acquisition != shown or (token and token != current):
        granted = unpublished_grant(records, shown)
        return "freed" if granted else "free" if lock is None else "other", granted
    if lock.due is not None:
        return "granted", None
    if lock.kind == "guard" or (not force and _is_kept(lock)):
        return "kept", None
    if not force and records.lock_left_ms() > (lock.ttl_ms or 0) / 2:
        return "fresh", None
    records.drop_lock()
    if lock.notify:
        records.wake_waiting_call()
    return "freed", grant_next(records, shown)


def hold_lock(records: Records, operator: str, hold_ms: int, reason: str) -> bool:
    """Hold a lock for an operator. Return false if the hold begins with the release of the present holder."""
    lock, now = records.lock(), records.now
    if lock is not None and lock.due is None and not _is_kept(lock):
        whole_ms = -((lock.since - now) // 1000) + hold_ms
        lock.operator, lock.reason, lock.asked = operator, reason, now
        lock.min_hold_ms = max(whole_ms, lock.min_hold_ms or 0)
        records.put_lock(lock)
        return False
    if lock is not None and lock.due is not None:
        # The lock is granted. Take the grant back: its waiter waits again at its rank.
        records.put_in("waiting", lock.identity, lock.rank)
    records.drop_lock()
    held = LockRecord(operator, "", 0, now, node=reason, ttl_ms=hold_ms, notify=lock is not None and lock.notify)
    held.has_waiters = has_waiters(records)
    records.put_lock(held)
    records.expire_lock(hold_ms)
    if held.has_waiters:
        records.sweep_at(now + hold_ms * 1000)
    return True


def cancel_hold(records: Records, acquisition: str, hold: str) -> bool:
    """Cancel an operator's hold that waits for the holder's release."""
    lock, (_, asked) = records.lock(), shown_acquisition(hold)
    if lock is None or lock.operator is None or lock.acquisition != acquisition or str(lock.asked) != asked:
        return False
    # This also ends the task's own min_hold: hold_lock replaced its length, so it is not known any more.
    lock.operator, lock.reason, lock.asked, lock.min_hold_ms = None, "", None, None
    records.put_lock(lock)
    return True


def describe(records: Records, name: str, tick: str, *, of_seat: bool = False) -> LockView:
    """Return what the store knows about one lock name, or about one tick of it.

    Args:
        records: The records.
        name: The text of the lock name.
        tick: The tick; "" for the name itself.
        of_seat: It is the name of one seat (``limit``). A claim is that of the whole name.
    """
    run, has_dead_letters = last_run(records, name, tick), records.has_dead()
    if tick:
        return views.lock_view(name, records.now, None, run, None, 0, has_dead_letters=has_dead_letters)
    lock, found = records.lock(), None if of_seat else records.claim()
    holder = None if lock is None else views.holder_view(lock, records.lock_left_ms(), records.now)
    claim = None if found is None else views.claim_view(name, found, records.claim_left_ms())
    waiting = count_waiters(records) + (lock is not None and lock.due is not None)
    return views.lock_view(name, records.now, holder, run, claim, waiting, has_dead_letters=has_dead_letters)


def shown_dead_letters(records: Records, name: str, identity: str) -> list[DeadLetter]:
    """Return a dead letter, once for each time since which operators see it. If it has ended, hide it."""
    entry = records.dead(identity)
    if entry is None:
        records.hide_dead(identity)
        return []
    names = views.names_in(entry)
    return [DeadLetter(name, identity, *names, since / 1e6) for since in records.shown_dead(identity)]
