"""The JSON documents of the command line, by HTTP. They only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ..reports.documents import document
from ..reports.facts import Table
from ..reports.tables import AUDIT, CHECKS, CLAIMS, DEAD_LETTERS, LOCKS, UNKNOWN_OUTCOMES, WAITERS, WORKERS
from .state import Visit

__all__ = ["RESOURCES"]

#: The highest ``limit``.
MOST: Final = 10_000


def _list(visit: Visit, items: Any, table: Table, cursor: str = "") -> Response:
    return JSONResponse(document(table.rows(items), visit.dashboard.store, cursor))


def _limit(visit: Visit, default: int) -> int:
    given = visit.query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(MOST)) and 1 <= int(given) <= MOST):
        raise HTTPException(400, f"invalid limit={given!r}: expected a number from 1 to {MOST}")
    return int(given)


def locks(visit: Visit) -> Response:
    """``celery dlock list``."""
    page = visit.locks(visit.given("name"), _limit(visit, 100))
    return _list(visit, page.items, LOCKS, page.cursor)


def lock(visit: Visit) -> Response:
    """``celery dlock show NAME``."""
    return _list(visit, [visit.control.lock(visit.query.get("name", ""))], LOCKS)


def waiting(visit: Visit) -> Response:
    """``celery dlock queue``."""
    return _list(visit, visit.control.waiting(visit.query.get("name"), limit=_limit(visit, 1000)), WAITERS)


def unknown(visit: Visit) -> Response:
    """``celery dlock unknown``."""
    page = visit.read(visit.control.unknown_outcomes, _limit(visit, 1000), "name", "task")
    return _list(visit, page.items, UNKNOWN_OUTCOMES, page.cursor)


def dead(visit: Visit) -> Response:
    """``celery dlock dead``."""
    page = visit.read(visit.control.dead_letters, _limit(visit, 1000), "name", "task")
    return _list(visit, page.items, DEAD_LETTERS, page.cursor)


def claims(visit: Visit) -> Response:
    """``celery dlock claims``."""
    page = visit.read(visit.control.claims, _limit(visit, 100), "task")
    return _list(visit, page.items, CLAIMS, page.cursor)


def explain(visit: Visit) -> Response:
    """``celery dlock explain``."""
    task_id = visit.query.get("id", "")
    if not task_id:
        raise HTTPException(400, "the task id is missing: /api/v1/explain?id=...")
    visit.dashboard.tasks()
    return _list(visit, [visit.control.explain(task_id)], Table(()))


def audit(visit: Visit) -> Response:
    """``celery dlock audit``."""
    return _list(visit, visit.control.audit(_limit(visit, 100)), AUDIT)


def workers(visit: Visit) -> Response:
    """``celery dlock list --workers``."""
    found = visit.control.workers()
    if found.problem:
        raise HTTPException(503 if found.unreachable else 404, found.problem)
    return _list(visit, found.workers, WORKERS)


def check(visit: Visit) -> Response:
    """``celery dlock check``."""
    return _list(visit, visit.dashboard.checks(), CHECKS)


RESOURCES: Final[Mapping[str, Callable[[Visit], Response]]] = {
    "/api/v1/locks": locks,
    "/api/v1/lock": lock,
    "/api/v1/waiting": waiting,
    "/api/v1/unknown": unknown,
    "/api/v1/dead": dead,
    "/api/v1/claims": claims,
    "/api/v1/explain": explain,
    "/api/v1/audit": audit,
    "/api/v1/workers": workers,
    "/api/v1/check": check,
}
