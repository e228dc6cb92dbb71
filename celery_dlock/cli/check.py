"""The command ``check``: setup of store and queues, the operator's rights, thresholds; for monitoring by exit code."""

from __future__ import annotations

import click

from ..reports.checks import MAX_HOLD, MAX_WAIT, checks_of, store_checks
from ..reports.tables import CHECKS
from .options import DURATION, listing, option
from .session import NOTHING, UNAVAILABLE, session

__all__ = ["check"]


@click.command()
@option(
    "--max-wait", type=DURATION, default=MAX_WAIT, show_default=True,
    help="A waiter that has waited longer is a problem.",
)  # fmt: skip
@option(
    "--max-hold", type=DURATION, default=MAX_HOLD, show_default=True,
    help="A lock that has been held longer is a problem.",
)  # fmt: skip
@option("--max-dead", type=click.IntRange(0), default=0, show_default=True, help="More dead letters are a problem.")
@option(
    "--max-unknown", type=click.IntRange(0), default=0, show_default=True,
    help="More unknown outcomes are a problem.",
)  # fmt: skip
@listing
def check(max_wait: float, max_hold: float, max_dead: int, max_unknown: int, form: str | None) -> None:
    """Check the store, the rights of this user, what waits for a decision, the queues, and the workers' versions.

    Exit code 1 if there is a problem.
    """
    context = click.get_current_context()
    with session(form) as opened:
        health = opened.control.health()
        if not health.up:
            opened.show(list(store_checks(health)), CHECKS)
            context.exit(UNAVAILABLE)
        limits = {"max_wait": max_wait, "max_hold": max_hold, "max_dead": max_dead, "max_unknown": max_unknown}
        checks = checks_of(opened.app, health, opened.control.counts(), opened.control.workers(), **limits)
        opened.show(checks, CHECKS)
        if any(check.problem for check in checks):
            context.exit(NOTHING)
