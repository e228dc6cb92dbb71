"""One run of a command: its app, its ``LockControl``, and the exit code of each error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from ..utils.text import printable
from .options import NO_HEADERS
from .output import Output, note

if TYPE_CHECKING:
    from ..control import LockControl

__all__ = ["NOTHING", "PARTLY", "REFUSED", "SETTINGS", "UNAVAILABLE", "Session", "session"]

NOTHING: Final = 1
USAGE: Final = 2
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

    def task(self, name: str) -> Any:
        """Return the singleton task of this name."""
        task = self.tasks().get(name)
        if not hasattr(task, "lock_name"):
            raise click.UsageError(f"no singleton task {name!r} is registered in this app")
        return task

    def tasks(self) -> Any:
        """Return the tasks of the app, after their modules were imported."""
        self.app.loader.import_default_modules()
        self.app.finalize()
        return self.app.tasks

    def act(
        self, items: Sequence[Any], what: str, act: Callable[[Any], bool], *, several: bool, yes: bool, dry_run: bool
    ) -> None:
        """Act on each item. End the command with the exit code.

        Args:
            items: The items.
            what: The action and its object, as ``"drop waiter"``.
            act: Acts on one item, and returns whether it was done.
            several: The command named more than one item, so it needs ``yes``.
            yes: The operator confirmed it.
            dry_run: Only print the items.
        """
        context = click.get_current_context()
        note(f"{what}: {len(items)} found")
        if not items:
            context.exit(NOTHING)
        if dry_run:
            for item in items:
                click.echo("\t".join(map(printable, (item.name, item.task, item.task_id))))
            return
        if several and not yes:
            raise click.UsageError(f"this concerns {len(items)}: give --yes to do it, or --dry-run to see them")
        done = _act_on_each(items, what, act)
        note(f"{what}: {done} of {len(items)} done")
        if done < len(items):
            context.exit(PARTLY if done else NOTHING)


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
    place = ", ".join(location.shown for location in Runtime.of(app).settings.locations)
    try:
        with control:
            yield Session(control, app, Output(form, place, headers=not context.meta.get(NO_HEADERS)))
    except ActionRefused as error:
        note(f"Refused: {error}")
        if error.why in ("fresh", "kept"):
            note("To release it by force, give --force.")
        context.exit(REFUSED)
    except StoreUnavailable as error:
        note(f"Error: {place}: {error}")
        context.exit(UNAVAILABLE)
    except (DLockError, ValueError) as error:
        raise click.UsageError(printable(str(error))) from error
