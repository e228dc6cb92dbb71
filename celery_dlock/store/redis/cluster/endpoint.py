"""Connections to one node of a Redis Cluster that check the identity of the node."""

from __future__ import annotations

from collections.abc import Callable

from redis.connection import Connection
from redis.exceptions import ResponseError

from ....errors import StoreNotReady
from ..endpoint import Endpoint
from ..server_errors import error_from_reply

__all__ = ["NodeEndpoint", "UnexpectedNode"]


class UnexpectedNode(StoreNotReady):
    """Another node than the known one answers at an address."""


class NodeEndpoint:
    """An endpoint that compares the id of the node with the expected one.

    Addresses are reused. The address of a dead node may belong to a node of another Cluster now. That node would not
    answer MOVED for any slot.

    Args:
        endpoint: The endpoint of the address.
        expected: Returns the id of the node; empty if it is not known.
    """

    def __init__(self, endpoint: Endpoint, expected: Callable[[], bytes]) -> None:
        self._endpoint = endpoint
        self._expected = expected

    def address(self) -> object:
        return self._endpoint.address()

    def failover_epoch(self) -> int:
        return self._endpoint.failover_epoch()

    def invalidate(self) -> None:
        self._endpoint.invalidate()

    def connection(self, seconds: float) -> Connection:
        return self._endpoint.connection(seconds)

    def check(self, connection: Connection) -> None:
        self._endpoint.check(connection)
        expected = self._expected()
        if not expected:
            return
        connection.send_command("CLUSTER", "MYID")  # type: ignore[no-untyped-call]  # redis-py has no types here
        try:
            node_id = connection.read_response()
        except ResponseError as error:
            if isinstance(not_ready := error_from_reply(str(error)), StoreNotReady):
                raise not_ready from error  # it can answer once its script has ended or its data is loaded
            return  # the permission may be missing: then only the address identifies the node
        if node_id != expected:
            raise UnexpectedNode(
                "the lock store refused: another node than that of its Cluster answers at its address; if the Cluster "
                "was replaced on purpose, restart this process"
            )
