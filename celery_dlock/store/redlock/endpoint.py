"""How a connection to one server of a Redlock is made: only to a server that no other of its names leads to."""

from __future__ import annotations

import re
from typing import Any, Final

from redis.connection import Connection
from redis.exceptions import ResponseError

from ...errors import StoreNotReady, StoreRefused
from ..redis.endpoint import Endpoint
from ..redis.server_errors import error_from_reply

__all__ = ["MemberDoor", "SameServer"]

#: A server has another one after each start.
_RUN_ID: Final = re.compile(rb"run_id:(\w+)")


class SameServer(StoreRefused):
    """The server is known under another name of the same Redlock: it must not vote twice."""


class MemberDoor:
    """A door that asks each server which one it is.

    A name may lead to another server later: by DNS, a load balancer, an address that is given again. So every new
    connection is checked, and not only the first.

    Args:
        door: To the address.
        name: Of the server, as it is shown to people.
        names: By the ``run_id`` of each server the name that has it; shared by all members of one Redlock. Its single
            steps are atomic, as several threads make connections at once.
    """

    def __init__(self, door: Endpoint, name: str, names: dict[str, str]) -> None:
        self._door = door
        self._name = name
        self._names = names
        self._server = ""
        #: How often the name led to another server; connections to an earlier one are not used any more.
        self._moves = 0

    def address(self) -> object:
        return self._moves, self._door.address()

    def failover_epoch(self) -> int:
        return self._door.failover_epoch()

    def invalidate(self) -> None:
        self._door.invalidate()

    def connection(self, seconds: float) -> Connection:
        return self._door.connection(seconds)

    def check(self, connection: Connection) -> None:
        self._door.check(connection)
        connection.send_command("INFO", "server")  # type: ignore[no-untyped-call]  # redis-py has no types here
        try:
            told: Any = connection.read_response()
        except ResponseError as error:
            if isinstance(later := error_from_reply(str(error)), StoreNotReady):
                raise later from error  # it can tell once its script or its loading is over
            return  # the right for it may be missing: then its address is all that is known of it
        found = _RUN_ID.search(told.encode() if isinstance(told, str) else told)
        if not found:
            return
        server = found[1].decode()
        if self._server not in ("", server):
            self._leave()
        other = self._names.setdefault(server, self._name)
        if other != self._name:
            first, second = sorted((other, self._name))
            same = f"{first} and {second} are the same server"
            raise SameServer(f"the lock store refused: {same}, and each has to be one of its own")
        self._server = server

    def _leave(self) -> None:
        """Give up the server to which the name led before: another name may lead there now."""
        self._moves += 1
        server, self._server = self._server, ""
        if self._names.get(server) == self._name:
            self._names.pop(server, None)
