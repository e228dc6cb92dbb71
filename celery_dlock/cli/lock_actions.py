"""The commands that change one lock: release, hold, unhold, resolve and forget."""

from __future__ import annotations

from typing import Final

import click

from ..reports.actions import ACTIONS, DONE
from ..reports.documents import iso
from .options import DURATION, option, reason_option
from .output import note
from .session import NOTHING, import_tasks, session

__all__ = ["COMMANDS"]


@click.command(help=ACTIONS["release"].about)
@click.argument("name")
@option("--acquisition", help="Only this acquisition, as `show` prints it. Default: the present one.")
@option("--force", is_flag=True, help="Also if the holder is alive, or min_hold, keep_on_retry or a hold keeps it.")
@reason_option
def release(name: str, acquisition: str | None, force: bool, reason: str) -> None:  # noqa: FBT001
    with session() as opened:
        if acquisition is None:
            holder = opened.control.lock(name).holder
            acquisition = holder.acquisition if holder else ""
        if acquisition:
            import_tasks(opened.app)
            opened.control.release(name, acquisition, force=force, reason=reason)
        _tell(name, "release", done=bool(acquisition))


@click.command(help=ACTIONS["hold"].about)
@click.argument("name")
@option("--for", "seconds", type=DURATION, required=True, help="How long, such as 2h.")
@option("--reason", required=True, help="The reason, which skipped calls report.")
def hold(name: str, seconds: float, reason: str) -> None:
    with session() as opened:
        held = opened.control.hold(name, seconds, reason)
        _tell(name, "hold" if held else "hold_later", done=True)


@click.command(help=ACTIONS["unhold"].about)
@click.argument("name")
@reason_option
def unhold(name: str, reason: str) -> None:
    with session() as opened:
        import_tasks(opened.app)
        _tell(name, "unhold", done=opened.control.unhold(name, reason=reason))


@click.command(help=ACTIONS["resolve"].about)
@click.argument("name")
@option("--sent/--not-sent", "sent", required=True, default=None, help="Whether the run did its work.")
@option("--tick", default="", help="The tick of the run (once_per='tick'), as `unknown` prints it.")
@option("--mark", help="Only the run with this mark, as `unknown` prints it. Default: the present one.")
@option("--dry-run", is_flag=True, help="Only print which run would be settled.")
@reason_option
def resolve(
    name: str, sent: bool | None, tick: str, mark: str | None, dry_run: bool, reason: str,  # noqa: FBT001
) -> None:  # fmt: skip
    if sent is None:
        raise click.UsageError("give --sent if the run did its work, or --not-sent if it did not")
    with session() as opened:
        import_tasks(opened.app)
        if not dry_run:
            settled = opened.control.resolve(name, sent=sent, tick=tick, mark=mark, reason=reason)
            _tell(name, "resolve", done=settled)
            return
        runs = opened.control.unknown_outcomes(name, limit=1_000_000).items
        found = [run for run in runs if run.tick == tick and mark in (None, run.mark)]
        for run in found:
            note(f"would settle {run.task}[{run.task_id}] on {run.worker} since {iso(run.since)}, mark {run.mark}")
        if not found:
            _tell(name, "resolve", done=False)


@click.command(help=ACTIONS["forget"].about)
@click.argument("name")
@option("--tick", default="", help="The tick to free (once_per='tick'), as `unknown` or `list --json` prints it.")
@reason_option
def forget(name: str, tick: str, reason: str) -> None:
    with session() as opened:
        _tell(name, "forget", done=opened.control.forget(name, tick=tick, reason=reason))


def _tell(name: str, result: str, *, done: bool) -> None:
    """Print the result of an action. If it changed nothing, end the command with exit code 1."""
    note(f"{name}: {DONE[result] if done else ACTIONS[result].gone}")
    if not done:
        click.get_current_context().exit(NOTHING)


COMMANDS: Final = (release, hold, unhold, resolve, forget)
