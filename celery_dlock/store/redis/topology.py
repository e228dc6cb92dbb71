"""The contract of a topology: it finds a key's server and runs commands on a connection to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .connection import RespConnection

__all__ = ["Pipeline", "Topology"]

T = TypeVar("T")


class Pipeline(Protocol):
    """Commands that are sent on one connection in one write, before their replies are read."""

    def send(self, connection: RespConnection, calls: Sequence[Any]) -> None: ...
    def read(self, connection: RespConnection, calls: Sequence[Any]) -> list[Any]: ...


class Topology(Protocol):
    """The servers of a store. Each key is on one of them.

    Every method raises :class:`~celery_dlock.errors.ReplyLost` if it is unknown which commands a server executed. It
    raises :class:`~celery_dlock.errors.StoreUnavailable` if no command was sent.
    """

    @property
    def clustered(self) -> bool:
        """Return whether the keys are distributed over several servers."""
        ...

    def call(self, key: str, operation: Callable[..., T], *args: Any, within: float | None = None) -> T:
        """Return the result of ``operation``, called with a connection to the key's server.

        Args:
            key: Determines the server.
            operation: Called with the connection and ``args``. If it returns an
                :class:`~celery_dlock.store.redis.connection.ErrorReply` that redirects to another server, no command
                was executed, and it is called again with a connection to that server.
            args: Further arguments of ``operation``.
            within: Seconds to wait for each reply, if that is less than the usual timeout.
        """
        ...

    def each(
        self,
        pipeline: Pipeline,
        calls: Sequence[tuple[str, Any]],
        within: float | None = None,
        *,
        awaits_moves: bool = True,
    ) -> list[Any]:
        """Send many commands, in one write for each server, and return their replies.

        If a server fails, the replies of its commands are the :class:`~celery_dlock.errors.StoreUnavailable` that a
        single call would have raised. If all servers fail, this method raises it.

        Args:
            pipeline: Sends the commands of one server and reads their replies.
            calls: Pairs of a key, which determines the server, and a command.
            within: Seconds to wait for each reply, if that is less than the usual timeout.
            awaits_moves: If the keys of a command are moving to another node, wait within this time until all have.
        """
        ...

    def shard(self, key: str) -> int:
        """Return the number of the key's server, the same in all processes. Sends no command."""
        ...

    def failover_epoch(self, key: str) -> int:
        """Return how often a failover replaced the key's server, or 0 if failovers are not counted."""
        ...

    def everywhere(self, operation: Callable[[RespConnection], T]) -> list[T]:
        """Return the result of ``operation`` for a connection to each server that has keys."""
        ...

    def servers(self) -> Sequence[str]:
        """Return a text for each server that has keys, in a fixed order."""
        ...

    def on(self, server: str, operation: Callable[..., T], *args: Any) -> T:
        """Return the result of ``operation`` for a connection to one of :meth:`servers`."""
        ...

    def invalidate(self) -> None:
        """Forget which server is where: a reply suggests that another server has replaced one."""
        ...

    def close(self) -> None:
        """Close all connections and forget the servers' addresses. The next call opens new connections."""
        ...
