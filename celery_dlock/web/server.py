"""The dashboard's own server, for ``celery dlock web``."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from celery.utils.imports import symbol_by_name
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import InvalidLockOptions
from .access import Access, read_only
from .basic_auth import BasicAuth, PasswordFile
from .dashboard import dashboard
from .headers import SecurityHeaders

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["is_local", "protected", "serve"]


def is_local(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def protected(app: Celery, host: str, auth_file: Path | None, access: str | None) -> ASGIApp:
    """Return the dashboard behind the protection that the command line chose.

    Args:
        app: The Celery app.
        host: The address to bind.
        auth_file: An htpasswd file. Its users may act, unless ``access`` decides.
        access: ``module:function``.

    Raises:
        InvalidLockOptions: There is no protection for an address that other machines reach, or it cannot be used.
    """
    if auth_file is None and access is None and not is_local(host):
        raise InvalidLockOptions(
            f"--host {host} lets other machines reach the dashboard: give --auth-file FILE (users of htpasswd -B), or "
            "--access MODULE:FUNCTION; or keep to 127.0.0.1 and use an SSH tunnel"
        )
    rights: Access = _function(access) if access else _act if auth_file else read_only
    made: ASGIApp = dashboard(app, access=rights)
    if auth_file is not None:
        return SecurityHeaders(BasicAuth(made, PasswordFile(auth_file)))
    return made if access else SecurityHeaders(KnownHost(made, host))


def _act(_request: Request) -> str:
    return "act"


def _function(path: str) -> Access:
    try:
        found: object = symbol_by_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidLockOptions(f"--access {path}: it cannot be imported: {error}") from error
    if ":" not in path or not callable(found):
        raise InvalidLockOptions(f"--access {path}: expected MODULE:FUNCTION, such as shop.operators:access")
    return found


class KnownHost:
    """An ASGI middleware that answers only requests for names of this machine.

    Without it, a web page could give its own name this machine's address (DNS rebinding), and then read the dashboard.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = {host, "localhost", "127.0.0.1", "::1"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            name = urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname
        except ValueError:
            name = None
        if name in self._names:
            await self._app(scope, receive, send)
            return
        text = "this name is unknown: behind a proxy, start the dashboard with --auth-file or --access\n"
        await PlainTextResponse(text, 400)(scope, receive, send)


def serve(made: ASGIApp, host: str, port: int, root_path: str = "", *, ready: Callable[[], None] | None = None) -> None:
    """Serve the dashboard until SIGINT or SIGTERM.

    Args:
        made: The ASGI app.
        host: The address to bind.
        port: The port to bind.
        root_path: The path under which a proxy shows the dashboard, and which it removes from requests.
        ready: Called before the server starts.
    """
    import uvicorn  # noqa: PLC0415  # the dashboard needs it only for this command

    if ready:
        ready()
    uvicorn.run(
        made, host=host, port=port, root_path=root_path, log_level="warning", access_log=False, lifespan="off",
        server_header=False,
    )  # fmt: skip
