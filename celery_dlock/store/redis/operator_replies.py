"""Replies of the scripts for operators, parsed into the records of the rules and shown by their views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...keys.lock_name import ONE_SEAT, LockName
from ..operator_model import ClaimView, LockView, RunView
from ..rules import views
from ..rules.data import Claim, LockRecord
from .replies import run_mark, text

__all__ = ["lock_view", "names_in", "run_view"]


def lock_view(name: LockName, tick: str, reply: Sequence[Any]) -> LockView:
    """Return the view of a lock name, or of one tick of it, from the reply of ``describe``."""
    now, waiting, has_dead_letters, lock, run, claim = reply
    last_run = run_view(name, tick, [run[1], run[0], lock[1] if lock else b""]) if run else None
    holder = claimed = None
    if tick:  # the view of one tick: the name itself has a view of its own
        waiting = 0
    else:
        holder = views.holder_view(_lock(lock), int(lock[0]), int(now)) if lock else None
        # The claim of a name with seats is that of the name.
        claimed = _claim(name, claim) if claim and name.seats != ONE_SEAT else None
    expires = holder is not None and holder.state != "granted"
    shown = (lock if expires else None, run if last_run else None, claim if claimed else None)
    endless = sum(int(fields[0]) < 0 for fields in shown if fields)
    return views.lock_view(
        name.text, int(now), holder, last_run, claimed, waiting,
        has_dead_letters=bool(has_dead_letters), without_expiry=endless,
    )  # fmt: skip


def _lock(fields: Sequence[Any]) -> LockRecord:
    (
        acquisition, token, since, releasing, task, task_id, process, ttl_ms, due, operator, reason, asked,
    ) = map(text, fields[1:])  # fmt: skip
    node, _, pid = process.rpartition(" ")
    return LockRecord(
        acquisition, "", int(token), int(since), task, task_id, node, pid or "0", _number(ttl_ms),
        releasing=releasing == "1", operator=operator or None, reason=reason, asked=_number(asked), due=_number(due),
    )  # fmt: skip


def _number(value: str) -> int | None:
    return int(value) if value else None


def _claim(name: LockName, fields: Sequence[Any]) -> ClaimView:
    task_id, task, node, since, generation = map(text, fields[1:])
    claim = Claim(task_id, task, node, int(generation or 0), "", int(since or 0))
    return views.claim_view(name.text, claim, int(fields[0]))


def run_view(name: LockName, tick: str, reply: Sequence[Any]) -> RunView | None:
    """Return a run from a run mark, the milliseconds until it expires, and the acquisition that holds the lock."""
    return views.run_view(name.text, tick, *run_mark(reply))


def names_in(names: bytes) -> tuple[str, str]:
    """Return task name and task id from the first line of a parked message; "" for a message that is unreadable."""
    return views.names_in(text(names))
