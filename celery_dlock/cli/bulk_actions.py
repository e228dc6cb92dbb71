"""The commands ``queue``, ``dead`` and ``claims``: each lists messages, and acts on one or on many of them."""

from __future__ import annotations

import re
from typing import Any, Final

import click

from ..reports.actions import ACTIONS
from ..reports.tables import CLAIMS, DEAD_LETTERS, WAITERS
from .options import ListByDefault, bulk, listing, option
from .output import note
from .session import Session, import_tasks, session

__all__ = ["COMMANDS"]

#: NAME/ID, where the name of a lock ends with its digest and may contain slashes.
_WITH_ID: Final = re.compile(r"(.*:[0-9a-f]{32})/(.+)")
#: All of them.
_ALL: Final = 1_000_000


@click.group(cls=ListByDefault)
def queue() -> None:
    """List the waiters (on_conflict="queue"): queue [NAME]. Or end them: queue drop.

    The list has options too: queue list --help.
    """


@queue.command("list", hidden=True)
@click.argument("name", required=False)
@option("--limit", type=click.IntRange(1, _ALL), default=1000, show_default=True, help="At most this many waiters.")
@listing
def queue_list(name: str | None, limit: int, form: str | None) -> None:
    """List the waiters of a lock, or of all locks."""
    with session(form) as opened:
        found = opened.control.waiting(name, limit=limit)
        if len(found) == limit:
            note(f"these are the first {limit}: a higher --limit prints more, if there are more")
        opened.show(found, WAITERS)


@queue.command("drop", help=f"{ACTIONS['drop'].about} Targets: NAME, NAME/TASK_ID or --task.")
@click.argument("target", required=False)
@option("--task", help="Only those of this task.")
@bulk
def queue_drop(target: str | None, task: str | None, **how: Any) -> None:
    name, wanted = _target(target, task)
    with session() as opened:
        waiters = [one for one in opened.control.waiting(name, limit=_ALL) if _matches(one, wanted, task)]
        _act(opened, "drop", waiters, wanted, how)


@click.group(cls=ListByDefault)
def dead() -> None:
    """List the dead letters: dead [NAME]. Or settle them: dead requeue, dead drop.

    The list has options too: dead list --help.
    """


@dead.command("list", hidden=True)
@click.argument("name", required=False)
@option("--task", help="Only those of this task.")
@listing
def dead_list(name: str | None, task: str | None, form: str | None) -> None:
    """List the dead letters of a lock, or of all locks."""
    with session(form) as opened:
        opened.show(opened.control.dead_letters(name, task=task, limit=_ALL).items, DEAD_LETTERS)


def _dead_command(verb: str) -> None:
    """Add a command that acts on dead letters."""

    @dead.command(verb, help=f"{ACTIONS[verb].about} Targets: NAME, NAME/ID, --task or --all.")
    @click.argument("target", required=False)
    @option("--task", help="Only those of this task.")
    @option("--all", "every", is_flag=True, help="All dead letters.")
    @bulk
    def act(target: str | None, task: str | None, every: bool, **how: Any) -> None:  # noqa: FBT001
        name, wanted = _target(target, task, every or None)
        with session() as opened:
            found = opened.control.dead_letters(name, task=task, limit=_ALL).items
            _act(opened, verb, [one for one in found if _matches(one, wanted, task)], wanted, how)


for _verb in ("requeue", "drop"):
    _dead_command(_verb)


@click.group(cls=ListByDefault)
def claims() -> None:
    """List the claims of published messages (unique). Or delete them: claims drop.

    The list has options too: claims list --help.
    """


@claims.command("list", hidden=True)
@option("--task", help="Only those of this task.")
@option("--limit", type=click.IntRange(1), default=100, show_default=True, help="A page ends when it has this many.")
@option("--cursor", default="", help="The next page: the cursor that the page before printed.")
@listing
def claims_list(task: str | None, limit: int, cursor: str, form: str | None) -> None:
    """List the claims."""
    with session(form) as opened:
        page = opened.control.claims(task=task, cursor=cursor, limit=limit)
        opened.show(page.items, CLAIMS, page.cursor)


@claims.command("drop", help=f"{ACTIONS['drop_claim'].about} Targets: NAME or --task.")
@click.argument("name", required=False)
@option("--task", help="Only those of this task.")
@bulk
def claims_drop(name: str | None, task: str | None, **how: Any) -> None:
    _target(name, task)
    with session() as opened:
        views = [opened.control.lock(name)] if name else opened.control.all_locks(task=task, state="claimed")
        _act(opened, "drop_claim", [view.claim for view in views if view.claim], name, how)


def _target(target: str | None, *others: object) -> tuple[str | None, str]:
    """Return the lock name and the id of NAME or NAME/ID, which must be given if nothing else is."""
    if sum(one is not None for one in (target, *others)) != 1:
        raise click.UsageError("expected exactly one target, such as NAME or --task")
    match = _WITH_ID.fullmatch(target or "")
    return (match[1], match[2]) if match else (target, "")


def _matches(one: Any, wanted: str, task: str | None) -> bool:
    return (not wanted or wanted in (one.identity, one.task_id)) and task in (None, one.task)


def _act(opened: Session, verb: str, items: list[Any], wanted: str | None, how: dict[str, Any]) -> None:
    import_tasks(opened.app)  # a dropped message's task stores its result
    action = getattr(opened.control, verb)

    def act(one: Any, reason: str) -> bool:
        shown = {"task_id": one.task_id} if verb == "drop_claim" else {"identity": one.identity}
        return bool(action(one.name, **shown, reason=reason))

    opened.act(verb, items, act, exact=bool(wanted), **how)


COMMANDS: Final = (queue, dead, claims)
