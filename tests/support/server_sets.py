"""Shared parts of the topologies with several servers: how they start, end and return."""

from abc import ABC, abstractmethod
from contextlib import ExitStack

from typing_extensions import Self

from tests.support.servers import Server


class ServerSet(ABC):
    """Servers that start and end together; use as a context manager."""

    nodes: list[Server]

    def __enter__(self) -> Self:
        with ExitStack() as started:
            self._start(started)
            self._stack = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, started: ExitStack) -> None:
        """Start all servers; what is started so far ends if a step fails."""
        for node in self.nodes:
            started.enter_context(node)


class FailoverSet(ServerSet):
    """Servers with primaries that a test takes away and brings back."""

    def __init__(self) -> None:
        #: Primaries that were taken away and have not returned, the first one first.
        self.away: list[Server] = []

    def bring_back(self, *, wait: bool = True) -> None:
        """Start the killed and wake the stopped primaries; `wait` until they are replicas."""
        while self.away:
            node = self.away.pop(0)
            node.resume() if node.running else node.start()
        if wait:
            self.wait_until_whole()

    @abstractmethod
    def wait_until_whole(self, within: float = 60.0) -> None:
        """Wait until every primary has its replicas."""
