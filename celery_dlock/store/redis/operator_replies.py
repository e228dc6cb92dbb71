"""Replies of the scripts for operators, parsed into the views of :mod:`...operator_model`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from ...keys.lock_name import ONE_SEAT, LockName
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
)
from . import replies

__all__ = ["first_line", "lock_view", "run_view", "waiters"]


def lock_view(name: LockName, tick: str, reply: Sequence[Any]) -> LockView:
    """Return the view of a lock name, or of one tick of it, from the reply of ``describe``."""
    now, waiting, has_dead_letters, lock, run, claim = reply
    at = int(now) / 1e6
    holder = _holder(lock, at) if lock else None
    last_run = run_view(name, tick, [run[1], run[0], lock[1] if lock else b""]) if run else None
    claimed = _claim(name, claim) if claim else None
    if tick:  # the view of one tick: the name itself has a view of its own
        holder = claimed = None
        waiting = 0
    if name.seats == ONE_SEAT:  # the claim is that of the name
        claimed = None
    states: list[State] = [holder.state] if holder else []
    if last_run and last_run.state != "running":
        states.append(last_run.state)
    if claimed:
        states.append("claimed")
    expires = holder is not None and holder.state != "granted"
    shown = (lock if expires else None, run if last_run else None, claim if claimed else None)
    endless = sum(int(fields[0]) < 0 for fields in shown if fields)
    return LockView(name.text, tuple(states), holder, last_run, claimed, waiting, bool(has_dead_letters), at, endless)


def _holder(fields: Sequence[Any], at: float) -> HolderView:
    left_ms, *texts = fields
    acquisition, token, since, releasing, task, task_id, process, ttl, due, operator, reason, asked = map(_text, texts)
    node, _, pid = process.rpartition(" ")
    kept_by = _kept_by(acquisition)
    granted = acquisition.startswith("grant:")
    state: Literal["held", "granted", "kept"] = "granted" if granted else "kept" if kept_by else "held"
    expires_in = int(due) / 1e6 - at if granted and due else int(left_ms) / 1000
    ttl_s = int(ttl or 0) / 1000
    held = state == "held"
    shown = acquisition_shown(acquisition, kept_by, token, since)
    return HolderView(
        state=state,
        acquisition=shown,
        task=task,
        task_id=task_id,
        worker="" if kept_by == "operator" else node,
        pid=int(pid or 0),
        since=int(since) / 1e6,
        expires_in=max(0.0, expires_in),
        ttl=0.0 if granted else ttl_s,
        token=int(token),
        fresh=held and expires_in > ttl_s / 2,
        kept_by=kept_by,
        operator=(acquisition if kept_by == "operator" else operator).removeprefix(OPERATOR),
        reason=node if kept_by == "operator" else reason,
        releasing=held and releasing == "1",
        hold=shown if kept_by == "operator" else f"{operator}@{asked}" if operator else "",
    )


def _kept_by(acquisition: str) -> str:
    if acquisition == "kept":
        return "min_hold"
    if acquisition.startswith("reserved:"):
        return "keep_on_retry"
    return "operator" if acquisition.startswith(OPERATOR) else ""


def run_view(name: LockName, tick: str, reply: Sequence[Any]) -> RunView | None:
    """Return a run from a run mark, the milliseconds that it lives, and the acquisition that holds the lock."""
    run = replies.use(reply, name.text)
    if run is None:
        return None
    _, at, _, acquisition, *_ = _text(reply[0]).split("\n")
    mark = acquisition or f"at:{at}"
    return RunView(
        name.text, tick, run.state, run.task or "", run.task_id or "", run.node, run.since, run.expires_in,
        run.idempotency_key, mark,
    )  # fmt: skip


def _claim(name: LockName, fields: Sequence[Any]) -> ClaimView:
    left_ms, *texts = fields
    task_id, task, node, since, generation = map(_text, texts)
    seconds = max(0, int(left_ms)) / 1000
    return ClaimView(name.text, task, task_id, node, int(since or 0) / 1e6, seconds, int(generation or 0))


def waiters(name: LockName, reply: Sequence[Any]) -> tuple[int, list[WaiterView]]:
    """Return the number of waiters, and the first of them, from the reply of ``show_queue``."""
    return reply[0], list(_waiters(name, reply[1:]))


def _waiters(name: LockName, facts: Sequence[Any]) -> Iterator[WaiterView]:
    for position, start in enumerate(range(0, len(facts), 5), 1):
        identity, rank, state, due, names = facts[start : start + 5]
        task, task_id = first_line(names)
        known = cast("WaiterState", _text(state))
        since, until = float(rank) / 1e6, float(due) / 1e6
        yield WaiterView(name.text, _text(identity), task, task_id, since, known, position, until)


def first_line(names: bytes) -> tuple[str, str]:
    """Return task name and task id from the first line of a parked message; "" for a message that is unreadable."""
    try:
        task, task_id = json.loads(names)
    except (TypeError, ValueError):
        return "", ""
    return str(task), str(task_id)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
