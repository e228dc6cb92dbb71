"""The JSON documents of the command line, by HTTP. They only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ..reports.checks import limit_items, queue_items, store_items
from ..reports.documents import document
from ..reports.durations import parse_duration
from .board import Visit
from .pages import cursor_of, place_of

__all__ = ["RESOURCES"]

#: The highest ``limit``.
MOST: Final = 10_000


def _list(visit: Visit, items: Any, cursor: str = "") -> Response:
    return JSONResponse(document(items, visit.board.store, cursor))


def _limit(visit: Visit, default: int) -> int:
    given = visit.query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(MOST)) and 1 <= int(given) <= MOST):
        raise HTTPException(400, f"invalid limit={given!r}: expected a number from 1 to {MOST}")
    return int(given)


def locks(visit: Visit) -> Response:
    """``celery dlock list``."""
    query = visit.query
    try:
        page = visit.control.locks(
            task=query.get("task"),
            name=query.get("name"),
            state=query["state"].split(",") if query.get("state") else None,  # type: ignore[arg-type]  # it checks them
            older_than=parse_duration(query["older"]) if query.get("older") else None,
            cursor=query.get("cursor", ""),
            limit=_limit(visit, 100),
        )
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    return _list(visit, page.items, page.cursor)


def lock(visit: Visit) -> Response:
    """``celery dlock show NAME``."""
    return _list(visit, [visit.control.lock(visit.query.get("name", ""))])


def waiting(visit: Visit) -> Response:
    """``celery dlock queue``."""
    return _list(visit, visit.control.waiting(visit.query.get("name"), limit=_limit(visit, 1000)))


def unknown(visit: Visit) -> Response:
    """``celery dlock unknown``."""
    limit = _limit(visit, 1000)
    found = visit.control.unknown_outcomes(task=visit.query.get("task"), limit=limit + 1, after=place_of(visit))
    cursor = cursor_of(found[limit - 1].name, found[limit - 1].tick) if len(found) > limit else ""
    return _list(visit, found[:limit], cursor)


def dead(visit: Visit) -> Response:
    """``celery dlock dead``."""
    query, limit = visit.query, _limit(visit, 1000)
    found = visit.control.dead_letters(
        query.get("name"), task=query.get("task"), limit=limit + 1, after=place_of(visit)
    )  # fmt: skip
    cursor = cursor_of(found[limit - 1].name, found[limit - 1].identity) if len(found) > limit else ""
    return _list(visit, found[:limit], cursor)


def claims(visit: Visit) -> Response:
    """``celery dlock claims``."""
    query = visit.query
    try:
        page = visit.control.claims(
            task=query.get("task"), cursor=query.get("cursor", ""), limit=_limit(visit, 100)
        )  # fmt: skip
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    return _list(visit, page.items, page.cursor)


def explain(visit: Visit) -> Response:
    """``celery dlock explain``."""
    task_id = visit.query.get("id", "")
    if not task_id:
        raise HTTPException(400, "the task id is missing: /api/v1/explain?id=...")
    visit.board.tasks()
    return _list(visit, [visit.control.explain(task_id)])


def audit(visit: Visit) -> Response:
    """``celery dlock audit``."""
    return _list(visit, visit.control.audit(_limit(visit, 100)))


def workers(visit: Visit) -> Response:
    """``celery dlock list --workers``."""
    found = visit.control.workers()
    if found.problem:
        raise HTTPException(503 if found.unreachable else 404, found.problem)
    return _list(visit, found.workers)


def check(visit: Visit) -> Response:
    """``celery dlock check``."""
    board = visit.board
    return _list(visit, [*store_items(board.health()), *limit_items(board.counts()), *queue_items(board.app)])


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
