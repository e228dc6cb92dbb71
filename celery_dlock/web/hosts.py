"""The host names under which a dashboard answers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import InvalidLockOptions

__all__ = ["Hosts", "KnownHosts"]

#: The names of this machine, which are always known.
LOCAL: Final = ("localhost", "127.0.0.1", "[::1]")
_NAME: Final = r"\[[0-9a-f:.]+\]|[\w.-]+"
#: A ``Host`` header: a name or an address, and a port.
_HEADER: Final = re.compile(rf"({_NAME})(?::[0-9]*)?", re.ASCII)


class Hosts:
    """Host names that are known.

    Args:
        names: The names beside those of this machine, as in Django's ``ALLOWED_HOSTS``: ``"ops.example.com"``,
            ``".example.com"`` (that name and all below it), ``"*"`` (any).

    Raises:
        InvalidLockOptions: A name has a scheme, a port or a path.
    """

    def __init__(self, names: Iterable[str]) -> None:
        given = [names] if isinstance(names, str) else list(names)
        known = [*LOCAL, *(f"[{name}]" if name.count(":") > 1 and "[" not in name else name.lower() for name in given)]
        for name in known:
            if name != "*" and not re.fullmatch(_NAME, name, re.ASCII):
                raise InvalidLockOptions(
                    f"invalid host {name!r}: expected a name without scheme, port and path, such as 'ops.example.com', "
                    "or '*'"
                )
        self._any = "*" in known
        self._names = {name.strip(".") for name in known}
        self._below = tuple(name for name in known if name.startswith("."))

    def know(self, header: str) -> bool:
        """Return whether the name in a ``Host`` header is known."""
        match = _HEADER.fullmatch(header.lower())
        name = match[1].rstrip(".") if match else ""
        return self._any or (name != "" and (name in self._names or name.endswith(self._below)))


class KnownHosts:
    """An ASGI middleware that answers only requests for known names.

    Without it, a web page could give its own name the dashboard's address (DNS rebinding). It could then read the
    dashboard, and change what its visitor may change. Probes of ``/healthz`` may use any name: they often use an
    address.
    """

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        probe = scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) == "/healthz"
        if probe or self._hosts.know(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        text = (
            "this host name is unknown: permit it with --allowed-host NAME, or in code with dashboard(hosts=[NAME])\n"
        )
        await PlainTextResponse(text, 400)(scope, receive, send)
