"""The endpoint of one server of a Redlock. It refuses a server that another name of the same Redlock leads to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from redis.connection import Connection

from ...errors import StoreRefused
from ..redis.endpoint import ServerEndpoint, ask

__all__ = ["MemberEndpoint", "SameServer"]

#: A server has a new run id after each start.
_RUN_ID: Final = re.compile(rb"run_id:(\w+)")


class SameServer(StoreRefused):
    """The server has another name in the same Redlock. It must not vote twice."""


class MemberEndpoint(ServerEndpoint):
    """The endpoint of one server. It checks the run id of the server behind each new connection.

    A name may lead to another server later, because of DNS, a load balancer or a reused address. So every new
    connection is checked, and not only the first.

    Args:
        options: Connection options, for redis-py.
        name: Name of the server, as logs and errors show it.
        names: Name of each server by its ``run_id``, shared by all members of one Redlock. Several threads open
            connections at the same time; each step on the dict is atomic.
    """

    def __init__(self, options: Mapping[str, Any], name: str, names: dict[str, str]) -> None:
        super().__init__(options)
        self._name = name
        self._names = names
        self._run_id = ""
        #: How often the name has led to another server. Connections to an earlier server are not used any more.
        self._changes = 0

    def address(self) -> object:
        return self._changes

    def check(self, connection: Connection) -> None:
        found = _RUN_ID.search(ask(connection, "INFO", "server"))
        if not found:
            return  # the permission for INFO may be missing: then only the address identifies the server
        run_id = found[1].decode()
        if self._run_id not in ("", run_id):
            self._forget_server()
        other = self._names.setdefault(run_id, self._name)
        if other != self._name:
            first, second = sorted((other, self._name))
            same = f"{first} and {second} are the same server"
            raise SameServer(f"the lock store refused: {same}, and each must be a separate one")
        self._run_id = run_id

    def _forget_server(self) -> None:
        """Free the run id of the server that the name led to before: another name may lead there now."""
        self._changes += 1
        run_id, self._run_id = self._run_id, ""
        if self._names.get(run_id) == self._name:
            self._names.pop(run_id, None)
