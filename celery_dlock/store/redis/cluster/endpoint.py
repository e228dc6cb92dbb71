"""How a connection to one node of a Redis Cluster is made: to the one that is meant, whoever has its address now."""

from __future__ import annotations

from collections.abc import Callable

from redis.connection import Connection
from redis.exceptions import ResponseError

from ....errors import StoreNotReady
from ..endpoint import Endpoint
from ..server_errors import error_from_reply

__all__ = ["NodeEndpoint", "UnexpectedNode"]


class UnexpectedNode(StoreNotReady):
    """Another node answers at an address than the one that is known to have it."""


class NodeEndpoint:
    """A door that asks who answers.

    Addresses are given again: that of a dead node may belong to a node of another Cluster now, which says of no slot
    that it has moved.

    Args:
        door: To the address.
        expected: What the node there calls itself; empty while that is not known.
    """

    def __init__(self, door: Endpoint, expected: Callable[[], bytes]) -> None:
        self._door = door
        self._expected = expected

    def address(self) -> object:
        return self._door.address()

    def failover_epoch(self) -> int:
        return self._door.failover_epoch()

    def invalidate(self) -> None:
        self._door.invalidate()

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
        except ResponseError as error:
            if isinstance(later := error_from_reply(str(error)), StoreNotReady):
                raise later from error  # it can tell once its script or its loading is over
            return  # the right for it may be missing: then its address is all that is known of it
        if told != expected:
            raise UnexpectedNode(
                "the lock store refused: another node than that of its Cluster answers at its address; if the Cluster "
                "was replaced on purpose, restart this process"
            )
