"""Connections to one node of a Redis Cluster that check the identity of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redis.connection import Connection

from ....errors import StoreNotReady
from ..endpoint import ServerEndpoint, ask

__all__ = ["NodeEndpoint", "UnexpectedNode"]


class UnexpectedNode(StoreNotReady):
    """Another node than the known one answers at an address."""


class NodeEndpoint(ServerEndpoint):
    """The endpoint of a node. It compares the id of the node with the expected one.

    The address of a dead node may now belong to a node of another Cluster. That node would accept commands: it does not
    reply MOVED for the slots that it owns there.

    Args:
        options: Connection options of the address, for redis-py.
        expected: Returns the id of the node; empty if it is not known.
    """

    def __init__(self, options: Mapping[str, Any], expected: Callable[[], bytes]) -> None:
        super().__init__(options)
        self._expected = expected

    def check(self, connection: Connection) -> None:
        expected = self._expected()
        # Without the permission for the command, only the address identifies the node.
        if expected and ask(connection, "CLUSTER", "MYID") not in (expected, b""):
            raise UnexpectedNode(
                "the lock store refused: another node than that of its Cluster answers at its address; if the Cluster "
                "was replaced on purpose, restart this process"
            )
