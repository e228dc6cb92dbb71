"""The lists for operators: the facts that the command line, the dashboard and JSON show of each item.

A new fact is one entry here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from .facts import Fact, Table

if TYPE_CHECKING:
    from ..control import LockView, TickView, WorkerView

__all__ = [
    "AUDIT",
    "CHECKS",
    "CLAIMS",
    "COUNTS",
    "DEAD_LETTERS",
    "HOLDERS",
    "LEASES",
    "LOCKS",
    "TICKS",
    "UNKNOWN_OUTCOMES",
    "WAITERS",
    "WORKERS",
]

_NAME: Final = Fact("name", "Name", "lock")
_TASK: Final = Fact("task", "Task")
_TASK_ID: Final = Fact("task_id", "Task id", "call")
_WORKER: Final = Fact("worker", "Worker")
_SINCE: Final = Fact("since", "Since", "time")
_LEFT: Final = Fact("expires_in", "Time left", "span")
_STATES: Final = Fact("states", "State", "states")
_WAITING: Final = Fact("waiting", "Waiters", "number")
_PID: Final = Fact("pid", "Process", of=lambda one: one.pid or None)
_TOKEN: Final = Fact("holder.token", "Token", of=lambda view: (view.holder and view.holder.token) or None)


def _alive(view: LockView) -> str:
    if view.holder is None or view.holder.state != "held":
        return ""
    return "yes: renewed within half its ttl" if view.holder.fresh else "unknown: not renewed lately"


def _operator(view: LockView) -> str:
    return f"{view.holder.operator}: {view.holder.reason}" if view.holder and view.holder.operator else ""


def _next_call(view: LockView) -> str:
    meets = {
        "granted": "waits: the lock is reserved for a waiter",
        "held": "meets a held lock: its policy decides (on_conflict)",
        "kept": "meets a held lock: its policy decides (on_conflict)",
        "used": "does not run: an earlier run succeeded (once_per)",
        "unknown": "fails with UnknownOutcome if after_crash is 'hold', and runs if it is 'run'",
        "claimed": "is refused when it is published (unique)",
    }
    return next((text for state, text in meets.items() if state in view.states), "runs")


def _watchdog(view: WorkerView) -> str:
    return view.problem or view.watchdog + (": its leases may be lost" if view.watchdog in _BAD_WATCHDOGS else "")


_BAD_WATCHDOGS: Final = ("late", "dead")


def _tick(view: TickView) -> str:
    states = {
        "used": "ran",
        "running": "runs now",
        "unknown": "outcome unknown: its process died",
        "open": "no run has succeeded yet",
        "missed": "missed: no run has succeeded, and it is too late for one",
        "past": "too long ago: its run is not remembered",
    }
    return view.problem or states[view.state]


LOCKS: Final = Table(
    columns=(
        _NAME,
        _STATES,
        _TASK,
        _TASK_ID,
        _WORKER,
        _SINCE,
        _LEFT,
        _TOKEN,
        _WAITING,
    ),
    empty="no lock name is found",
    details=(
        _NAME,
        _STATES,
        Fact("holder", "Holder"),
        Fact("holder.acquisition", "Acquisition"),
        Fact("holder.since", "Since", "time"),
        Fact("holder.expires_in", "Time left", "span"),
        _TOKEN,
        Fact("holder.fresh", "Alive", of=_alive),
        Fact("holder.kept_by", "Kept by"),
        Fact("holder.operator", "Operator", of=_operator),
        Fact("run", "Last run"),
        Fact("run.idempotency_key", "Idempotency key", "copy"),
        Fact("claim", "Claimed by"),
        _WAITING,
        Fact("has_dead_letters", "Dead letters", of=lambda view: "see dlock dead" if view.has_dead_letters else ""),
        Fact("next_call", "Next call", of=_next_call),
    ),
)
WAITERS: Final = Table(
    (
        _NAME,
        Fact("position", "Position", "number"),
        Fact("state", "State"),
        _TASK,
        _TASK_ID,
        _SINCE,
        Fact("due", "Due", "time"),
        Fact("age", "Waiting time", "span", lambda one: max(0.0, time.time() - one.since)),
    ),
    "nothing waits",
)
DEAD_LETTERS: Final = Table(
    (_NAME, Fact("id", "Id", "call", lambda one: one.task_id or one.identity), _TASK, _SINCE),
    "there are no dead letters",
)
UNKNOWN_OUTCOMES: Final = Table(
    (
        _NAME,
        Fact("idempotency_key", "Idempotency key", "copy"),
        _TASK,
        _TASK_ID,
        _WORKER,
        Fact("since", "Started", "time"),
        Fact("tick", "Tick"),
        Fact("mark", "Mark"),
    ),
    "no run has an unknown outcome",
)
CLAIMS: Final = Table(
    (_NAME, _TASK, _TASK_ID, Fact("publisher", "Publisher"), _SINCE, _LEFT),
    "there are no claims",
)
AUDIT: Final = Table(
    (
        Fact("at", "At", "time"),
        Fact("user", "User", of=lambda one: f"{one.user}@{one.host}"),
        _NAME,
        Fact("action", "Action", of=lambda one: f"{one.action}: {one.detail}"),
        Fact("reason", "Reason"),
    ),
    "no operator has acted yet",
)
CHECKS: Final = Table(
    (
        Fact("check", "Check"),
        Fact("result", "Result", bad=lambda one: one.problem),
        Fact("found", "Found"),
    ),
)
#: The live workers. The list of the leases of each is ``LEASES``.
WORKERS: Final = Table(
    (
        _WORKER,
        Fact("pool", "Pool"),
        Fact("version", "Version"),
        _PID,
        Fact("watchdog", "Watchdog", of=_watchdog, bad=lambda one: one.watchdog in _BAD_WATCHDOGS),
        Fact("held", "Locks held", "number"),
        Fact("lost", "Lost in the last hour", "number"),
    ),
)
LEASES: Final = Table((_NAME, _TASK, _TASK_ID, _PID, _LEFT), "holds nothing that matches")
TICKS: Final = Table(
    (
        Fact("entry", "Entry"),
        Fact("due", "Due", "time"),
        Fact("state", "State", of=_tick, bad=lambda one: one.state in ("unknown", "missed")),
        Fact("run.worker", "Worker"),
        Fact("run.since", "Since", "time"),
        Fact("run.task_id", "Task id", "call"),
        _TASK,
        _NAME,
    ),
)
#: The holders of a lock in the last hour.
HOLDERS: Final = Table(
    (
        Fact("begin", "From", "time"),
        Fact("end", "Until", "time"),
        Fact("change.state", "State"),
        Fact("change.by", "Worker"),
        Fact("change.task_id", "Task id", "call"),
    ),
)
#: The counts of each task.
COUNTS: Final = Table(
    (
        Fact("locks", "Locks", "number"),
        Fact("waiting", "Waiting", "number"),
        Fact("dead_letters", "Dead letters", "number"),
        Fact("unknown_outcomes", "Unknown outcomes", "number"),
        Fact("claims", "Claims", "number"),
    ),
)
