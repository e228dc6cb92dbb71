"""A client of several independent servers that keep the same."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import redis
from typing_extensions import Self

from tests.support.polling import eventually


class ManyClients:
    """Says everything to all, and gives the first one's answer."""

    def __init__(self, clients: Sequence[redis.Redis]) -> None:
        self._clients = clients
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for client in self._clients:
            self._stack.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def exists(self, *names: str) -> int:
        """Return the count on the server that has most of them: each server expires keys by its own clock."""
        return max(int(client.exists(*names)) for client in self._clients)

    def __getattr__(self, name: str) -> Any:
        def call_each(*args: Any, **options: Any) -> Any:
            first, *_ = [getattr(client, name)(*args, **options) for client in self._clients]
            return first

        return call_each


class Settled:
    """A store on independent servers whose calls end only when every server has answered, which no caller waits for.

    Then a test may look at each server, or change it, without racing those that came last.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)

        def call_and_settle(*args: Any, **options: Any) -> Any:
            try:
                return verb(*args, **options)
            finally:
                eventually(lambda: not self._store._servers.busy, every=0.001)

        return call_and_settle
