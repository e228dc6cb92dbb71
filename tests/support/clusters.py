"""A Cluster of real servers, formed without any other program."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.cluster import ClusterNode
from redis.crc import key_slot

from tests.support.cluster_nodes import (
    BUS,
    ask,
    cluster_port,
    done,
    has_flag,
    linked,
    myself,
    owner_of,
    serving,
    slots_of,
    view_of,
)
from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.sentinels import REPLICATION, How
from tests.support.server_sets import FailoverSet
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server, cluster_rights
from tests.support.tls import BINARY, TlsNode

SLOTS = 16384


def _each_slot(node: Server, slots: Sequence[int], command: str, rest: Callable[[int], list[Any]]) -> None:
    with node.client() as client, client.pipeline(transaction=False) as pipe:
        for slot in slots:
            pipe.execute_command(command, *rest(slot))
        pipe.execute(raise_on_error=False)  # it may have lost its last slot meanwhile, and be another's replica


class ClusterSet(FailoverSet):
    """Primaries with all slots, and their replicas; use as a context manager.

    Args:
        folder: of this Cluster only.
        primaries, replicas: how many; replica n belongs to primary n.
        node_timeout_ms: silence after which a node counts as down; a failover takes 0.5 s longer.
        password: of the default user on all nodes.
        persistent: with an append-only file.
        options: further arguments of each node.
        binary: another server than the lane's.
        certificates: a folder of :func:`tests.support.tls.make_certificates`, to speak TLS beside;
            then `binary` is that one's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        primaries: int = 3,
        replicas: int = 3,
        node_timeout_ms: int = 1000,
        password: str | None = None,
        persistent: bool = False,
        options: Sequence[str] = (),
        binary: Path | None = None,
        certificates: Path | None = None,
    ) -> None:
        super().__init__()
        arguments = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", *REPLICATION, *options]
        arguments += ["--cluster-node-timeout", str(node_timeout_ms)]
        if password:
            arguments += ["--requirepass", password, "--masterauth", password]
        self.password = password
        kind: Callable[..., Server] = partial(Server, binary=binary)
        if certificates:
            kind, binary = partial(TlsNode, certificates=certificates), BINARY
        rights = cluster_rights(binary)
        self.nodes: list[Server] = [
            kind(
                folder / f"node{n}",
                options=arguments,
                password=password,
                persistent=persistent,
                pick_port=cluster_port,
                rights=rights,
            )
            for n in range(primaries + replicas)
        ]
        self._primaries = primaries
        self._moving: dict[int, tuple[Server, Server]] = {}

    def _start(self, started: ExitStack) -> None:
        super()._start(started)
        self._form()

    def _form(self) -> None:
        primaries, replicas = self.nodes[: self._primaries], self.nodes[self._primaries :]
        for n, node in enumerate(primaries):
            # One by one, because Redis 6.2 knows no ADDSLOTSRANGE.
            ask(node, "CLUSTER ADDSLOTS", *range(SLOTS * n // len(primaries), SLOTS * (n + 1) // len(primaries)))
        for n, node in enumerate(self.nodes):
            ask(node, "CLUSTER SET-CONFIG-EPOCH", n + 1)
        for node in self.nodes[1:]:
            assert node.port is not None
            port = node.tls_port if isinstance(node, TlsNode) else node.port
            ask(self.nodes[0], "CLUSTER MEET", HOST, port, node.port + BUS)
        self._until(lambda: all(len(view_of(node)) == len(self.nodes) for node in self.nodes), "nodes meet")
        for n, node in enumerate(replicas):
            following = self.id_of(primaries[n % len(primaries)])
            self._until(lambda node=node, to=following: done(node, "CLUSTER REPLICATE", to), "replicas follow")
        self.wait_until_whole()

    def wait_until_whole(self, within: float = 30.0) -> None:
        """Until every node lives, serves, has its links up and knows of every replica."""
        self._until(self._whole, "all nodes in their places", within)

    def _whole(self) -> bool:
        if not all(node.answering for node in self.nodes):
            return False
        # One that was just woken believes for a moment that all is as it was.
        pictures = {
            tuple(sorted((port, has_flag(told, "slave")) for port, told in view_of(n).items())) for n in self.nodes
        }
        replicas = len(self.nodes) - self._primaries
        if [sum(replica for _, replica in picture) for picture in pictures] != [replicas]:
            return False
        return all(serving(node) and linked(node) for node in self.nodes)

    def url(self) -> str:
        """In the form of a lock store; Celery itself has no Cluster transport."""
        return self._url(f":{self.password}@" if self.password else "")

    def lock_url(self) -> str:
        """The same for a user who may keep locks and nothing else."""
        return self._url(f"{LOCK_USER}:{LOCK_PASSWORD}@")

    def _url(self, user: str) -> str:
        return f"redis+cluster://{user}{','.join(f'{HOST}:{node.port}' for node in self.nodes)}"

    def client(self, **options: Any) -> redis.RedisCluster:
        """A client of the whole that gives text."""
        places = [
            ClusterNode(HOST, node.port)  # type: ignore[no-untyped-call]
            for node in self.nodes
            if node.answering
        ]
        settings = {"decode_responses": True, "socket_timeout": 5, "password": self.password} | options
        return redis.RedisCluster(startup_nodes=places, **settings)

    def flush(self) -> None:
        for node in self.primaries():
            node.flush()

    def id_of(self, node: Server) -> str:
        return str(ask(node, "CLUSTER MYID"))

    def primaries(self) -> list[Server]:
        """The living nodes that own slots, by their own word."""
        return [node for node in self.nodes if node.answering and slots_of(myself(node))]

    def replicas_of(self, node: Server) -> list[Server]:
        """The living replicas of a node, by their own word."""
        number = self.id_of(node)
        return [other for other in self.nodes if other.answering and myself(other)["master_id"] == number]

    def node_of(self, slot: int, within: float = 20.0) -> Server:
        """The node that owns the slot, once all living ones say so and it serves."""
        found = eventually(lambda: self._agreed(slot), within, message=f"the nodes do not agree on slot {slot}")
        assert found is not None  # for mypy: `eventually` returns what is truthy
        return found

    def slot_of(self, key: str) -> int:
        return int(ask(self.nodes[0] if self.nodes[0].answering else self.primaries()[0], "CLUSTER KEYSLOT", key))

    # -- failovers

    def fail_over(self, slot: int, how: How = "kill", *, wait: bool = True) -> Server:
        """Take the slot's primary away, and wait until another has the slot; returns the one that was taken away."""
        old = self.node_of(slot)
        if how == "manual":
            eventually(lambda: done(self.replicas_of(old)[0], "CLUSTER FAILOVER"), message="no replica takes over")
        else:
            old.kill() if how == "kill" else old.pause()
            self.away.append(old)
        if wait:
            self.wait_for_promotion(slot, old)
        return old

    def wait_for_promotion(self, slot: int, old: Server, within: float = 30.0) -> Server:
        """The owner of the slot in place of `old`."""

        def promoted() -> Server | None:
            agreed = self._agreed(slot)
            return None if agreed is old else agreed

        found = eventually(promoted, within, message="no replica was promoted")
        assert found is not None  # for mypy
        return found

    # -- resharding

    def move_slot(self, slot: int, to: Server) -> None:
        """Move the slot with all its keys."""
        self.begin_move(slot, to)
        self.move_keys(slot)
        self.end_move(slot)

    def begin_move(self, slot: int, to: Server) -> None:
        """From now on the old owner answers ASK for keys it has not, and the new one only who was sent so."""
        source = self.node_of(slot)
        ask(to, "CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(source))
        ask(source, "CLUSTER SETSLOT", slot, "MIGRATING", self.id_of(to))
        self._moving[slot] = source, to

    def move_keys(self, slot: int, most: int = 10_000) -> int:
        """Move so many of the keys. A script that uses a moved and an unmoved key is answered TRYAGAIN."""
        source, to = self._moving[slot]
        keys = ask(source, "CLUSTER GETKEYSINSLOT", slot, most)
        if keys:
            secret = ["AUTH", self.password] if self.password else []
            ask(source, "MIGRATE", HOST, to.port, "", 0, 5000, *secret, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int) -> None:
        """The slot is the new owner's, and all nodes know."""
        source, to = self._moving.pop(slot)
        for node in (to, source, *(n for n in self.primaries() if n not in (to, source))):
            ask(node, "CLUSTER SETSLOT", slot, "NODE", self.id_of(to))
        eventually(lambda: self._agreed(slot) is to, within=20, message=f"slot {slot} did not move")

    def leave(self, node: Server) -> None:
        """Move a primary's slots to another one, and let it start a Cluster of its own with its old id."""
        to = next(other for other in self.primaries() if other is not node)
        slots = [slot for some in slots_of(myself(node)) for slot in some]
        with node.client() as client:
            for slot in {key_slot(key.encode()) for key in client.keys("*")}:
                self.move_slot(slot, to)
        left, mover, number = self.id_of(node), self.id_of(to), self.nodes.index(node)
        for other in (to, node, *(n for n in self.primaries() if n not in (to, node))):
            _each_slot(other, slots, "CLUSTER SETSLOT", lambda slot: [slot, "NODE", mover])
        del self.nodes[number]
        for other in self.nodes:
            ask(other, "CLUSTER FORGET", left)
        ask(node, "CLUSTER RESET", "SOFT")
        ask(node, "CLUSTER ADDSLOTS", *range(SLOTS))
        self._until(lambda: serving(node), "the one that left serves")
        assert self.id_of(node) == left

    def _agreed(self, slot: int) -> Server | None:
        living = [node for node in self.nodes if node.answering]
        named = {owner_of(view_of(node), slot) for node in living}
        if len(named) > 1:
            return None
        owner = next((node for node in living if {node.port} == named), None)
        return owner if owner and serving(owner) and has_flag(myself(owner), "master") else None

    def _until(self, condition: Any, what: str, within: float = 30.0) -> None:
        eventually(condition, within, every=0.05, message=f"the cluster: {what}")
