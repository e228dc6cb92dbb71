"""The dashboard as a Django view: Django knows the user, and the dashboard answers.

The dashboard is an ASGI app. A view calls it inside Django's own request, so it works under WSGI and under ASGI, and
behind all middleware of the project. Mounted beside Django, it would have to read sessions and permissions itself.
"""

from __future__ import annotations

import asyncio
import functools
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync
from celery.app import app_or_default
from django.contrib.admin.views.decorators import staff_member_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from ..errors import InvalidLockOptions
from ..web import ACTIONS, dashboard

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["dashboard_view"]

_RIGHTS, _USER = "celery_dlock.rights", "celery_dlock.user"


# The dashboard checks a token of its own, and the Origin of each change; its forms do not have Django's token.
@csrf_exempt
@staff_member_required
def dashboard_view(request: HttpRequest, path: str = "") -> HttpResponse:
    """Answer with the dashboard, to members of the staff who may see locks.

    Args:
        request: The request.
        path: The part of the address that belongs to the dashboard.
    """
    if not request.user.has_perm("celery_dlock.view_lock"):
        raise PermissionDenied
    try:
        app = _dashboard(app_or_default())
    except InvalidLockOptions as error:
        return HttpResponse(f"{error}\n", status=503, content_type="text/plain; charset=utf-8")
    scope = _scope(request, root=request.path[: len(request.path) - len(path)].rstrip("/"))
    scope[_RIGHTS] = frozenset(action for action in ACTIONS if request.user.has_perm(f"celery_dlock.{action}_lock"))
    scope[_USER] = request.user.get_username()
    return _response(*async_to_sync(_answer)(app, scope, request.body))


@functools.lru_cache(maxsize=1)  # a process of Django has one Celery app
def _dashboard(app: Celery) -> Any:
    return dashboard(
        app,
        access=lambda request: request.scope[_RIGHTS],
        user=lambda request: request.scope[_USER],
        hosts=["*"],  # get_host() has checked the name (ALLOWED_HOSTS)
    )


def _scope(request: HttpRequest, root: str) -> dict[str, Any]:
    """Return the request as an ASGI scope. Host and scheme are those that Django believes, also behind a proxy."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    headers["host"] = request.get_host()
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1"),
        "root_path": root,
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()],
        "client": None,
        "server": None,
    }


async def _answer(app: Any, scope: dict[str, Any], body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers and body of the answer of an ASGI app."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.Event().wait()  # the visitor stays until the answer is complete
        return unread.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent[0].get("headers", ())]
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


def _response(status: int, headers: list[tuple[str, str]], body: bytes) -> HttpResponse:
    response = HttpResponse(body, status=status)
    del response["Content-Type"]
    for name, value in headers:
        if name.lower() == "set-cookie":
            response.cookies.update(SimpleCookie(value))
        else:
            response[name] = value
    return response
