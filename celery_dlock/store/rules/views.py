"""Records as the values of the store contract."""

from __future__ import annotations

import json
import re
from typing import Any

from ..holder_model import Holder
from ..model import owner_of
from ..operator_model import OPERATOR
from .records import LockRecord, Records, RunMark

__all__ = ["first_line", "holder_of", "left_of_lock", "run_holder", "task_of"]

_NODE_AND_PID = re.compile(r"\d+")


def left_of_lock(records: Records, lock: LockRecord) -> int:
    """Return the milliseconds until the lock expires, or until the grant is due if the lock is granted."""
    if lock.due is not None:
        return max(0, (lock.due - records.now) // 1000)
    return records.lock_left_ms()


def holder_of(records: Records, lock: LockRecord) -> Holder:
    """Return the holder of a lock."""
    acquisition = lock.acquisition
    return Holder(
        lock.task or None,
        lock.task_id or None,
        lock.node,
        int(lock.pid),
        since=lock.since / 1e6,
        owner=acquisition if acquisition.startswith(OPERATOR) else owner_of(acquisition),
        identity=lock.identity,
        token=lock.token,
        hold_count=lock.count,
        releasing=lock.releasing,
        expires_in=max(0, left_of_lock(records, lock)) / 1000,
        kept_by_min_hold=acquisition == "kept",
        reserved_for_retry=acquisition.startswith("reserved:"),
    )


def run_holder(mark: RunMark) -> Holder:
    """Return the earlier run that a mark describes."""
    task, task_id, node, pid = json.loads(mark.by)
    return Holder(task or None, task_id or None, node, int(pid), since=int(mark.at) / 1e6, identity=mark.identity)


def first_line(entry: str) -> Any:
    """Return the first line of a parked message: task name and task id; None if it is unreadable."""
    try:
        return json.loads(entry.partition("\n")[0])
    except ValueError:
        return None


def task_of(entry: str) -> tuple[str, str]:
    """Return task name and task id of a parked message, "" for a part that is missing."""
    names = first_line(entry)
    if not isinstance(names, list):
        return "", ""
    parts = [part if isinstance(part, str) else "" for part in [*names, "", ""][:2]]
    return parts[0], parts[1]
