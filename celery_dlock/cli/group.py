"""The commands that read, and the group of all commands."""

from __future__ import annotations

from typing import Any

import click

from ..reports.durations import shown_duration
from ..reports.facts import Table
from ..reports.tables import AUDIT, LOCKS, UNKNOWN_OUTCOMES
from ..utils.text import printable
from . import bulk_actions, check, lock_actions, metrics, migrate, watch, web
from .options import DURATION, JSON, formats, listing, option
from .output import note
from .session import NOTHING, Session, import_tasks, session, singleton_task
from .workers import show_workers

__all__ = ["dlock"]


class _Group(click.Group):
    """A group that explains names that begin with a dash."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            hint = "Is it the name of a lock? Then put -- before it, as in: show -- -NAME"
            raise click.UsageError(f"{error.format_message()} {hint}", error.ctx) from error


@click.group("dlock", cls=_Group)
@click.pass_context
def dlock(ctx: click.Context, /, **_preload: Any) -> None:
    """See and manage the locks of an app.

    Exit codes: 0 done; 1 nothing found, or check found a problem; 2 wrong usage; 3 refused.
    Also 4 partly done; 69 the store does not answer; 78 invalid settings.
    """
    if not ctx.find_root().params.get("app"):
        raise click.UsageError("no app is named: give -A before dlock, as in celery -A app dlock list")


@dlock.command("list")
@option("--task", help="Only names that this task holds, has run or has claimed.")
@option("--name", help="Only names that match this pattern, such as 'shop.*'.")
@option("--state", help="Only these states, with commas: held, granted, kept, used, unknown, claimed.")
@option("--older", type=DURATION, help="Only names that have been in their state for longer, such as 10m.")
@option("--limit", type=click.IntRange(1), default=100, show_default=True, help="A page ends when it has this many.")
@option("--cursor", default="", help="The next page: the cursor that the page before printed.")
@option("--all", "every", is_flag=True, help="All pages.")
@option("--wide", is_flag=True, help="On a terminal, do not shorten the table.")
@option("--workers", is_flag=True, help="List what the live workers hold, with their pools, versions and watchdogs.")
@listing
@click.pass_context
def list_(  # click prints the docstring
    ctx: click.Context, /, task: str | None, name: str | None, state: str | None, older: float | None, limit: int,
    cursor: str, every: bool, wide: bool, workers: bool, form: str | None,  # noqa: FBT001
) -> None:  # fmt: skip
    """List the lock names that are in use. A page can be longer than the limit."""
    if workers and (state or older is not None or cursor or every):
        raise click.UsageError("--workers shows what is held now: of the filters, only --task and --name go with it")
    with session(form) as opened:
        if workers:
            show_workers(opened, task, name, fit=not wide)
            ctx.exit(0)
        found: list[Any] = []
        scanned = 0
        while True:
            page = opened.control.locks(
                task=task,
                name=name,
                state=state.split(",") if state else None,  # type: ignore[arg-type]  # it checks them
                older_than=older,
                cursor=cursor,
                limit=limit,
            )
            found += page.items
            scanned += page.scanned
            cursor = page.cursor
            if not (every and cursor):
                break
            note(f"{len(found)} names; looked at {min(scanned, page.keys)} of {page.keys} keys")
        opened.show(found, LOCKS, cursor, fit=not wide)


@dlock.command()
@click.argument("name", required=False)
@option("--task", help="Show the lock of a call of this task, with --args and --kwargs.")
@option("--args", type=JSON["array"], default="[]", help="The positional arguments, as JSON.")
@option("--kwargs", type=JSON["object"], default="{}", help="The keyword arguments, as JSON.")
@option(
    "--id", "task_id", help="Show the locks that the call with this id holds, awaits or claims, or that refused it."
)
@formats
def show(
    name: str | None, task: str | None, args: list[Any], kwargs: dict[str, Any], task_id: str | None, form: str | None
) -> None:
    """Show everything about one lock name."""
    if sum(one is not None for one in (name, task, task_id)) != 1:
        raise click.UsageError("give one of NAME, --task and --id")
    with session(form) as opened:
        if task is not None:
            names = [singleton_task(opened.app, task).lock_name(*args, **kwargs)]
        else:
            names = [name] if name is not None else opened.control.explain(str(task_id)).names
        views = [opened.control.lock(one) for one in names]
        if form:
            opened.show_json(views, LOCKS)
        for view in () if form else views:
            _show(opened, view)
        if not views:
            note(f"no lock names the task id {task_id}")
        if not any(view.known for view in views):
            click.get_current_context().exit(NOTHING)


def _show(opened: Session, view: Any) -> None:
    lines = [(fact.title.lower(), fact.text(view, shown_duration)) for fact in LOCKS.details]
    waiters = opened.control.waiting(view.name, limit=10) if view.waiting else ()
    lines += [(f"waiter {waiter.position}", str(waiter)) for waiter in waiters]
    for title, text in lines:
        if text:
            click.echo(printable(f"{title}: {text}"))


@dlock.command()
@click.argument("task")
@option("--args", type=JSON["array"], default="[]", help="The positional arguments, as JSON.")
@option("--kwargs", type=JSON["object"], default="{}", help="The keyword arguments, as JSON.")
@click.pass_context
def name(ctx: click.Context, task: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Print the lock name of a call. This needs no store."""
    from ..errors import DLockError  # noqa: PLC0415  # every celery command imports this module

    try:
        click.echo(printable(singleton_task(ctx.obj.app, task).lock_name(*args, **kwargs)))
    except (DLockError, TypeError) as error:
        raise click.UsageError(printable(str(error))) from error


@dlock.command()
@click.argument("task_id")
@formats
def explain(task_id: str, form: str | None) -> None:
    """Say why a call was skipped, where it waits, and what became of it."""
    with session(form) as opened:
        import_tasks(opened.app)
        found = opened.control.explain(task_id)
        if form:
            opened.show_json([found], Table(()))
        for line in () if form else found.lines:
            click.echo(printable(f"{task_id}: {line}"))
        if not found.found:
            click.get_current_context().exit(NOTHING)


@dlock.command()
@option("--task", help="Only runs of this task.")
@listing
def unknown(task: str | None, form: str | None) -> None:
    """List the runs whose process died in the body (once_per)."""
    with session(form) as opened:
        opened.show(opened.control.unknown_outcomes(task=task, limit=100_000).items, UNKNOWN_OUTCOMES)


@dlock.command()
@option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most this many, the newest.")
@listing
def audit(limit: int, form: str | None) -> None:
    """List the newest actions of operators."""
    with session(form) as opened:
        opened.show(opened.control.audit(limit), AUDIT)


for command in (
    *lock_actions.COMMANDS, *bulk_actions.COMMANDS, check.check, migrate.migrate, watch.watch, metrics.metrics, web.web
):  # fmt: skip
    dlock.add_command(command)
