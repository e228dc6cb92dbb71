"""The explanation of a call: its stored result, and every entry of the store with its task id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import TaskRevokedError

from ..errors import CallNotRun, DLockError, LockKeyError
from ..keys.lock_name import name_from_text
from ..messaging.results import QUEUED
from ..store.holder_model import shown_time
from ..store.model import CUT
from ..store.operator_model import ClaimView, DeadLetter, HolderView, LockView, RunView, Waiter
from ..utils.background import result_in_time
from .scanning import scan_all

if TYPE_CHECKING:
    from celery import Celery

    from ..store.operator import OperatorStore

__all__ = ["Explanation", "explain"]

#: The largest number of waiters of one lock that are searched.
WAITERS: Final = 10_000
#: Seconds that the result backend has to answer: no setting gives every result backend a timeout.
RESULT_TIMEOUT: Final = 5


@dataclass(frozen=True, slots=True)
class Explanation:
    """The history of a call, as far as it is stored.

    Args:
        task_id: The task id of the call.
        result: The state of its result; "" if there is no result backend, or if it did not answer.
        reason: The reason of that state, if celery-dlock stored it; "" otherwise.
        holds: The locks that it holds, that are granted to it, or that are kept after its body has ended.
        waits: It waits in these queues.
        dead_letters: Its dead letters.
        runs: Its runs that have not succeeded (``once_per``).
        claims: Its claims (``unique``).
        lines: The same as sentences for people.
        refused_by: The lock name for which it did not run, if its result tells it; "" otherwise.
    """

    task_id: str
    result: str
    reason: str
    holds: Sequence[LockView]
    waits: Sequence[Waiter]
    dead_letters: Sequence[DeadLetter]
    runs: Sequence[RunView]
    claims: Sequence[ClaimView]
    lines: Sequence[str]
    refused_by: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the locks that it holds, awaits or claims, in which it ran, and of the one that refused it."""
        found: list[Any] = [*self.holds, *self.waits, *self.dead_letters, *self.runs, *self.claims]
        return sorted({one.name for one in found} | ({self.refused_by} - {""}))

    @property
    def found(self) -> bool:
        """Whether anything is known about this task id."""
        return bool(self.names) or self.result not in ("", states.PENDING)


def explain(app: Celery, store: OperatorStore, task_id: str) -> Explanation:
    """Return what became of a call."""
    short = task_id[:CUT]

    def names_it(view: LockView) -> bool:
        return short in [one.task_id[:CUT] for one in (view.holder, view.claim) if one]

    views = list(scan_all(store, ("held", "granted", "kept", "claimed"), names_it))
    holds = [view for view in views if view.holder and view.holder.task_id == short]
    claims = [view.claim for view in views if view.claim and view.claim.task_id == task_id]
    waits = [
        waiter
        for name in store.queues()
        for waiter in store.list_waiters(name, WAITERS).waiters
        if waiter.task_id == task_id
    ]
    letters = [letter for letter in store.dead_letters() if letter.task_id == task_id]
    runs = [run for run in store.unsettled_runs() if run.task_id == short]
    # Ask the store first: if its server hangs, the store raises after its timeout. A result backend on the same server
    # may have no timeout.
    answer = result_in_time("ask-result-backend", lambda: _result(app, task_id), RESULT_TIMEOUT)
    silent = [] if answer else [f"the result backend did not answer within {RESULT_TIMEOUT} s"]
    result, reason, refused_by = answer or _Result()
    found = Explanation(task_id, result, reason, holds, waits, letters, runs, claims, (), refused_by)
    now = [_now_held_by(store.describe(name_from_text(waiter.name)), waiter) for waiter in waits]
    lines = (*silent, *_lines(found), *now) or _nothing(task_id)
    return replace(found, lines=lines)


def _nothing(task_id: str) -> tuple[str, ...]:
    query = f"celery -A APP inspect query_task {task_id}"
    return (
        "nothing is known about it: it has no stored result, and no lock in the store names it",
        "if it waits in a worker slot or for a retry, the worker's log names the lock: search it for this id",
        f"if a worker has received it, {query} shows its task and arguments",
        "dlock show --task TASK --args ARGS then shows its lock",
        "else it is still in the broker, or it has ended and its result is not stored or has expired",
        "or its worker died while it ran and its message was acknowledged before",
    )


