"""Endpoints: each makes unopened connections to one lock server. A pool opens them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from ...errors import StoreNotReady
from .server_errors import error_from_reply

__all__ = ["Endpoint", "ServerEndpoint", "ask"]

#: The kernel probes a connection after 30 s of silence, and ends it after three unanswered probes.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items()
    if hasattr(socket, name)
}


class Endpoint(Protocol):
    """A source of connections to one server, at its current address."""

    def address(self) -> object:
        """Return the server's address. While it stays equal, connections made before may still be used.

        Raises:
            StoreUnavailable: The address is unknown.
        """
        ...

    def failover_epoch(self) -> int:
        """Return a number that grows with each failover, or 0 if failovers are not counted.

        Raises:
            StoreUnavailable: Failovers are counted, but no server returned the number.
        """
        ...

    def invalidate(self) -> None:
        """Forget the address, because another server may have replaced this one."""
        ...

    def connection(self, seconds: float) -> Connection:
        """Return an unopened connection that waits up to ``seconds`` for each step of opening it.

        Raises:
            StoreUnavailable: The address is unknown.
        """
        ...

    def check(self, connection: Connection) -> None:
        """Check a connection that has just been opened, before its first command.

        Raises:
            StoreUnavailable: Another server answers at the address.
        """
        ...


class ServerEndpoint:
    """The endpoint of one server with a fixed address.

    redis-py's retries are off: it would repeat a command, although only the store knows whether it may run twice.

    Args:
        options: redis-py's connection options (:meth:`~celery_dlock.store.location.StoreLocation.options_at`).

    Raises:
        ValueError, TypeError: redis-py rejects the options.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        options = dict(options)
        self._connection_class: type[Connection] = options.pop("connection_class", Connection)
        # RESP2 needs no HELLO round trip, and no reply of a script needs a type of RESP3.
        options["protocol"] = 2
        if issubclass(self._connection_class, Connection):
            # A router may drop an idle connection without a notice. Without keepalive, the next task would time out.
            options = {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE} | options
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if (file := options.get(name)) and not Path(str(file)).is_file():
                raise ValueError(f"{name}={file!r} is no file")
        self._options = options
        try:
            self.connection(1)
        except RedisError as error:
            raise ValueError(str(error)) from error

    def connection(self, seconds: float) -> Connection:
        times = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        connection = self._connection_class(retry=Retry(NoBackoff(), 0), **{**self._options, **times})
        bare: Any = connection  # its type stubs lack some of these attributes
        # No CLIENT SETINFO: redis-py would send two, one round trip each. The names are of redis-py before and since 7.
        bare.lib_name = bare.lib_version = bare.driver_info = None
        return connection

    def check(self, connection: Connection) -> None:
        """Accept every server: only the address identifies this one."""

    def address(self) -> object:
        return None

    def failover_epoch(self) -> int:
        return 0

    def invalidate(self) -> None:
        """Do nothing: the address is fixed."""


def ask(connection: Connection, *command: str) -> bytes:
    """Return the reply of the server behind a new connection, or an empty one if the command is not permitted.

    For :meth:`Endpoint.check`: addresses are reused, and a name may lead to another server later.

    Raises:
        StoreNotReady: The server can answer when its script or its loading has ended.
    """
    connection.send_command(*command)
    try:
        reply: Any = connection.read_response()
    except ResponseError as error:
        if isinstance(later := error_from_reply(str(error)), StoreNotReady):
            raise later from error
        return b""
    return reply.encode() if isinstance(reply, str) else bytes(reply)
