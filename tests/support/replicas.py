"""A primary with replicas without any monitor: the test promotes them by hand."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.sentinels import REPLICATION
from tests.support.server_sets import ServerSet
from tests.support.servers import Server


class ReplicaSet(ServerSet):
    """One primary and its replicas, each a server of its own; use as a context manager.

    Args:
        folder: of these servers only.
        replicas: how many.
        persistent: with an append-only file, fsynced at each write.
        options: further arguments of each.
    """

    def __init__(
        self, folder: Path, *, replicas: int = 1, persistent: bool = False, options: Sequence[str] = ()
    ) -> None:
        common = [*REPLICATION, *options]
        self.nodes = [Server(folder / f"node{n}", persistent=persistent, options=common) for n in range(1 + replicas)]
        self.primary = self.nodes[0]

    def _start(self, started: ExitStack) -> None:
        super()._start(started)
        for node in self.replicas:
            self.follow(node)
        self.wait_until_in_step()

    @property
    def replicas(self) -> list[Server]:
        return [node for node in self.nodes if node is not self.primary]

    def follow(self, node: Server) -> None:
        with node.client() as client:
            client.replicaof(HOST, self.primary.port)

    def cut_off(self, node: Server) -> None:
        """It receives nothing any more, and keeps what it knows."""
        with node.client() as client:
            client.replicaof(HOST, "1")

    def promote(self, node: Server) -> Server:
        """SIGKILL the primary, and let `node` be the primary; returns the old one."""
        old, self.primary = self.primary, node
        old.kill()
        with node.client() as client:
            client.replicaof("NO", "ONE")
        return old

    def wait_until_in_step(self) -> None:
        """Until every replica has confirmed all that the primary knows."""
        for node in self.nodes:
            if not node.answering:
                node.resume()
        with self.primary.client() as client:

            def confirmed() -> bool:
                client.incr("step")
                return bool(client.wait(len(self.replicas), 100) == len(self.replicas))

            eventually(confirmed, within=20, message="the replicas do not follow")
            client.delete("step")
