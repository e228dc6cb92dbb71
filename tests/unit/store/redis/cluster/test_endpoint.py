"""Which node may be talked to at an address of a Redis Cluster, by what it says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from celery_dlock.errors import StoreNotReady
from celery_dlock.store.redis.cluster.endpoint import NodeEndpoint, UnexpectedNode
from celery_dlock.store.redis.endpoint import ServerEndpoint


def connection(told: Any) -> Any:
    """A new connection, whose node says this of itself; an exception is raised."""

    def read_response() -> Any:
        if isinstance(told, Exception):
            raise told
        return told

    return SimpleNamespace(send_command=lambda *words: None, read_response=read_response)


@pytest.fixture
def door() -> NodeEndpoint:
    return NodeEndpoint(ServerEndpoint({"host": "a"}), lambda: b"id1")


@pytest.mark.parametrize("told", [b"id1", NoPermissionError("no CLUSTER")])
def test_node_that_is_meant_or_may_not_say_who_it_is_is_let_in(door: NodeEndpoint, told: Any) -> None:
    door.check(connection(told))


def test_node_of_another_id_is_not_let_in(door: NodeEndpoint) -> None:
    with pytest.raises(UnexpectedNode):
        door.check(connection(b"id2"))


@pytest.mark.parametrize("said", ["BUSY Redis is busy running a script", "LOADING Redis is loading the dataset"])
def test_node_that_cannot_say_yet_who_it_is_is_not_let_in(door: NodeEndpoint, said: str) -> None:
    with pytest.raises(StoreNotReady, match=said):
        door.check(connection(ResponseError(said)))
