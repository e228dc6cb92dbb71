"""The columns of locks and waiters."""

from __future__ import annotations

from typing import Final

from ..reports.documents import iso
from ..reports.facts import seconds_left, worker_of
from .output import Column

__all__ = ["LOCKS", "WAITERS"]


#: Of the views of lock names.
LOCKS: Final[list[Column]] = [
    ("NAME", lambda view: view.name),
    ("STATE", lambda view: ",".join(view.states)),
    ("TASK", lambda view: view.task or "-"),
    ("TASK ID", lambda view: view.task_id or "-"),
    ("WORKER", lambda view: worker_of(view) or "-"),
    ("SINCE", lambda view: iso(view.since) or "-"),
    ("TTL", lambda view: f"{seconds_left(view):.0f}"),
    ("TOKEN", lambda view: (view.holder and view.holder.token) or "-"),
    ("WAITERS", lambda view: view.waiting),
]


#: Of waiters.
WAITERS: Final[list[Column]] = [
    ("NAME", lambda one: one.name),
    ("PLACE", lambda one: one.position),
    ("STATE", lambda one: one.state),
    ("TASK", lambda one: one.task or "-"),
    ("TASK ID", lambda one: one.task_id or "-"),
    ("SINCE", lambda one: iso(one.since)),
    ("DUE", lambda one: iso(one.due) or "-"),
]
