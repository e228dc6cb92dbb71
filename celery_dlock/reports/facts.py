"""Everything about one lock name, as lines of a name and a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .documents import iso

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..control import HolderView, LockView, Waiter

__all__ = ["facts_of", "next_call", "seconds_left", "worker_of"]

Facts = list[tuple[str, object]]


def worker_of(view: LockView) -> str:
    """Return the worker, the operator or the publisher that a list shows for a lock name."""
    if view.holder:
        return view.holder.worker or view.holder.operator
    return view.run.worker if view.run else view.claim.publisher if view.claim else ""


def seconds_left(view: LockView) -> float:
    """Return the seconds until the holder's lease, the run mark or the claim ends."""
    return next((one.expires_in for one in (view.holder, view.run, view.claim) if one), 0.0)


def facts_of(view: LockView, waiters: Iterable[Waiter] = ()) -> Facts:
    """Return the facts of a lock name.

    Args:
        view: The view of the name.
        waiters: The waiters to show.
    """
    facts: Facts = [("name", view.name), ("states", ", ".join(view.states) or "free")]
    if view.holder:
        facts += _holder_facts(view.holder)
    if view.run:
        run = view.run
        facts.append(("last run", f"{run.state} by {run.task}[{run.task_id}] on {run.worker} since {iso(run.since)}"))
        facts.append(("idempotency key", run.idempotency_key))
    if view.claim:
        claim = view.claim
        who = f"{claim.task}[{claim.task_id}]"
        facts.append(("claimed by", f"{who}, published by {claim.publisher} at {iso(claim.since)}"))
    facts.append(("waiters", view.waiting))
    for waiter in waiters:
        due = f" ({waiter.state}, due at {iso(waiter.due)})" if waiter.due else ""
        facts.append((f"waiter {waiter.position}", f"{waiter.task}[{waiter.task_id}] since {iso(waiter.since)}{due}"))
    if view.has_dead_letters:
        facts.append(("dead letters", "see dlock dead"))
    return [*facts, ("next call", next_call(view))]


def _holder_facts(holder: HolderView) -> Facts:
    who = f"{holder.task}[{holder.task_id}]" if holder.task_id else holder.operator or "a Lock"
    facts: Facts = [
        ("holder", f"{who} on {holder.worker} (process {holder.pid})" if holder.worker else who),
        ("acquisition", holder.acquisition),
        ("since", iso(holder.since)),
        ("expires in", f"{holder.expires_in:.1f} s"),
    ]
    if holder.state == "held":
        facts.append(("token", holder.token))
        facts.append(("alive", "yes: renewed within half its ttl" if holder.fresh else "unknown: not renewed lately"))
    if holder.kept_by:
        facts.append(("kept by", holder.kept_by))
    if holder.operator:
        facts.append(("operator", f"{holder.operator}: {holder.reason}"))
    return facts


def next_call(view: LockView) -> str:
    """Return what the next call of a lock name meets."""
    states = {
        "granted": "waits: the lock is reserved for a waiter",
        "held": "meets a held lock: its policy decides (on_conflict)",
        "kept": "meets a held lock: its policy decides (on_conflict)",
        "used": "does not run: an earlier run succeeded (once_per)",
        "unknown": "fails with UnknownOutcome if after_crash is 'hold', and runs if it is 'run'",
        "claimed": "is refused when it is published (unique)",
    }
    return next((text for state, text in states.items() if state in view.states), "runs")
