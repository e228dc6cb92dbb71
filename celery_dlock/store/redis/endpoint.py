"""How a connection to the server that keeps the locks is made; opening it is another's work."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.exceptions import RedisError
from redis.retry import Retry

__all__ = ["Endpoint", "ServerEndpoint"]

#: The kernel asks after 30 s of silence, and gives a connection up that has not answered three times.
_KEEPALIVE = {
    getattr(socket, name): value
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items()
    if hasattr(socket, name)
}


class Endpoint(Protocol):
    """Makes connections to one server, wherever that is now."""

    def address(self) -> object:
        """Where that is: equal to what it was as long as the connections that were made may be used.

        Raises:
            StoreUnavailable: Nobody knows where the server is.
        """
        ...

    def failover_epoch(self) -> int:
        """A number that grows each time another server takes its place; 0 where nobody counts.

        Raises:
            StoreUnavailable: It is counted, and nobody tells.
        """
        ...

    def invalidate(self) -> None:
        """Something has happened by which another server may be in its place."""
        ...

    def connection(self, seconds: float) -> Connection:
        """One that is not open yet, and waits so many seconds for each of its steps.

        Raises:
            StoreUnavailable: Nobody knows where the server is.
        """
        ...

    def check(self, connection: Connection) -> None:
        """Called when it is open, before anything is said on it.

        Raises:
            StoreUnavailable: What answers there is not the server that was meant.
        """
        ...


class ServerEndpoint:
    """To one server by its address.

    redis-py's retries are off: it would repeat commands on its own judgement, where only a store knows which may be.

    Args:
        options: How to connect there, in redis-py's words
            (:meth:`~celery_dlock.store.location.StoreLocation.options_at`).

    Raises:
        ValueError, TypeError: redis-py cannot make a connection of them.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        options = dict(options)
        self._connection_class: type[Connection] = options.pop("connection_class", Connection)
        # RESP2 saves the HELLO round trip, and our answers need no types of RESP3.
        options["protocol"] = 2
        if issubclass(self._connection_class, Connection):
            # A router forgets an idle connection in silence, and the next task would pay for it with a timeout.
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
        bare: Any = connection  # its stubs lack some of these
        # redis-py's names for it, until and since 7: each of its two CLIENT SETINFO would be a round trip.
        bare.lib_name = bare.lib_version = bare.driver_info = None
        return connection

    def check(self, connection: Connection) -> None:
        """Its address is all that is known of it."""

    def address(self) -> object:
        return None

    def failover_epoch(self) -> int:
        return 0

    def invalidate(self) -> None:
        """There is no other."""
