"""What a store knows of its servers: which of them keeps a key, and how to talk to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .connection import RespConnection, Subscription

__all__ = ["Pipeline", "Topology"]

T = TypeVar("T")


class Pipeline(Protocol):
    """Says many things on one connection in one write, and then reads the answers."""

    def send(self, wire: RespConnection, calls: Sequence[Any]) -> None: ...
    def read(self, wire: RespConnection, calls: Sequence[Any]) -> list[Any]: ...


class Topology(Protocol):
    """One server or several, as one place to keep keys at.

    Every method raises :class:`~celery_dlock.errors.ReplyLost` when it is not known what the server carried out, and
    :class:`~celery_dlock.errors.StoreUnavailable` when it was not asked, or let nobody in.
    """

    @property
    def clustered(self) -> bool:
        """Do its servers share the keys among themselves?"""
        ...

    @property
    def wakes(self) -> str:
        """What a waiter that has subscribed leaves in a lock: ``"1"``: PUBLISH wakes it; ``"s"``: SPUBLISH does."""
        ...

    def call(self, key: str, talk: Callable[..., T], *words: Any, within: float | None = None) -> T:
        """What ``talk`` makes of a connection to the server that keeps ``key``, and ``words``.

        Args:
            key: Names the server.
            talk: Called with the connection and the words, perhaps more than once: where it returns an
                :class:`~celery_dlock.store.redis.connection.ErrorReply` by which another server keeps the key, nothing
                was carried out.
            words: What to say.
            within: Seconds to wait for an answer, where that is less than usual.
        """
        ...

    def each(self, talk: Pipeline, calls: Sequence[tuple[str, Any]], within: float | None = None) -> list[Any]:
        """The answers to many calls, each by a key, in one write for each server.

        Where one server of several fails, an answer is the :class:`~celery_dlock.errors.StoreUnavailable` that one
        call for it would have raised; where all do, that is raised.
        """
        ...

    def shard(self, key: str) -> int:
        """Which of its servers keeps a key, as a number that is the same in all processes. Asks nobody."""
        ...

    def failover_epoch(self, key: str) -> int:
        """How often the server that keeps a key was replaced by another, as whoever decides that counts; else 0."""
        ...

    def everywhere(self, talk: Callable[[RespConnection], T]) -> list[T]:
        """What ``talk`` makes of a connection to each server that keeps keys."""
        ...

    def subscribe(self, channel: str) -> Subscription:
        """Listen for what is published on ``channel``, whose name has the hash tag of a key."""
        ...

    def invalidate(self) -> None:
        """A server has answered something by which another may be in its place."""
        ...

    def close(self) -> None:
        """Give up all connections, and what is known of the servers. It may be used again afterwards."""
        ...
