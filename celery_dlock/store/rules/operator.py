"""The rules of reading and acting on a lock name as an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..model import Grant
from ..operator_model import (
    OPERATOR,
    ClaimView,
    HolderView,
    LockView,
    RunView,
    State,
    WaiterState,
    WaiterView,
    acquisition_shown,
    shown_acquisition,
)
from .queue import (
    count_waiters,
    first_waiters,
    grant_next,
    grants_of,
    has_waiters,
    shown_place,
    unpublished_grant,
)
from .records import LockRecord, Records, RunMark
from .runs import last_run
from .views import first_line

__all__ = ["cancel_hold", "describe", "free_lock", "hold_lock", "names_in", "run_view", "show_queue"]


def _kept_by(acquisition: str) -> str:
    """Return why no body runs under a lock; "" if one may run."""
    if acquisition == "kept":
        return "min_hold"
    if acquisition.startswith("reserved:"):
        return "keep_on_retry"
    return "operator" if acquisition.startswith(OPERATOR) else ""


def free_lock(records: Records, acquisition: str, *, force: bool) -> tuple[str, Grant | None]:
    """Release a lock, but only from the acquisition that the operator was shown."""
    shown, token = shown_acquisition(acquisition)
    lock = records.lock()
    current = "" if lock is None else str(lock.since if lock.acquisition.startswith(OPERATOR) else lock.token)
    if lock is None or lock.acquisition != shown or (token and token != current):
        granted = unpublished_grant(records, shown)
        return "freed" if granted else "free" if lock is None else "other", granted
    if lock.due is not None:
        return "granted", None
    if not force and _kept_by(lock.acquisition):
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
    if lock is not None and lock.due is None and not _kept_by(lock.acquisition):
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


def show_queue(
    records: Records, name: str, most: int, grants: Sequence[LockRecord] | None = None
) -> tuple[int, list[WaiterView]]:
    """Return the number of waiters, and the first of them with their identities. ``grants``: as in ``list_waiters``."""
    grants = grants_of(records) if grants is None else grants
    found: list[tuple[str, int, WaiterState, int]] = [(lock.identity, lock.rank, "granted", 0) for lock in grants]
    found += [(waiter, rank, "waiting", 0) for waiter, rank in first_waiters(records, most)]
    newest = records.newest_call()
    for waiter, due in records.first_in("delayed", most):
        rank, lost = records.lost_grants(waiter)
        waits_for_newer = newest is not None and newest.identity == waiter and not lost
        state: WaiterState = "debounced" if waits_for_newer else "delayed"
        found.append((waiter, rank or 0, "replaced" if records.over(waiter) is not None else state, due))
    views: list[WaiterView] = []
    for identity, rank, state, due in found:
        entry = records.entry(identity)
        if entry is not None and len(views) < most:
            task, task_id = names_in(entry)
            views.append(
                WaiterView(name, identity, task, task_id, shown_place(rank) / 1e6, state, len(views) + 1, due / 1e6)
            )
    return count_waiters(records) + len(grants), views


def names_in(entry: str) -> tuple[str, str]:
    """Return task name and task id of a parked message; "" if it is unreadable."""
    names = first_line(entry)
    if not isinstance(names, list) or len(names) != 2:  # noqa: PLR2004  # task name and task id
        return "", ""
    return str(names[0]), str(names[1])


def run_view(records: Records, name: str, tick: str) -> RunView | None:
    """Return the last run of a name or of one of its ticks."""
    run = last_run(records, name, tick)
    if run is None:
        return None
    mark = RunMark.of(records.mark("run", tick)).shown
    return RunView(
        name, tick, run.state, run.task or "", run.task_id or "", run.node, run.since, run.expires_in,
        run.idempotency_key, mark,
    )  # fmt: skip


def describe(records: Records, name: str, tick: str, *, has_dead_letters: bool, of_seat: bool = False) -> LockView:
    """Return what the store knows about one lock name, or about one tick of it.

    Args:
        records: The records.
        name: The text of the lock name.
        tick: The tick; "" for the name itself.
        has_dead_letters: The name has dead letters.
        of_seat: It is the name of one seat (``limit``). A claim is that of the whole name.
    """
    at, lock = records.now / 1e6, records.lock()
    run = run_view(records, name, tick)
    holder = None if lock is None or tick else _holder_view(records, lock)
    claim = None if tick or of_seat else _claim_view(records, name)
    waiting = 0
    if not tick:
        granted = lock is not None and lock.due is not None
        waiting = count_waiters(records) + granted
    states: list[State] = [holder.state] if holder else []
    if run and run.state != "running":
        states.append(run.state)
    if claim:
        states.append("claimed")
    return LockView(name, tuple(states), holder, run, claim, waiting, has_dead_letters, at)


def _claim_view(records: Records, name: str) -> ClaimView | None:
    found = records.claim()
    if found is None:
        return None
    seconds = max(0, records.claim_left_ms()) / 1000
    return ClaimView(name, found.task, found.task_id, found.node, found.since / 1e6, seconds, found.generation)


def _holder_view(records: Records, lock: LockRecord) -> HolderView:
    acquisition, at = lock.acquisition, records.now / 1e6
    kept_by = _kept_by(acquisition)
    granted = acquisition.startswith("grant:")
    state: Literal["held", "granted", "kept"] = "granted" if granted else "kept" if kept_by else "held"
    expires_in = lock.due / 1e6 - at if lock.due is not None else records.lock_left_ms() / 1000
    ttl = (lock.ttl_ms or 0) / 1000
    shown_as = acquisition_shown(acquisition, kept_by, str(lock.token), str(lock.since))
    return HolderView(
        state=state,
        acquisition=shown_as,
        task=lock.task,
        task_id=lock.task_id,
        worker="" if kept_by == "operator" else lock.node,
        pid=int(lock.pid),
        since=lock.since / 1e6,
        expires_in=max(0.0, expires_in),
        ttl=0.0 if granted else ttl,
        token=lock.token,
        fresh=state == "held" and expires_in > ttl / 2,
        kept_by=kept_by,
        operator=(acquisition if kept_by == "operator" else lock.operator or "").removeprefix(OPERATOR),
        reason=lock.node if kept_by == "operator" else lock.reason,
        releasing=state == "held" and lock.releasing,
        hold=shown_as if kept_by == "operator" else f"{lock.operator}@{lock.asked}" if lock.operator else "",
    )
