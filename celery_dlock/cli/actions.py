"""The commands that change something, and the lists of waiters, dead letters and claims."""

from __future__ import annotations

import re
from typing import Any, Final

import click

from ..reports.documents import iso
from .columns import WAITERS
from .options import DURATION, ListByDefault, bulk, listing, option
from .output import Column, note
from .session import NOTHING, Session, session

__all__ = ["COMMANDS"]

_REASON: Final = option("--reason", default="", help="The reason, for the audit.")
#: NAME/ID, where the name of a lock ends with its digest and may contain slashes.
_WITH_ID: Final = re.compile(r"(.*:[0-9a-f]{32})/(.+)")


@click.command()
@click.argument("name")
@option("--acquisition", help="Only this acquisition, as `show` prints it. Default: the present one.")
@option("--force", is_flag=True, help="Also if the holder is alive, or min_hold, keep_on_retry or a hold keeps it.")
@_REASON
def release(name: str, acquisition: str | None, force: bool, reason: str) -> None:  # noqa: FBT001
    """Release a lock, and grant it to the next waiter.

    If the lease was renewed less than half a ttl ago, its holder counts as alive, and the release is refused. With
    --force, another call may run beside the holder until it notices.
    """
    with session() as opened:
        if acquisition is None:
            holder = opened.control.lock(name).holder
            if holder is None:
                note(f"{name} is free")
                click.get_current_context().exit(NOTHING)
            acquisition = holder.acquisition
        opened.tasks()
        opened.control.release(name, acquisition, force=force, reason=reason)
        note(f"{name} is released")


@click.command()
@click.argument("name")
@option("--for", "seconds", type=DURATION, required=True, help="How long, such as 2h.")
@option("--reason", required=True, help="The reason, which skipped calls report.")
def hold(name: str, seconds: float, reason: str) -> None:
    """Hold a lock for a limited time, so that no call runs."""
    with session() as opened:
        held = opened.control.hold(name, seconds, reason)
        note(f"{name} is held" if held else f"{name} will be held when its present holder releases it")


@click.command()
@click.argument("name")
@_REASON
def unhold(name: str, reason: str) -> None:
    """End a hold."""
    with session() as opened:
        opened.tasks()
        _done(opened.control.unhold(name, reason=reason), f"{name} is not held any more", f"no operator holds {name}")


@click.command()
@click.argument("name")
@option("--sent/--not-sent", "sent", required=True, default=None, help="Whether the run did its work.")
@option("--tick", default="", help="The tick of the run (once_per='tick'), as `unknown` prints it.")
@option("--mark", help="Only the run with this mark, as `unknown` prints it. Default: the present one.")
@option("--dry-run", is_flag=True, help="Only print which run would be settled.")
@_REASON
def resolve(
    name: str, sent: bool | None, tick: str, mark: str | None, dry_run: bool, reason: str,  # noqa: FBT001
) -> None:  # fmt: skip
    """Record whether a run of unknown outcome did its work."""
    if sent is None:
        raise click.UsageError("give --sent if the run did its work, or --not-sent if it did not")
    with session() as opened:
        opened.tasks()
        if dry_run:
            runs = opened.control.unknown_outcomes(name, limit=1_000_000)
            found = [run for run in runs if run.tick == tick and mark in (None, run.mark)]
            for run in found:
                note(f"would settle {run.task}[{run.task_id}] on {run.worker} since {iso(run.since)}, mark {run.mark}")
            _done(bool(found), "nothing was changed", f"{name} has no such unknown outcome")
            return
        settled = opened.control.resolve(name, sent=sent, tick=tick, mark=mark, reason=reason)
        _done(settled, f"{name} is settled", f"{name} has no unknown outcome")


@click.command()
@click.argument("name")
@option("--tick", default="", help="The tick to free (once_per='tick'), as `unknown` or `list --json` prints it.")
@_REASON
def forget(name: str, tick: str, reason: str) -> None:
    """Delete the run mark of a name or of a tick (once_per), so that the next call runs."""
    with session() as opened:
        done = opened.control.forget(name, tick=tick, reason=reason)
        _done(done, f"the run mark of {name} is deleted", f"{name} has no run mark")


def _done(done: bool, text: str, otherwise: str) -> None:  # noqa: FBT001
    note(text if done else otherwise)
    if not done:
        click.get_current_context().exit(NOTHING)


# -- waiters


@click.group(cls=ListByDefault)
def queue() -> None:
    """List the waiters (on_conflict="queue"): queue [NAME]. Or end them: queue drop.

    The list has options too: queue list --help.
    """


@queue.command("list", hidden=True)
@click.argument("name", required=False)
@option(
    "--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="At most this many waiters."
)
@listing
def queue_list(name: str | None, limit: int, form: str | None) -> None:
    """List the waiters of a lock, or of all locks."""
    with session(form) as opened:
        found = opened.control.waiting(name, limit=limit)
        opened.out.show(found, WAITERS)
        if len(found) == limit:
            note(f"these are the first {limit}: a higher --limit prints more, if there are more")
        if not found:
            _done(False, "", "nothing waits")  # noqa: FBT003


