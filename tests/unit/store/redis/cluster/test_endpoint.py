"""Nodes that may be used at an address of a Redis Cluster, by what each says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from celery_dlock.errors import StoreNotReady
from celery_dlock.store.redis.cluster.endpoint import NodeEndpoint, UnexpectedNode
from tests.unit.store.replies import connection_with_reply


@pytest.fixture
def endpoint() -> NodeEndpoint:
    return NodeEndpoint({"host": "a"}, lambda: b"id1")


@pytest.mark.parametrize("told", [b"id1", NoPermissionError("no CLUSTER")])
def test_node_that_is_meant_or_may_not_say_who_it_is_is_let_in(endpoint: NodeEndpoint, told: Any) -> None:
    endpoint.check(connection_with_reply(told))


def test_node_of_another_id_is_not_let_in(endpoint: NodeEndpoint) -> None:
    with pytest.raises(UnexpectedNode):
        endpoint.check(connection_with_reply(b"id2"))


@pytest.mark.parametrize("said", ["BUSY Redis is busy running a script", "LOADING Redis is loading the dataset"])
def test_node_that_cannot_say_yet_who_it_is_is_not_let_in(endpoint: NodeEndpoint, said: str) -> None:
    with pytest.raises(StoreNotReady, match=said):
        endpoint.check(connection_with_reply(ResponseError(said)))