class _Result(NamedTuple):
    """The state of a result, its reason, and the lock name for which the call did not run."""

    state: str = ""
    reason: str = ""
    refused_by: str = ""


def _result(app: Celery, task_id: str) -> _Result:
    if isinstance(app.backend, DisabledBackend):
        return _Result()
    try:
        meta = app.backend.get_task_meta(task_id, cache=False)
    except Exception:  # noqa: BLE001  # each result backend raises errors of its own
        return _Result()
    state, value = str(meta.get("status") or ""), meta.get("result")
    return _Result(state, _reason(state, value), _refused_by(value))


def _refused_by(value: Any) -> str:
    """Return the lock name of a call that did not run. It comes from the result backend, so it may be anything."""
    name = value.name if isinstance(value, CallNotRun) else None
    try:
        return name_from_text(name).text if isinstance(name, str) else ""
    except LockKeyError:
        return ""


def _reason(state: str, value: Any) -> str:
    """Return the reason that celery-dlock stored. The text of any other error may contain arguments."""
    if state == QUEUED and isinstance(value, dict):
        return str(value.get("reason") or "")
    if isinstance(value, DLockError | TaskRevokedError):
        return str(value)
    return type(value).__name__ if isinstance(value, Exception) else ""


def _lines(found: Explanation) -> Iterator[str]:
    if found.result not in ("", states.PENDING):
        # The reason of a waiter is stored once. What holds its lock now is another line.
        when = " since it arrived, because the lock was " if found.reason.startswith("held by ") else ": "
        between = when if found.result == QUEUED else ": "
        yield f"its result is {found.result}" + (f"{between}{found.reason}" if found.reason else "")
    yield from (_hold(view.name, view.holder) for view in found.holds if view.holder)
    for waiter in found.waits:
        where = f"at position {waiter.position} in the queue of {waiter.name}"
        yield f"it waits {where} since {shown_time(waiter.since)} ({waiter.state}{_not_due(waiter)})"
    for letter in found.dead_letters:
        yield f"it is a dead letter of {letter.name} since {shown_time(letter.since)}"
    for run in (run for run in found.runs if run.state == "unknown"):
        start = f"it started {run.name} on {run.worker} at {shown_time(run.since)}"
        yield f"its outcome is unknown: {start}, and its process died. Settle it (dlock resolve)"
    for claim in found.claims:
        yield f"it was published by {claim.publisher} and claims {claim.name} since {shown_time(claim.since)}"


def _now_held_by(view: LockView, waiter: Waiter) -> str:
    """Return who holds the lock of a waiter now. The waiter's result names the holder at the time of its arrival."""
    holder = view.holder
    if holder is None and waiter.due > view.at:
        return f"{view.name} is free now, but this waiter is not due yet"
    if holder is None:
        return f"{view.name} is free now: a worker grants it to the next waiter within seconds, if any worker runs"
    if waiter.state == "granted":
        return f"{view.name} is reserved for it for {holder.expires_in:.0f} s: a worker must start it by then"
    return f"{view.name} is now {holder.state}: {holder} since {shown_time(holder.since)}"


def _not_due(waiter: Waiter) -> str:
    if waiter.state == "debounced":
        return f": due at {shown_time(waiter.due)} if no newer call comes until then"
    if waiter.state == "delayed":
        return f": it lost a grant, and is due again at {shown_time(waiter.due)}"
    return ": by a newer call, so it will end REVOKED" if waiter.state == "replaced" else ""


def _hold(name: str, holder: HolderView) -> str:
    where = f" on {holder.worker}" if holder.worker else ""
    return f"{_VERBS[holder.state]} {name} since {shown_time(holder.since)}{where}"


_VERBS: Final = {"held": "it holds", "granted": "it is granted", "kept": "its body has ended, and it still keeps"}