@queue.command("drop")
@click.argument("target", required=False)
@option("--task", help="Only those of this task.")
@bulk
def queue_drop(target: str | None, task: str | None, **how: Any) -> None:
    """End waiters, by NAME, NAME/TASK_ID or --task: their results become REVOKED."""
    _one_of(target, task)
    with session() as opened:
        name, wanted = _target(target)
        waiters = [one for one in opened.control.waiting(name, limit=1_000_000) if _matches(one, wanted, task)]
        _drop(opened, waiters, "drop waiters", wanted, how)


# -- dead letters


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
    columns: list[Column] = [
        ("NAME", lambda one: one.name),
        ("ID", lambda one: one.task_id or one.identity),
        ("TASK", lambda one: one.task or "-"),
        ("SINCE", lambda one: iso(one.since)),
    ]
    with session(form) as opened:
        found = opened.control.dead_letters(name, task=task, limit=100_000)
        opened.out.show(found, columns)
        if not found:
            _done(False, "", "there are no dead letters")  # noqa: FBT003


@dead.command("requeue")
@click.argument("target", required=False)
@option("--task", help="Only those of this task.")
@option("--all", "every", is_flag=True, help="All dead letters.")
@bulk
def dead_requeue(target: str | None, task: str | None, every: bool, **how: Any) -> None:  # noqa: FBT001
    """Put dead letters back into their queues, by NAME, NAME/ID, --task or --all."""
    with session() as opened:
        letters, wanted = _letters(opened, target, task, every=every)
        reason = how.pop("reason")

        def requeue(letter: Any) -> bool:
            return opened.control.requeue(letter.name, letter.identity, reason=reason)

        opened.act(letters, "requeue dead letters", requeue, several=not wanted and len(letters) > 1, **how)


@dead.command("drop")
@click.argument("target", required=False)
@option("--task", help="Only those of this task.")
@option("--all", "every", is_flag=True, help="All dead letters.")
@bulk
def dead_drop(target: str | None, task: str | None, every: bool, **how: Any) -> None:  # noqa: FBT001
    """End dead letters, by NAME, NAME/ID, --task or --all: their results become REVOKED."""
    with session() as opened:
        letters, wanted = _letters(opened, target, task, every=every)
        _drop(opened, letters, "drop dead letters", wanted, how)


def _letters(opened: Session, target: str | None, task: str | None, *, every: bool) -> tuple[list[Any], str]:
    _one_of(target, task, every or None)
    name, wanted = _target(target)
    found = opened.control.dead_letters(name, task=task, limit=1_000_000)
    return [one for one in found if _matches(one, wanted, task)], wanted


# -- claims


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
    columns: list[Column] = [
        ("NAME", lambda one: one.name),
        ("TASK", lambda one: one.task),
        ("TASK ID", lambda one: one.task_id),
        ("PUBLISHER", lambda one: one.publisher),
        ("SINCE", lambda one: iso(one.since)),
        ("TTL", lambda one: f"{one.expires_in:.0f}"),
    ]
    with session(form) as opened:
        page = opened.control.claims(task=task, cursor=cursor, limit=limit)
        opened.out.show(page.items, columns, page.cursor)
        if not page.items:
            _done(False, "", "there are no claims")  # noqa: FBT003


@claims.command("drop")
@click.argument("name", required=False)
@option("--task", help="Only those of this task.")
@bulk
def claims_drop(name: str | None, task: str | None, **how: Any) -> None:
    """Delete claims, by NAME or --task, so that other calls can be published. The messages stay in the broker."""
    _one_of(name, task)
    with session() as opened:
        if name:
            found = [claim] if (claim := opened.control.lock(name).claim) else []
        else:
            found = [view.claim for view in opened.control.all_locks(task=task, state="claimed") if view.claim]
        reason = how.pop("reason")

        def drop(claim: Any) -> bool:
            return opened.control.drop_claim(claim.name, task_id=claim.task_id, reason=reason)

        opened.act(found, "drop claims", drop, several=len(found) > 1, **how)


def _one_of(*given: object) -> None:
    if sum(one is not None for one in given) != 1:
        raise click.UsageError("expected exactly one target, such as NAME or --task")


def _target(target: str | None) -> tuple[str | None, str]:
    """Return the lock name and the id of NAME or NAME/ID."""
    match = _WITH_ID.fullmatch(target or "")
    return (match[1], match[2]) if match else (target, "")


def _matches(one: Any, wanted: str, task: str | None) -> bool:
    return (not wanted or wanted in (one.identity, one.task_id)) and task in (None, one.task)


def _drop(opened: Session, items: list[Any], what: str, wanted: str, how: dict[str, Any]) -> None:
    opened.tasks()  # import them: a dropped message's task stores its result
    reason = how.pop("reason")

    def drop(item: Any) -> bool:
        return opened.control.drop(item.name, item.identity, reason=reason)

    opened.act(items, what, drop, several=not wanted and len(items) > 1, **how)


COMMANDS: Final = (release, hold, unhold, resolve, forget, queue, dead, claims)
