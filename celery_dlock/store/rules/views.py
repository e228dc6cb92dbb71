"""The records of a lock name as views: values of the store contract that callers and operators see.

Every store makes its views here. The Redis store parses the replies of its scripts into records first.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

from ...keys.lock_name import idempotency_key
from ..acquisition import OPERATOR, acquisition_shown, owner_of
from ..holder_model import Holder
from ..operator_model import ClaimView, HolderView, LockView, RunView, State
from .data import Claim, LockRecord, RunMark
from .records import Records

__all__ = [
    "claim_view",
    "first_line",
    "holder_of",
    "holder_view",
    "left_of_lock",
    "lock_view",
    "names_in",
    "run_holder",
    "run_view",
    "task_of",
]


def left_of_lock(records: Records, lock: LockRecord) -> int:
    """Return the milliseconds until the lock expires, or until the grant is due if the lock is granted."""
    if lock.due is not None:
        return max(0, (lock.due - records.now) // 1000)
    return records.lock_left_ms()


def holder_of(lock: LockRecord, left_ms: int) -> Holder:
    """Return the holder of a lock, which expires after so many milliseconds, or whose grant is due then."""
    return Holder(
        lock.task or None,
        lock.task_id or None,
        lock.node,
        int(lock.pid),
        since=lock.since / 1e6,
        owner=owner_of(lock.acquisition),
        identity=lock.identity,
        token=lock.token,
        hold_count=lock.count,
        releasing=lock.releasing,
        expires_in=max(0, left_ms) / 1000,
        kind=lock.kind,
    )


def holder_view(lock: LockRecord, left_ms: int, now: int) -> HolderView:
    """Return the holder of a lock, as operators see it.

    Args:
        lock: The lock.
        left_ms: Milliseconds until it expires.
        now: The time of the store, in microseconds since the epoch.
    """
    kind = lock.kind
    states: dict[str, Literal["held", "granted"]] = {"owner": "held", "grant": "granted"}
    state: Literal["held", "granted", "kept"] = states.get(kind, "kept")
    expires_in = (lock.due - now) / 1e6 if lock.due is not None else left_ms / 1000
    ttl = (lock.ttl_ms or 0) / 1000
    acquisition = acquisition_shown(lock.acquisition, str(lock.token), str(lock.since))
    shown = HolderView(
        state=state,
        acquisition=acquisition,
        task=lock.task,
        task_id=lock.task_id,
        worker=lock.node,
        pid=int(lock.pid),
        since=lock.since / 1e6,
        expires_in=max(0.0, expires_in),
        ttl=0.0 if kind == "grant" else ttl,
        token=lock.token,
        fresh=state == "held" and expires_in > ttl / 2,
        kept_by=kind if kind in ("min_hold", "keep_on_retry", "operator", "guard") else "",
        releasing=state == "held" and lock.releasing,
    )
    if kind == "operator":
        operator = lock.acquisition.removeprefix(OPERATOR)
        return replace(shown, worker="", operator=operator, reason=lock.node, hold=acquisition)
    if lock.operator:  # the hold begins with the holder's release
        operator = lock.operator.removeprefix(OPERATOR)
        return replace(shown, operator=operator, reason=lock.reason, hold=f"{lock.operator}@{lock.asked}")
    return shown


def run_holder(mark: RunMark) -> Holder:
    """Return the earlier run that a mark describes."""
    task, task_id, node, pid = json.loads(mark.by)
    return Holder(task or None, task_id or None, node, int(pid), since=int(mark.at) / 1e6, identity=mark.identity)


def run_view(name: str, tick: str, mark: RunMark, left_ms: int, acquisition: str) -> RunView | None:
    """Return the last run of a name, or of one of its ticks.

    Args:
        name: The text of the lock name.
        tick: The digest of the tick; "" for the name itself.
        mark: The run mark.
        left_ms: Milliseconds until the mark expires.
        acquisition: The acquisition that holds the lock; "" if the lock is free.

    Returns:
        The run; None if there is no mark, or if its run ended without a success.
    """
    if not mark.is_used and mark.state not in ("started", "unknown"):
        return None
    state: Literal["used", "unknown", "running"] = "used" if mark.is_used else "unknown"
    if mark.state == "started" and mark.acquisition == acquisition:
        state = "running"
    by = run_holder(mark)
    # Under Redlock, the stored seed is "token/seed", with the token on which the majority agreed.
    key = idempotency_key(name, mark.seed.rpartition("/")[2])
    return RunView(
        name, tick, state, by.task or "", by.task_id or "", by.node, by.since, max(0, left_ms) / 1000, key, mark.shown
    )


def claim_view(name: str, claim: Claim, left_ms: int) -> ClaimView:
    """Return the claim of a published message, which ends after so many milliseconds."""
    return ClaimView(
        name, claim.task, claim.task_id, claim.node, claim.since / 1e6, max(0, left_ms) / 1000, claim.generation
    )


def lock_view(
    name: str,
    now: int,
    holder: HolderView | None,
    run: RunView | None,
    claim: ClaimView | None,
    waiting: int,
    *,
    has_dead_letters: bool,
    without_expiry: int = 0,
) -> LockView:
    """Return the view of a lock name, or of one tick of it."""
    states: list[State] = [holder.state] if holder else []
    if run and run.state != "running":
        states.append(run.state)
    if claim:
        states.append("claimed")
    return LockView(name, tuple(states), holder, run, claim, waiting, has_dead_letters, now / 1e6, without_expiry)


def first_line(entry: str) -> Any:
    """Return the first line of a parked message: task name and task id; None if it is unreadable."""
    try:
        return json.loads(entry.partition("\n")[0])
    except ValueError:
        return None


def names_in(entry: str) -> tuple[str, str]:
    """Return task name and task id of a parked message; "" if it is unreadable."""
    names = first_line(entry)
    if not isinstance(names, list) or len(names) != 2:  # noqa: PLR2004  # task name and task id
        return "", ""
    return str(names[0]), str(names[1])


def task_of(entry: str) -> tuple[str, str]:
    """Return task name and task id of a parked message, "" for a part that is missing."""
    names = first_line(entry)
    if not isinstance(names, list):
        return "", ""
    parts = [part if isinstance(part, str) else "" for part in [*names, "", ""][:2]]
    return parts[0], parts[1]
