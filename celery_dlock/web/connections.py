"""The connections of the dashboard's own server: how many it keeps open, and how long it waits for their clients.

Uvicorn has no time limit for a request that a client sends slowly, nor for an answer that it does not read. Its
``limit_concurrency`` also counts connections without a request, so a few of them would make it refuse every request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from .peers import PEER, network_of

__all__ = ["OPTIONS", "Connection", "ConnectionLimits"]

#: Connections that are open at a time. Each costs a file, of which a process often has only 256.
CONNECTIONS: Final = 64
#: Connections that the event loop accepts in one step. They are open before their number can be compared.
BACKLOG: Final = 32
#: Seconds that a client may take to send a whole request, from the start of the connection or the end of an answer.
REQUEST_TIMEOUT: Final = 10.0
#: Seconds that a client may take to read an answer.
ANSWER_TIMEOUT: Final = 60.0
#: How soon a connection is looked at again that the app works for.
_WHILE_WORKING: Final = 1.0
#: The key in ``scope["state"]`` under which the app finds the connection of its request.
_CONNECTION: Final = "celery_dlock.connection"


class ConnectionLimits:
    """An ASGI app that limits the connections of the server that serves it.

    If too many are open, a new one takes the place of one that waits for its client. The address with the most
    connections loses one first.

    Args:
        app: The app to serve.
        connections: The number of connections that are open at a time.
        request_timeout: Seconds for a client to send a whole request.
        answer_timeout: Seconds for a client to read an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        connections: int = CONNECTIONS,
        request_timeout: float = REQUEST_TIMEOUT,
        answer_timeout: float = ANSWER_TIMEOUT,
    ) -> None:
        self._app = app
        self._most = connections
        self.request_timeout = request_timeout
        self.answer_timeout = answer_timeout
        #: The open connections, the oldest first.
        self._open: dict[Connection, None] = {}

    def admit(self, connection: Connection) -> bool:
        """Return whether this new connection may stay open, after another one was closed for it if necessary."""
        if len(self._open) >= self._most:
            most = Counter(other.peer for other in self._open)
            waiting = [other for other in self._open if not other.working]
            if not waiting:
                return False
            min(waiting, key=lambda other: (-most[other.peer], other.since)).drop()
        self._open[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        """Count a connection no longer."""
        self._open.pop(connection, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"].pop(_CONNECTION)
        scope["state"][PEER] = connection.peer

        async def receive_in_time() -> Message:
            with connection.waits_for_client():
                return await receive()

        async def send_in_time(message: Message) -> None:
            connection.answers()
            with connection.waits_for_client():
                await send(message)

        with connection.works():
            await self._app(scope, receive_in_time, send_in_time)


class Connection(H11Protocol):
    """A connection of a server whose app is :class:`ConnectionLimits`."""

    def __init__(self, config: Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, {**app_state, _CONNECTION: self}, _loop)
        self._limits = cast("ConnectionLimits", config.app)
        self._timer: asyncio.TimerHandle | None = None
        #: The requests that the app works on, apart from those that wait for the client.
        self._works = 0
        #: From when the time limits count.
        self.since = self.loop.time()
        #: The network at the other end.
        self.peer = ""

    @property
    def working(self) -> bool:
        """Whether the app works for this connection, so that its client waits and not the server."""
        return self._works > 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.peer = network_of((transport.get_extra_info("peername") or [""])[0])
        if self._limits.admit(self):
            self._check_later(self._limits.request_timeout)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once, without what its client has not read yet."""
        self._forget()
        self.transport.abort()

    @contextmanager
    def works(self) -> Iterator[None]:
        """Note that the app works on a request."""
        self._works += 1
        try:
            yield
        finally:
            self._works -= 1
            self.since = self.loop.time()

    @contextmanager
    def waits_for_client(self) -> Iterator[None]:
        """Note that the app waits for the client meanwhile: for the rest of the request, or until it reads."""
        self._works -= 1
        try:
            yield
        finally:
            self._works += 1

    def answers(self) -> None:
        """Note that the app sends, so that the time limit of the answer begins."""
        self.since = self.loop.time()

    def _forget(self) -> None:
        self._limits.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_later(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._check)

    def _check(self) -> None:
        if self.working:
            self._check_later(_WHILE_WORKING)
            return
        unread = self.transport.get_write_buffer_size() > 0
        limit = self._limits.answer_timeout if unread else self._limits.request_timeout
        left = self.since + limit - self.loop.time()
        if left <= 0:
            self.drop()
        else:
            self._check_later(left)


#: The options of uvicorn under which the limits hold. With WebSocket, a connection would change to another class. A
#: shutdown waits for answers, and a client that does not read its answer would delay it.
OPTIONS: Final[dict[str, Any]] = {
    "http": Connection,
    "ws": "none",
    "backlog": BACKLOG,
    "timeout_graceful_shutdown": 10,
    "lifespan": "off",
}
