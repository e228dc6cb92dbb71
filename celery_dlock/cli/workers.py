"""``dlock list --workers``: what live workers say that they hold."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any, Final

import click

from .output import Column, note
from .session import NOTHING, UNAVAILABLE, Session

__all__ = ["show_workers"]

#: A row of the table is a worker and one of its leases; None for a worker without one.
_COLUMNS: Final[list[Column]] = [
    ("WORKER", lambda row: row[0].worker),
    ("POOL", lambda row: row[0].pool or "-"),
    ("VERSION", lambda row: row[0].version or "-"),
    ("WATCHDOG", lambda row: row[0].watchdog or "-"),
    ("NAME", lambda row: row[1].name if row[1] else f"({row[0].problem or 'holds nothing that matches'})"),
    ("TASK", lambda row: row[1].task if row[1] else "-"),
    ("TASK ID", lambda row: (row[1] and row[1].task_id) or "-"),
    ("PID", lambda row: row[1].pid if row[1] else row[0].pid or "-"),
    ("TTL", lambda row: f"{row[1].expires_in:.0f}" if row[1] else "-"),
]


def show_workers(opened: Session, task: str | None, name: str | None) -> None:
    """Print the workers that answer, with the leases of this task and of names that match the pattern."""

    def wanted(lease: Any) -> bool:
        return task in (None, lease.task) and (name is None or fnmatch.fnmatchcase(lease.name, name))

    found = opened.control.workers()
    views: list[Any] = [dataclasses.replace(view, leases=tuple(filter(wanted, view.leases))) for view in found.workers]
    opened.out.grouped(views, _COLUMNS, lambda view: [(view, lease) for lease in view.leases or (None,)])
    for view in found.workers:
        if view.held > len(view.leases):
            note(f"{view.worker} holds {view.held} locks, and names the first {len(view.leases)}")
        if view.watchdog in {"late", "dead"}:
            note(f"{view.worker}: its watchdog is {view.watchdog}, so its leases may be lost")
    if found.problem:
        note(found.problem)
        click.get_current_context().exit(UNAVAILABLE if found.unreachable else NOTHING)
