"""The queue: grants, and every store command that changes them without taking the lock.

These are the rules of the scripts in ``store/redis/scripts``, in Python. A *granter* is the id of the command that
made a grant. If that command is sent twice, its second copy recognises the grant by this id.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..acquisition import granted_to
from ..base import QueueStepResult
from ..model import Grant
from ..operator_model import Waiter, WaiterState, Waiting
from .data import LockRecord
from .records import DONE_MS, Records
from .views import names_in, task_of

__all__ = [
    "MOST_DUPLICATES",
    "confirm_publish",
    "count_waiters",
    "decline_grant",
    "end_grant",
    "first_waiters",
    "grant_next",
    "grants_of",
    "has_waiters",
    "is_duplicate",
    "list_waiters",
    "place_before_all",
    "remove_waiter",
    "requeue",
    "shown_place",
    "sweep",
    "unpublished_grant",
]

_PUBLISH_WITHIN_US = 5_000_000
#: Delayed waiters that return in one step.
_GROUP_SIZE = 16


#: Added to a rank, it makes a place before all waiters.
_BEFORE_ALL_US = -(2**52)
#: A name has one duplicate of a started message, or a few if several of its processes have died.
MOST_DUPLICATES = 16


def place_before_all(rank: int) -> int:
    """Return the place of a duplicate of a message that has started. It is negative."""
    return min(-1, rank + _BEFORE_ALL_US)


def shown_place(place: int) -> int:
    """Return a place as operators see it."""
    return place - _BEFORE_ALL_US if place < 0 else place


def is_duplicate(place: int | None) -> bool:
    """Return whether this is the place of a duplicate of a message that has started. It is no waiter."""
    return place is not None and place < 0


def count_waiters(records: Records) -> int:
    """Return the number of waiters, without duplicates of messages that have started."""
    duplicates = records.first_in("waiting", MOST_DUPLICATES, until=-1)
    return records.count_in("waiting") - len(duplicates) + records.count_in("delayed")


def first_waiters(records: Records, most: int) -> list[tuple[str, int]]:
    """Return the first waiters and their places, without duplicates of messages that have started."""
    return records.first_in("waiting", most, since=0)


def has_waiters(records: Records) -> bool:
    """Return whether messages wait. A granted message does not."""
    return records.count_in("waiting") + records.count_in("delayed") > 0


def grant_next(records: Records, granter: str) -> Grant | None:
    """Grant the free lock to the waiter with the lowest rank. Return None if none waits, or if it is not free yet."""
    now = records.now
    if (lock := records.lock()) is not None:
        # A transaction that the earlier holder guards is open. A sweep grants the lock when it has ended.
        lock.has_waiters = True
        records.put_lock(lock)
        records.sweep_at(now + max(0, records.lock_left_ms()) * 1000)
        return None
    for identity, _ in records.first_in("delayed", _GROUP_SIZE, now):
        rank, _ = records.lost_grants(identity)
        records.put_in("waiting", identity, now if rank is None else rank)
        records.take_from("delayed", identity)
    while first := records.first_in("waiting", 1):
        identity, rank = first[0]
        records.take_from("waiting", identity)
        entry = records.entry(identity)
        if entry is None:
            continue
        task, task_id = task_of(entry)
        due = now + _PUBLISH_WITHIN_US
        grant = LockRecord(granted_to(identity), identity, 0, now, task, task_id, count=0, has_waiters=True)
        grant.rank, grant.due, grant.granter = rank, due, granter
        records.put_lock(grant)
        records.expire_lock(None)
        records.sweep_at(due)
        return Grant(identity, entry, str(now))
    if soonest := records.first_in("delayed", 1):
        records.sweep_at(soonest[0][1])
    elif not records.has_entries():
        records.sweep_at(None)
    return None


def end_grant(records: Records, granter: str) -> Grant | None:
    """End a grant or a reservation, if there is one, and grant the lock to the next waiter.

    If callers wait in their thread or pool slot, they have set ``notify`` on the lock that ends. The next grant keeps
    ``notify``. If there is no next grant, one caller is woken.
    """
    ended = records.lock()
    records.drop_lock()
    granted = grant_next(records, granter)
    if ended is not None and ended.notify:
        lock = records.lock()
        if lock is None:
            records.wake_waiting_call()
        else:
            lock.notify = True
            records.put_lock(lock)
    return granted


def unpublished_grant(records: Records, granter: str) -> Grant | None:
    """Return the grant that this granter made, while its message is not known to be published.

    If the first reply was lost, the second copy of the command returns this grant. Without this, no reply would
    name it.
    """
    lock = records.lock()
    if lock is None or lock.granter != granter or lock.published:
        return None
    entry = records.entry(lock.identity)
    return None if entry is None else Grant(lock.identity, entry, str(lock.since))


def confirm_publish(records: Records, identity: str, grant_timeout_ms: int) -> bool:
    """Record that a granted message was published. From now on, the grant timeout counts."""
    lock = records.lock()
    if lock is None or lock.acquisition != granted_to(identity):
        return False
    _, tries = records.lost_grants(identity)
    lock.published, lock.due = True, records.now + grant_timeout_ms * 1000 * 2**tries
    records.put_lock(lock)
    records.sweep_at(lock.due)
    return True


def decline_grant(records: Records, grant: Grant, *, foreign: bool, present: bool) -> bool:
    """Record that this worker did not publish the message of this grant.

    If the message belongs to another broker, make the grant due at once for that broker's workers.

    Args:
        records: The records of the lock.
        grant: The grant.
        foreign: The message belongs to another broker than this worker's.
        present: With ``foreign``: that broker has running workers.
    """
    lock, now = records.lock(), records.now
    if (
        lock is None
        or lock.acquisition != granted_to(grant.identity)
        or str(lock.since) != grant.grant_id
        or lock.published
    ):
        return False
    if not foreign or present:
        lock.foreign = None
    elif lock.foreign is None:
        lock.foreign = now
    if foreign:
        # Make the grant due at once, for a worker of the message's broker.
        lock.due = now
        records.sweep_at(now)
    records.put_lock(lock)
    return True


def sweep(
    records: Records, granter: str, grant_timeout_ms: int, max_tries: int, foreign_ms: int, pause_ms: int = 0
) -> QueueStepResult:
    """Visit a name with waiters: grant its lock if it is free, and end a grant that no worker took in time."""
    lock, now = records.lock(), records.now
    if lock is not None and lock.due is None:
        # A lease, not a grant: visit the lock again when the lease has expired.
        if records.has_entries() or has_waiters(records):
            lock.has_waiters = True
            records.put_lock(lock)
            records.sweep_at(now + max(0, records.lock_left_ms()) * 1000)
        else:
            records.sweep_at(None)
        return QueueStepResult()
    dead_letter, lost_grant = "", False
    if lock is not None and lock.due is not None:
        waiter = lock.identity
        entry = records.entry(waiter)
        if entry is not None and lock.due > now and (lock.published or lock.granter != granter):
            records.sweep_at(lock.due)
            return QueueStepResult()
        abandoned = lock.foreign is not None and not lock.published and now - lock.foreign >= foreign_ms * 1000
        if entry is not None and not lock.published and not abandoned:
            return _publish_again(records, lock, granter, entry)
        if entry is not None:
            lost_grant = not abandoned
            dead_letter = _lose_grant(records, lock, entry, grant_timeout_ms, max_tries, abandoned=abandoned)
    _pause_duplicates(records, pause_ms)
    granted = end_grant(records, granter)
    if dead_letter and (grant := records.lock()) is not None:
        # If this command is sent twice, the second copy names the dead letter again.
        grant.dead_letter = dead_letter
        records.put_lock(grant)
    return _swept(granted, dead_letter, lost_grant=lost_grant)


def _pause_duplicates(records: Records, pause_ms: int) -> None:
    """Delay duplicates of started messages, so that the done mark of a message whose child died can come first."""
    for waiter, place in records.first_in("waiting", _GROUP_SIZE, -1) if pause_ms else ():
        records.take_from("waiting", waiter)
        records.put_lost_grants(waiter, place, records.lost_grants(waiter)[1])
        records.put_in("delayed", waiter, records.now + pause_ms * 1000)


def _swept(granted: Grant | None, dead_letter: str, *, lost_grant: bool = False) -> QueueStepResult:
    identity, _, why = dead_letter.partition(" ")
    return QueueStepResult("", granted, identity, why == "foreign", lost_grant)


def _publish_again(records: Records, lock: LockRecord, granter: str, entry: str) -> QueueStepResult:
    """Return a grant whose message is not known to be published: its granter may have died.

    The caller publishes the message now, and becomes the granter.
    """
    if lock.granter != granter:
        lock.dead_letter = ""
    lock.due, lock.granter = records.now + _PUBLISH_WITHIN_US, granter
    records.put_lock(lock)
    records.sweep_at(lock.due)
    return _swept(Grant(lock.identity, entry, str(lock.since)), lock.dead_letter)


def _lose_grant(
    records: Records, lock: LockRecord, entry: str, grant_timeout_ms: int, max_tries: int, *, abandoned: bool
) -> str:
    """Delay the waiter, or make it a dead letter. Return the dead letter, as the lock stores it."""
    waiter, now = lock.identity, records.now
    _, lost = records.lost_grants(waiter)
    tries = lost + (not abandoned)
    if abandoned or tries >= max_tries:
        _store_dead_letter(records, waiter, entry)
        records.drop_waiter(waiter)
        return f"{waiter} foreign" if abandoned else waiter
    records.put_lost_grants(waiter, lock.rank, tries)
    # If no other call waits, grant it again at once after its first lost grant: usually a worker died.
    pause_ms = 0 if tries == 1 and not has_waiters(records) else grant_timeout_ms * 2 ** (tries - 1)
    records.put_in("delayed", waiter, now + pause_ms * 1000)
    return ""


def remove_waiter(records: Records, identity: str, granter: str, *, dead_letter: bool, ended: bool) -> QueueStepResult:
    """Remove a waiter. Its grant goes to the next one."""
    lock = records.lock()
    granted = lock is not None and lock.acquisition == granted_to(identity)
    if lock is not None and lock.identity == identity and not granted:
        # The message runs, so the parked one was a duplicate. Leave the lock alone.
        return QueueStepResult()
    entry = records.entry(identity)
    if entry is None:
        entry = records.dead(identity)
    if not dead_letter and (entry is not None or ended):
        # If the broker still has a copy of the removed message, it must not run.
        records.put_mark("done", identity, str(records.now), DONE_MS)
    if ended:
        records.drop_dead(identity)
        records.show_dead(identity, None)
    elif entry is not None:
        _store_dead_letter(records, identity, entry)
    records.drop_waiter(identity)
    if granted:
        return QueueStepResult(entry or "", end_grant(records, granter))
    return QueueStepResult(entry or "", unpublished_grant(records, granter))


def _store_dead_letter(records: Records, identity: str, entry: str) -> None:
    stored_before = records.dead(identity) is not None
    records.put_dead(identity, entry)
    if not stored_before or records.dead_since(identity) is None:
        records.show_dead(identity, records.now)


def requeue(records: Records, identity: str) -> bool:
    """Put a dead letter back into the queue. A later sweep grants it the lock."""
    entry = records.dead(identity)
    if entry is None:
        return records.entry(identity) is not None
    records.put_entry(identity, entry)
    records.put_in("waiting", identity, _rank_of(entry, records.now))
    records.sweep_at(records.now)
    records.drop_dead(identity)
    records.show_dead(identity, None)
    return True


def _rank_of(entry: str, default: int) -> int:
    """Return the rank of a message at its arrival."""
    try:
        facts = json.loads(entry.partition("\n")[2])
    except ValueError:
        return default
    rank = facts.get("rank") if isinstance(facts, dict) else None
    return int(rank) if isinstance(rank, int | float) and not isinstance(rank, bool) else default


def grants_of(records: Records) -> list[LockRecord]:
    """Return the lock if it is granted to a waiter."""
    lock = records.lock()
    return [lock] if lock is not None and lock.due is not None else []


def list_waiters(records: Records, name: str, most: int, grants: Sequence[LockRecord] | None = None) -> Waiting:
    """Return the number of waiters, and the first of them.

    Args:
        records: The records.
        name: The text of the lock name.
        most: The highest number of waiters to name.
        grants: The locks that are granted to waiters; None: the lock of these records, if it is.
    """
    grants = grants_of(records) if grants is None else grants
    found: list[tuple[str, int, WaiterState, int]] = [(lock.identity, lock.rank, "granted", 0) for lock in grants]
    found += [(waiter, rank, "waiting", 0) for waiter, rank in first_waiters(records, most)]
    newest = records.newest_call()
    for waiter, due in records.first_in("delayed", most):
        rank, lost = records.lost_grants(waiter)
        waits_for_newer = newest is not None and newest.identity == waiter and not lost
        state: WaiterState = "debounced" if waits_for_newer else "delayed"
        found.append((waiter, rank or 0, "replaced" if records.replaced_by(waiter) is not None else state, due))
    waiters: list[Waiter] = []
    for identity, rank, state, due in found:
        entry = records.entry(identity)
        if entry is not None and len(waiters) < most:
            since, position = shown_place(rank) / 1e6, len(waiters) + 1
            waiters.append(Waiter(name, identity, *names_in(entry), since, state, position, due / 1e6))
    return Waiting(name, count_waiters(records) + len(grants), tuple(waiters))
