"""Connections that a Redlock may use, by the server that answers there."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from celery_dlock.errors import StoreNotReady
from celery_dlock.store.redlock.endpoint import MemberEndpoint, SameServer
from tests.unit.store.replies import connection_with_reply


def server(run_id: str) -> Any:
    return connection_with_reply(f"# Server\r\nrun_id:{run_id}\r\ntcp_port:1\r\n".encode())


@pytest.fixture
def doors() -> list[MemberEndpoint]:
    names: dict[str, str] = {}
    return [MemberEndpoint({"host": name}, name, names) for name in "abc"]


def test_server_of_another_name_is_refused_with_both_names(doors: list[MemberEndpoint]) -> None:
    a, b, _ = doors
    a.check(server("1"))
    for _ in range(2):
        with pytest.raises(SameServer, match="a and b are the same server"):
            b.check(server("1"))
    a.check(server("1"))


def test_connections_to_an_earlier_server_are_not_used_any_more(doors: list[MemberEndpoint]) -> None:
    a, b, c = doors
    for number, door in enumerate(doors):
        door.check(server(str(number)))
    before = c.address()
    c.check(server("2"))
    assert c.address() == before
    with pytest.raises(SameServer):
        c.check(server("0"))
    assert c.address() != before
    b.check(server("2"))  # which now belongs to no name
    with pytest.raises(SameServer, match="b and c"):
        c.check(server("2"))
    assert a.address() == before


def test_server_that_restarted_leaves_its_earlier_run_behind(doors: list[MemberEndpoint]) -> None:
    a, b, _ = doors
    a.check(server("1"))
    a.check(server("2"))
    b.check(server("1"))
    with pytest.raises(SameServer):
        b.check(server("2"))


@pytest.mark.parametrize("told", [NoPermissionError("no INFO"), b"# Server\r\n", "no text of a server"])
def test_server_that_does_not_say_who_it_is_is_let_in(doors: list[MemberEndpoint], told: Any) -> None:
    for door in doors:
        door.check(connection_with_reply(told))


@pytest.mark.parametrize("said", ["BUSY Redis is busy running a script", "LOADING Redis is loading the dataset"])
def test_server_that_cannot_say_yet_who_it_is_is_not_let_in(doors: list[MemberEndpoint], said: str) -> None:
    a, b, _ = doors
    a.check(server("1"))
    with pytest.raises(StoreNotReady, match=said):
        b.check(connection_with_reply(ResponseError(said)))
