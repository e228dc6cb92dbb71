"""``dlock list --workers``: what live workers say that they hold."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any, Final

import click

from ..reports.tables import LEASES, WORKERS
from .output import note, show_rows
from .session import NOTHING, UNAVAILABLE, Session

__all__ = ["show_workers"]

#: What each row tells of the worker, before one of its leases.
_OF_WORKER: Final = WORKERS.pick("worker", "pool", "version", "watchdog")


def show_workers(opened: Session, task: str | None, name: str | None, *, fit: bool) -> None:
    """Print the workers that answer, with the leases of this task and of names that match the pattern.

    Args:
        opened: The run of the command.
        task: The task; None for all.
        name: The pattern; None for all names.
        fit: Shorten the table if it is too wide for the terminal.
    """

    def wanted(lease: Any) -> bool:
        return task in (None, lease.task) and (name is None or fnmatch.fnmatchcase(lease.name, name))

    found = opened.control.workers()
    views = [dataclasses.replace(view, leases=tuple(filter(wanted, view.leases))) for view in found.workers]
    if opened.form:
        opened.show_json(views, WORKERS)
    else:
        show_rows([*_OF_WORKER, *LEASES.columns], [row for view in views for row in _rows(view)], fit=fit)
    for view in found.workers:
        if view.held > len(view.leases):
            note(f"{view.worker} holds {view.held} locks, and names the first {len(view.leases)}")
    if found.problem:
        note(found.problem)
        click.get_current_context().exit(UNAVAILABLE if found.unreachable else NOTHING)


def _rows(view: Any) -> list[list[str]]:
    """Return a row for each lease; one for a worker without a lease."""
    nothing = [f"({LEASES.empty})", *[""] * (len(LEASES.columns) - 1)]
    leases = [[fact.text(lease) for fact in LEASES.columns] for lease in view.leases] or [nothing]
    return [[*(fact.text(view) for fact in _OF_WORKER), *lease] for lease in leases]
