"""The dashboard's own server, for ``celery dlock web``."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from celery.utils.imports import symbol_by_name
from starlette.requests import Request
from starlette.types import ASGIApp

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


def protected(app: Celery, host: str, auth_file: Path | None, access: str | None, hosts: Sequence[str] = ()) -> ASGIApp:
    """Return the dashboard behind the protection that the command line chose.

    Args:
        app: The Celery app.
        host: The address to bind.
        auth_file: An htpasswd file. Its users may act, unless ``access`` decides.
        access: ``module:function``.
        hosts: The names under which browsers reach the dashboard. Without any, a dashboard with users accepts every
            name, because browsers do not send a password to another name.

    Raises:
        InvalidLockOptions: There is no protection for an address that other machines reach, or it cannot be used.
    """
    if auth_file is None and access is None and not is_local(host):
        raise InvalidLockOptions(
            f"--host {host} lets other machines reach the dashboard: give --auth-file FILE (users of htpasswd -B), or "
            "--access MODULE:FUNCTION; or keep to 127.0.0.1 and use an SSH tunnel"
        )
    rights: Access = _function(access) if access else _act if auth_file else read_only
    made = dashboard(app, access=rights, hosts=hosts or ("*",) if auth_file else (host, *hosts))
    made.state.sampler.always()
    if auth_file is not None:
        return SecurityHeaders(BasicAuth(made, PasswordFile(auth_file)))
    return made


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

    from .connections import OPTIONS, ConnectionLimits  # noqa: PLC0415

    if ready:
        ready()
    uvicorn.run(
        ConnectionLimits(made), host=host, port=port, root_path=root_path, log_level="warning", access_log=False,
        server_header=False, **OPTIONS,
    )  # fmt: skip
