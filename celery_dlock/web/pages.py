"""The pages that read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from ..control import Counts, Page, Workers
from ..reports.actions import DONE
from ..reports.options import option_lines
from ..reports.tables import COUNTS, LOCKS
from ..store.operator_model import STATES
from .charts import Chart, charts, life
from .state import Visit

__all__ = ["PAGES"]

#: Records of operators' actions on one page.
LIMIT: Final = 500
#: Entries on a page of a list, from which the user chooses; the second one is the default.
SIZES: Final = (25, 100, 500)
#: Waiters of each lock on the page of waiters.
EACH: Final = 10
#: Dead letters on the page of their lock.
LETTERS: Final = 100
#: Waiters on the page of their lock, from which the user chooses.
WAITERS: Final = (100, 1000, 10_000)
_FILTERS: Final = frozenset({"name", "task", "older", "size", "state"})
#: Seconds that the page of tasks waits for the answers of workers, which come after 1 s if the broker answers.
WORKERS_WITHIN: Final = 2.0


def overview(visit: Visit) -> Response:
    """Show how much there is of everything."""
    health = visit.dashboard.health()
    counts = visit.dashboard.counts()
    return visit.page(
        "overview.html",
        health=health,
        sums={fact.key: sum(fact.value(counts).values()) for fact in COUNTS.columns},
        oldest={name: max(getattr(counts, name).values(), default=0.0) for name in _AGES},
        rows=list(_by_task(counts)),
        losses=_losses(visit.dashboard.workers()),
        charts=_charts(visit),
    )


def _charts(visit: Visit, task: str | None = None) -> list[Chart]:
    return charts(visit.dashboard.sampler.samples.hour(), time.time(), task)


_AGES: Final = ("oldest_hold", "oldest_wait", "oldest_unknown")


def _by_task(counts: Counts) -> Iterator[tuple[str, list[int]]]:
    every: list[Mapping[str, int]] = [fact.value(counts) for fact in COUNTS.columns]
    for task in sorted({task for one in every for task in one}):
        yield task, [one.get(task, 0) for one in every]


def _losses(found: Workers | None) -> tuple[int | None, str]:
    """Return the number of leases that live workers lost in the last hour, and how many of them told it.

    The number is None if no worker told it.
    """
    if found is None:
        return None, "the workers are being asked"
    told = [view.lost for view in found.workers if view.lost is not None]
    if not told:
        return None, found.problem or "no worker tells"
    return sum(told), f"by {len(told)} live {'worker' if len(told) == 1 else 'workers'}"


def locks(visit: Visit) -> Response:
    """List the lock names that are in use, by filters and pages."""
    part = visit.given("name")
    pattern = part if part is None or any(sign in part for sign in "*?[") else f"*{part}*"
    page = visit.locks(pattern, _size(visit))
    kept = [(key, value) for key, value in visit.query.multi_items() if key in _FILTERS and value]
    return visit.page(
        "locks.html", page=page, states=visit.states, all_states=STATES, kept=kept, sizes=SIZES, query=visit.query
    )


def lock(visit: Visit) -> Response:
    """Show everything about one lock name, with the actions on it."""
    name = visit.query.get("name", "").strip()
    control = visit.control
    view = control.lock(name)
    most = next((one for one in WAITERS if str(one) == visit.query.get("waiters")), WAITERS[0])
    waiters = control.waiting(name, limit=most) if view.waiting else ()
    unknown = control.unknown_outcomes(name).items
    letters = control.dead_letters(name, limit=LETTERS)
    known = view.known or waiters or unknown or letters.items
    samples, now = visit.dashboard.sampler.samples, time.time()
    return visit.page(
        "lock.html",
        status=200 if known else 404,
        view=view,
        life=life(samples.changes(view.name, view, now), samples.hour(), now),
        facts=[fact for fact in LOCKS.details if fact.text(view) and fact.key not in _ELSEWHERE],
        waiters=waiters,
        more=next((one for one in WAITERS if one > most), 0),
        unknown=unknown,
        letters=letters,
        history=[one for one in control.audit(1000) if one.name == name],
        known=known,
        done=_done(visit),
    )


#: The facts of a lock that other parts of its page show.
_ELSEWHERE: Final = ("name", "states", "has_dead_letters")


def waiting(visit: Visit) -> Response:
    """List the locks that have waiters, each with the first of them."""
    return _listed(visit, "waiting.html", visit.read(partial(visit.control.queues, each=EACH), _size(visit)))


def unknown(visit: Visit) -> Response:
    """List the runs of unknown outcome, to settle them."""
    return _listed(visit, "unknown.html", visit.read(visit.control.unknown_outcomes, _size(visit), "name", "task"))


def dead(visit: Visit) -> Response:
    """List the dead letters, to requeue or drop them."""
    return _listed(visit, "dead.html", visit.read(visit.control.dead_letters, _size(visit), "name", "task"))


def _size(visit: Visit) -> int:
    return next((size for size in SIZES if str(size) == visit.query.get("size")), SIZES[1])


def _listed(visit: Visit, template: str, page: Page[Any]) -> Response:
    kept = [(key, value) for key, value in visit.query.items() if key in ("name", "task", "size") and value]
    return visit.page(template, page=page, kept=kept, query=visit.query, done=_done(visit))


class TaskRow(NamedTuple):
    """A singleton task: its options in words, its numbers in the store, and its conflicts by outcome."""

    name: str
    options: Sequence[str]
    numbers: Sequence[int]
    conflicts: Mapping[str, int]


def tasks(visit: Visit) -> Response:
    """List the singleton tasks, with their options in words, and how often they conflicted."""
    row_of, counting = _task_rows(visit)
    return visit.page("tasks.html", rows=[row_of(name) for name in visit.dashboard.tasks()], counting=counting)


def task(visit: Visit) -> Response:
    """Show a singleton task and its last hour. A task of another app has no options here."""
    name = visit.query.get("name", "").strip()
    row_of, counting = _task_rows(visit)
    row = row_of(name)
    status = 200 if row.options or any(row.numbers) else 404
    return visit.page("task.html", status, row=row, counting=counting, charts=_charts(visit, name))


def _task_rows(visit: Visit) -> tuple[Callable[[str], TaskRow], int]:
    """Return a function from the name of a task to its row, and the number of workers that count conflicts."""
    counts, known = visit.dashboard.counts(), visit.dashboard.tasks()
    found = visit.dashboard.workers(WORKERS_WITHIN)
    counting = [view.counters for view in (found.workers if found else ()) if view.counters is not None]

    def row_of(name: str) -> TaskRow:
        conflicts = Counter[str]()
        for counters in counting:
            conflicts.update(counters.get("conflicts", {}).get(name, {}))
        options = option_lines(known[name].lock_options) if name in known else []
        return TaskRow(name, options, [fact.value(counts).get(name, 0) for fact in COUNTS.columns], conflicts)

    return row_of, len(counting)


def ticks(visit: Visit) -> Response:
    """List the last ticks of each entry of the beat schedule."""
    visit.dashboard.tasks()
    return visit.page("ticks.html", found=visit.control.ticks())


def workers(visit: Visit) -> Response:
    """List the live workers, and the locks that each says it holds."""
    return visit.page("workers.html", found=visit.control.workers())


def health(visit: Visit) -> Response:
    """Show the checks that ``celery dlock check`` does."""
    return visit.page("health.html", checks=visit.dashboard.checks())


def explain(visit: Visit) -> Response:
    """Say what became of a call."""
    task_id = visit.query.get("id", "").strip()
    found = None
    if task_id:
        visit.dashboard.tasks()
        found = visit.control.explain(task_id)
    return visit.page("explain.html", task_id=task_id, found=found)


def audit(visit: Visit) -> Response:
    """List the newest actions of operators."""
    return visit.page("audit.html", records=visit.control.audit(LIMIT), limit=LIMIT)


def _done(visit: Visit) -> str:
    """Return what the page says of the action before it. A link can only choose one of these texts."""
    text = DONE.get(visit.query.get("done", ""), "")
    return text and f"{text[0].upper()}{text[1:]}."


PAGES: Final[Mapping[str, Callable[[Visit], Response]]] = {
    "/": overview,
    "/locks": locks,
    "/lock": lock,
    "/waiting": waiting,
    "/unknown": unknown,
    "/dead": dead,
    "/tasks": tasks,
    "/task": task,
    "/workers": workers,
    "/ticks": ticks,
    "/explain": explain,
    "/audit": audit,
    "/health": health,
}
