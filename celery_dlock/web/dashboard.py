"""The ASGI app of the dashboard: its routes, and its answers to errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ..errors import DLockError, LockKeyError, StoreUnavailable
from ..reports.actions import ACTIONS
from ..reports.documents import VERSION
from .access import Access, User, read_only
from .api import RESOURCES
from .forms import acting
from .headers import SecurityHeaders
from .hosts import Hosts, KnownHosts
from .metrics import metrics
from .pages import PAGES
from .state import FOLDER, DashboardState, Visit, root_of

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["dashboard"]


def dashboard(
    app: Celery, *, access: Access = read_only, user: User | None = None, hosts: Iterable[str] = ()
) -> Starlette:
    """Return the dashboard of an app, as an ASGI app that can be mounted at any path.

    It needs the extra ``celery-dlock[web]``, and the operator's rights in the store.

    Args:
        app: The Celery app whose locks to show.
        access: Returns the rights of a request: ``"none"``, ``"read"``, ``"act"`` (everything), or a set of actions
            that are permitted beside reading. Default: everyone who reaches the dashboard may read, and none may act.
        user: Returns the name of the user of a request, for the audit. Default: the ``display_name`` of the user that
            Starlette's authentication found, else ``"dashboard"``.
        hosts: The host names under which browsers reach the dashboard, such as ``"ops.example.com"``; those of this
            machine are always permitted. ``".example.com"`` permits that name and all below it, ``"*"`` any name: for
            a site that checks the ``Host`` header itself.

    ``access`` and ``user`` may be coroutine functions. A plain function runs in a thread. The actions are those of
    ``celery_dlock.web.ACTIONS``: ``"release"``, ``"hold"``, ``"unhold"``, ``"resolve"``, ``"forget"``, ``"requeue"``,
    ``"drop"`` and ``"drop_claim"``.

    Raises:
        InvalidLockOptions: A ``dlock_`` setting or a host name is invalid, or ``dlock_url`` is a list of servers
            (Redlock).
        NoLockStore: No setting names a store.
    """
    known, state = Hosts(hosts), DashboardState(app, access, user)
    routes: list[BaseRoute] = [
        *(_reading(state, path, work) for path, work in {**PAGES, **RESOURCES}.items()),
        *(Route(f"/do/{verb}", acting(state, verb), methods=["POST"]) for verb in ACTIONS),
        _reading(state, "/metrics", metrics(state)),
        Route("/healthz", _alive(state)),
        Mount("/static", StaticFiles(directory=FOLDER / "static")),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _failed(state),
        DLockError: _failed(state),
    }
    middleware = [Middleware(SecurityHeaders), Middleware(KnownHosts, known)]
    made = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    made.state.sampler = state.sampler
    return made


#: Pages that do not ask the store, or limit themselves how often they ask it.
_SLOW = frozenset({"/metrics", "/workers", "/api/v1/workers"})


def _reading(state: DashboardState, path: str, work: Callable[[Visit], Response]) -> Route:
    run = state.threads.run_slow if path in _SLOW else state.threads.ask_store

    async def endpoint(request: Request) -> Response:
        return await run(work, await state.visit(request))

    return Route(path, endpoint)


def _alive(state: DashboardState) -> Callable[[Request], Awaitable[Response]]:
    """Answer probes, without asking for rights: it says only whether the store answers.

    All probes share one attempt, and none waits longer than the timeout of a command.
    """

    async def healthz(_request: Request) -> Response:
        attempt = state.probe.attempt()
        left = attempt.began + state.timeout - time.monotonic()
        try:
            up = attempt.answer.done() or await asyncio.wait_for(asyncio.wrap_future(attempt.answer), max(0.0, left))
        except asyncio.TimeoutError:
            up = False
        up = up and attempt.answer.result()
        return PlainTextResponse("ok\n" if up else "the lock store does not answer\n", 200 if up else 503)

    return healthz


_FAILED = 500


def _status(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, StoreUnavailable):
        return 503
    if isinstance(error, LockKeyError):
        return 400
    return _FAILED


_TITLES = {
    400: "This request is malformed",
    403: "Not permitted",
    404: "Not found",
    405: "Not permitted",
    409: "Refused",
    413: "This form is too long",
    503: "The lock store does not answer",
}


def _failed(state: DashboardState) -> Callable[[Request, Exception], Response]:
    """Return the page, or the document, of an error. It never shows a traceback."""

    def answer(request: Request, error: Exception) -> Response:
        status = _status(error)
        text = str(getattr(error, "detail", error))
        root = root_of(request)
        if isinstance(error, StoreUnavailable):
            text = f"{state.store}: {text}"
        headers = getattr(error, "headers", None)
        if request.scope["path"].removeprefix(root).startswith("/api/"):
            return JSONResponse({"version": VERSION, "error": text}, status, headers)
        title = _TITLES.get(status, "This did not work")
        page = state.render("error.html", root=root, title=title, text=text, back=getattr(error, "back", ""))
        return Response(page, status, headers, "text/html")

    return answer
