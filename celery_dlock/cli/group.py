"""The commands that read, and the group of all commands."""

from __future__ import annotations

from typing import Any

import click

from ..reports.documents import iso
from ..reports.facts import facts_of
from ..utils.text import printable
from . import actions, check, serve, watch, web
from .columns import LOCKS
from .options import DURATION, JSON, formats, listing, option
from .output import Column, note
from .session import NOTHING, Session, session
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
@option("--workers", is_flag=True, help="List what the live workers hold, with their pools, versions and watchdogs.")
@listing
@click.pass_context
def list_(  # click prints the docstring
    ctx: click.Context, /, task: str | None, name: str | None, state: str | None, older: float | None, limit: int,
    cursor: str, every: bool, workers: bool, form: str | None,  # noqa: FBT001
) -> None:  # fmt: skip
    """List the lock names that are in use. A page can be longer than the limit."""
    if workers and (state or older is not None or cursor or every):
        raise click.UsageError("--workers shows what is held now: of the filters, only --task and --name go with it")
    with session(form) as opened:
        if workers:
            show_workers(opened, task, name)
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
        opened.out.show(found, LOCKS, cursor)
        _exit_if_empty(found, "no lock name is found")


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
        names = [name] if name is not None else _names(opened, task, args, kwargs, task_id)
        views = [opened.control.lock(one) for one in names]
        if form:
            opened.out.show(views, ())
        for view in () if form else views:
            waiters = opened.control.waiting(view.name, limit=10) if view.waiting else ()
            opened.out.facts(view, facts_of(view, waiters))
        if not views:
            note(f"no lock names the task id {task_id}")
        if not any(view.states or view.waiting or view.run for view in views):
            click.get_current_context().exit(NOTHING)


def _names(
    opened: Session, task: str | None, args: list[Any], kwargs: dict[str, Any], task_id: str | None
) -> list[str]:
    if task_id is None:
        return [opened.task(str(task)).lock_name(*args, **kwargs)]
    found = opened.control.explain(task_id)
    places: list[Any] = [*found.holds, *found.waits, *found.dead_letters, *found.runs, *found.claims]
    return sorted({place.name for place in places} | ({found.refused_by} - {""}))


@dlock.command()
@click.argument("task")
@option("--args", type=JSON["array"], default="[]", help="The positional arguments, as JSON.")
@option("--kwargs", type=JSON["object"], default="{}", help="The keyword arguments, as JSON.")
@click.pass_context
def name(ctx: click.Context, task: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Print the lock name of a call. This needs no store."""
    from ..errors import DLockError  # noqa: PLC0415  # every celery command imports this module

    app = ctx.obj.app
    app.loader.import_default_modules()
    found = app.tasks.get(task)
    if not hasattr(found, "lock_name"):
        raise click.UsageError(f"no singleton task {task!r} is registered in this app")
    try:
        click.echo(printable(found.lock_name(*args, **kwargs)))
    except (DLockError, TypeError) as error:
        raise click.UsageError(printable(str(error))) from error


@dlock.command()
@click.argument("task_id")
@formats
def explain(task_id: str, form: str | None) -> None:
    """Say why a call was skipped, where it waits, and what became of it."""
    with session(form) as opened:
        opened.tasks()
        found = opened.control.explain(task_id)
        opened.out.facts(found, [(task_id, line) for line in found.lines])
        if not found.found:
            click.get_current_context().exit(NOTHING)


@dlock.command()
@option("--task", help="Only runs of this task.")
@listing
def unknown(task: str | None, form: str | None) -> None:
    """List the runs whose process died in the body (once_per)."""
    columns: list[Column] = [
        ("NAME", lambda run: run.name),
        ("IDEMPOTENCY KEY", lambda run: run.idempotency_key),
        ("TASK", lambda run: run.task),
        ("TASK ID", lambda run: run.task_id),
        ("WORKER", lambda run: run.worker),
        ("STARTED", lambda run: iso(run.since)),
        ("TICK", lambda run: run.tick or "-"),
        ("MARK", lambda run: run.mark or "-"),
    ]
    with session(form) as opened:
        found = opened.control.unknown_outcomes(task=task, limit=100_000)
        opened.out.show(found, columns)
        _exit_if_empty(found, "no run has an unknown outcome")


@dlock.command()
@option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="At most this many, the newest.")
@listing
def audit(limit: int, form: str | None) -> None:
    """List the newest actions of operators."""
    columns: list[Column] = [
        ("AT", lambda one: iso(one.at)),
        ("USER", lambda one: f"{one.user}@{one.host}"),
        ("NAME", lambda one: one.name),
        ("ACTION", lambda one: f"{one.action}: {one.detail}"),
        ("REASON", lambda one: one.reason or "-"),
    ]
    with session(form) as opened:
        found = opened.control.audit(limit)
        opened.out.show(found, columns)
        _exit_if_empty(found, "no operator has acted yet")


def _exit_if_empty(found: Any, otherwise: str) -> None:
    if not found:
        note(otherwise)
        click.get_current_context().exit(NOTHING)


for command in (*actions.COMMANDS, check.check, watch.watch, serve.metrics, web.web):
    dlock.add_command(command)
