"""How a connection to one node of a Redis Cluster is made: to the one that is meant, whoever has its address now."""

from __future__ import annotations

from collections.abc import Callable

from redis.connection import Connection
from redis.exceptions import ResponseError

from .door import Door
from .errors import StoreNotReady

__all__ = ["NodeDoor", "Stranger"]


class Stranger(StoreNotReady):
    """Another node answers at an address than the one that is known to have it."""


class NodeDoor:
    """A door that asks who answers.

    Addresses are given again: that of a dead node may belong to a node of another Cluster now, which says of no slot
    that it has moved.

    Args:
        door: To the address.
        expected: What the node there calls itself; empty while that is not known.
    """

    def __init__(self, door: Door, expected: Callable[[], bytes]) -> None:
        self._door = door
        self._expected = expected

    def where(self) -> object:
        return self._door.where()

    def term(self) -> int:
        return self._door.term()

    def doubt(self) -> None:
        self._door.doubt()

    def connection(self, seconds: float) -> Connection:
        return self._door.connection(seconds)

    def check(self, connection: Connection) -> None:
        self._door.check(connection)
        expected = self._expected()
        if not expected:
            return
        connection.send_command("CLUSTER", "MYID")  # type: ignore[no-untyped-call]  # redis-py has no types here
        try:
            told = connection.read_response()
        except ResponseError:
            return  # the right for it may be missing: then its address is all that is known of it
        if told != expected:
            raise Stranger("the lock store refused: another node than that of its Cluster answers at its address")
