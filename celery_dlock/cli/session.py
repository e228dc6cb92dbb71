"""One run of a command: its app, its ``LockControl``, its output, and the exit code of each error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from ..reports.actions import ACTIONS
from ..reports.documents import document
from ..reports.facts import Table
from ..utils.text import printable
from .output import note, show_rows

if TYPE_CHECKING:
    from ..control import LockControl

__all__ = [
    "NOTHING",
    "PARTLY",
    "REFUSED",
    "SETTINGS",
    "UNAVAILABLE",
    "Session",
    "import_tasks",
    "session",
    "singleton_task",
]

NOTHING: Final = 1
# 2 is click's: wrong usage.
REFUSED: Final = 3
PARTLY: Final = 4
UNAVAILABLE: Final = 69
SETTINGS: Final = 78
#: Actions after which the progress of a bulk action is printed.
BATCH: Final = 100


class Session:
    """One run of a command.

    Args:
        control: Reads the store and acts on it.
        app: The app.
        form: The form of the output: ``"json"``, ``"jsonl"`` or None.
        store: The location of the store, without its password.
    """

    def __init__(self, control: LockControl, app: Any, form: str | None, store: str) -> None:
        self.control = control
        self.app = app
        self.form = form
        self._store = store

    def show(self, items: Sequence[Any], table: Table, cursor: str = "", *, fit: bool = False) -> None:
        """Print a list. If it is empty, say so, and end the command with exit code 1.

        Args:
            items: The items.
            table: Their facts.
            cursor: The cursor of the next page.
            fit: Shorten the table if it is too wide for the terminal.
        """
        if self.form:
            self.show_json(items, table, cursor)
        elif items:
            show_rows(table.columns, [[fact.text(item) for fact in table.columns] for item in items], fit=fit)
        if cursor and self.form != "json":
            note(f"there are more: --cursor {cursor}")
        if not items:
            note(table.empty)
            click.get_current_context().exit(NOTHING)

    def show_json(self, items: Iterable[Any], table: Table, cursor: str = "") -> None:
        """Print items as one document, or as one document each."""
        rows = table.rows(items)
        if self.form == "json":
            click.echo(json.dumps(document(rows, self._store, cursor), indent=2))
        else:
            for row in rows:
                click.echo(json.dumps(row))

    def act(
        self,
        verb: str,
        items: Sequence[Any],
        act: Callable[[Any, str], bool],
        *,
        exact: bool,
        reason: str,
        yes: bool,
        dry_run: bool,
    ) -> None:
        """Act on each item. End the command with the exit code.

        Args:
            verb: The name of the action.
            items: The items.
            act: Acts on one item, with a reason, and returns whether it was done.
            exact: The command names these items, so it needs no ``yes``.
            reason: The operator's reason.
            yes: The operator confirmed it.
            dry_run: Only print the items.
        """
        context = click.get_current_context()
        what = verb.replace("_", " ")
        note(f"{what}: {len(items)} found")
        if not items:
            context.exit(NOTHING)
        if dry_run:
            for item in items:
                click.echo("\t".join(map(printable, (item.name, item.task, item.task_id))))
            return
        if len(items) > 1 and not (exact or yes):
            raise click.UsageError(f"this concerns {len(items)}: give --yes to do it, or --dry-run to see them")
        done = _act_on_each(items, what, lambda item: act(item, reason))
        note(f"{what}: {done} of {len(items)} done")
        if done < len(items):
            note(f"not done: {ACTIONS[verb].gone}")
            context.exit(PARTLY if done else NOTHING)


def import_tasks(app: Any) -> None:
    """Import the modules of the app's tasks: a task stores the end of its messages, and knows its options."""
    app.loader.import_default_modules()
    app.finalize()


def singleton_task(app: Any, name: str) -> Any:
    """Return the singleton task of this name."""
    import_tasks(app)
    task = app.tasks.get(name)
    if not hasattr(task, "lock_name"):
        raise click.UsageError(f"no singleton task {name!r} is registered in this app")
    return task


def _act_on_each(items: Sequence[Any], what: str, act: Callable[[Any], bool]) -> int:
    """Act on each item, and return how many were done. Print it too if Ctrl-C or the store ends the action early."""
    from ..errors import StoreUnavailable  # noqa: PLC0415  # every celery command imports this module

    done = 0
    try:
        for number, item in enumerate(items, 1):
            done += act(item)
            if number % BATCH == 0:
                note(f"{what}: {number} of {len(items)}")
    except KeyboardInterrupt:
        note(f"{what}: interrupted, {done} of {len(items)} done; the one before the interrupt may be done too")
        click.get_current_context().exit(PARTLY)
    except StoreUnavailable:
        note(f"{what}: {done} of {len(items)} done")
        raise
    return done


@contextmanager
def session(form: str | None = None) -> Iterator[Session]:
    """Open the store of the app that the command line names."""
    from ..control import ActionRefused, LockControl  # noqa: PLC0415  # every celery command imports this module
    from ..errors import DLockError, InvalidLockOptions, StoreUnavailable  # noqa: PLC0415
    from ..runtime import Runtime  # noqa: PLC0415

    context = click.get_current_context()
    app = context.obj.app
    try:
        control = LockControl(app)
    except InvalidLockOptions as error:
        note(f"Error: {error}")
        context.exit(SETTINGS)
    urls = ", ".join(location.shown for location in Runtime.of(app).settings.locations)
    try:
        with control:
            yield Session(control, app, form, urls)
    except ActionRefused as error:
        note(f"Refused: {error}")
        if error.why in ("fresh", "kept"):
            note("To release it by force, give --force.")
        context.exit(REFUSED)
    except StoreUnavailable as error:
        note(f"Error: {urls}: {error}")
        context.exit(UNAVAILABLE)
    except (DLockError, ValueError) as error:
        raise click.UsageError(printable(str(error))) from error
