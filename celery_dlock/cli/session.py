"""One run of a command: its app, its ``LockControl``, and the exit code of each error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from ..reports.actions import ACTIONS
from ..reports.facts import Table
from ..utils.text import printable
from .options import NO_HEADERS
from .output import Output, note

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
        out: The output.
    """

    def __init__(self, control: LockControl, app: Any, out: Output) -> None:
        self.control = control
        self.app = app
        self.out = out

    def show(self, items: Sequence[Any], table: Table, cursor: str = "", *, fit: bool = False) -> None:
        """Print a list. If it is empty, say so, and end the command with exit code 1."""
        self.out.show(items, table, cursor, fit=fit)
        if not items:
            note(table.empty)
            click.get_current_context().exit(NOTHING)

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
            yield Session(control, app, Output(form, urls, headers=not context.meta.get(NO_HEADERS)))
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
