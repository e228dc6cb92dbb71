"""The servers of every topology that locks may be kept on: the entry to all of them, and the independent ones."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.clusters import ClusterSet
from tests.support.sentinels import MASTER_NAME, How, SentinelSet
from tests.support.server_sets import ServerSet
from tests.support.servers import Server
from tests.support.tls import TlsServer

__all__ = ["MASTER_NAME", "ClusterSet", "How", "RedlockSet", "SentinelSet", "TlsServer"]


class RedlockSet(ServerSet):
    """Servers that know nothing of one another; use as a context manager.

    Args:
        folder: of these servers only.
        nodes: how many.
        persistent: with an append-only file, so that one that is killed restarts with its data.
        password: of the default user on all nodes.
        options: further arguments of each.
        binary: another server than the lane's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        persistent: bool = False,
        password: str | None = None,
        options: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        if password:
            options = [*options, "--requirepass", password]
        self.nodes = [
            Server(folder / f"node{n}", persistent=persistent, password=password, options=options, binary=binary)
            for n in range(nodes)
        ]

    def node(self, number: int) -> Server:
        """The server itself: kill, start, pause, resume it."""
        return self.nodes[number]

    def urls(self, db: int = 0) -> list[str]:
        return [node.url(db) for node in self.nodes]

    def lock_urls(self, db: int = 0) -> list[str]:
        """The same for a user who may keep locks and nothing else."""
        return [node.lock_url(db) for node in self.nodes]

    def flush(self) -> None:
        for node in self.nodes:
            if node.answering:
                node.flush()

    def whole(self) -> bool:
        return all(node.answering for node in self.nodes)
