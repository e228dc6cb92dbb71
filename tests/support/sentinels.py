"""A primary with replicas under Sentinel, of real servers."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.server_sets import FailoverSet
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server

MASTER_NAME = "mymaster"

#: How a primary is taken away: SIGKILL, SIGSTOP, or by order while it lives.
How = Literal["kill", "stop", "manual"]

#: A replica is asked to wait 5 s for others before its first copy, otherwise.
REPLICATION = ("--repl-diskless-sync-delay", "0")


class SentinelProcess(Server):
    """One sentinel; it writes what it learns into its own configuration, so a restarted one knows it still."""

    def __init__(self, folder: Path, *, binary: Path | None, watching: Sequence[str]) -> None:
        super().__init__(folder, binary=binary)
        self.watching = watching

    def _command(self) -> list[str | Path]:
        written = self.folder / "sentinel.conf"
        # Not again at a restart, but again when the port was taken.
        if not written.exists() or f"port {self.port}\n" not in written.read_text():
            written.write_text(
                "\n".join([f"port {self.port}", f"bind {HOST}", f"dir {self.folder}", *self.watching, ""])
            )
        return [self.binary, written, "--sentinel"]

    def _state(self) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            return "dead"
        try:
            with self.client() as client:
                return "ready" if client.info("server")["process_id"] == self._process.pid else ""
        except redis.ConnectionError:
            return ""


class SentinelSet(FailoverSet):
    """One primary, its replicas and the sentinels that watch them; use as a context manager.

    Args:
        folder: of these servers only.
        replicas, sentinels: how many.
        down_after_ms: silence after which a sentinel counts a node as down; a failover takes 1.5 s longer.
        password: of the default user on the data nodes (not on the sentinels).
        min_replicas: the primary takes writes only while a replica confirmed within the last second.
        persistent: with an append-only file.
        options: further arguments of each data node.
        binary: another server than the lane's.
    """

    master_name = MASTER_NAME

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 2,
        sentinels: int = 3,
        down_after_ms: int = 1000,
        password: str | None = None,
        min_replicas: bool = False,
        persistent: bool = False,
        options: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.password = password
        self._down_after_ms = down_after_ms
        self._sentinels_wanted = sentinels
        self._binary = binary
        common = [*REPLICATION, *options]
        if password:
            common += ["--requirepass", password, "--masterauth", password]
        if min_replicas:
            common += ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "1"]
        self.nodes = [
            Server(folder / f"node{n}", options=common, password=password, persistent=persistent, binary=binary)
            for n in range(1 + replicas)
        ]
        self.sentinels: list[SentinelProcess] = []

    def _start(self, started: ExitStack) -> None:
        primary, *replicas = self.nodes
        started.enter_context(primary)
        for node in replicas:
            started.enter_context(node)
            # By command and not by option: a promoted one that was killed must not restart as a replica of the first.
            _make_replica(node, primary)
        quorum = self._sentinels_wanted // 2 + 1
        watching = [
            f"sentinel monitor {MASTER_NAME} {HOST} {primary.port} {quorum}",
            f"sentinel down-after-milliseconds {MASTER_NAME} {self._down_after_ms}",
            f"sentinel failover-timeout {MASTER_NAME} 5000",
            f"sentinel parallel-syncs {MASTER_NAME} 1",
            *([f"sentinel auth-pass {MASTER_NAME} {self.password}"] if self.password else []),
        ]
        for n in range(self._sentinels_wanted):
            process = SentinelProcess(self.folder / f"sentinel{n}", binary=self._binary, watching=watching)
            self.sentinels.append(started.enter_context(process))
        self.wait_until_whole()

    def wait_until_whole(self, within: float = 60.0) -> None:
        """Until every node lives in its place, and every sentinel knows all of them and all other sentinels.

        A sentinel that had no processor for 2 s takes part in nothing for the next 30 (TILT).
        """
        eventually(self._whole, within, every=0.05, message="the sentinels and nodes do not know one another")

    def _whole(self) -> bool:
        primary = self._agreed()
        if primary is None or not all(node.answering for node in self.nodes):
            return False
        linked = [_replication(n).get("master_link_status") == "up" for n in self.nodes if n is not primary]
        return all(linked) and all(self._knows_all(sentinel) for sentinel in self.sentinels if sentinel.answering)

    def _knows_all(self, sentinel: Server) -> bool:
        with sentinel.client() as client:
            told = client.sentinel_master(MASTER_NAME)
        others = len(self.sentinels) - 1, len(self.nodes) - 1
        return (told["num-other-sentinels"], told["num-slaves"]) == others

    def url(self, db: int = 0) -> str:
        """In Celery's form; `master_name` goes into the transport's options."""
        return self._url(f":{self.password}@" if self.password else "", db)

    def lock_url(self, db: int = 0) -> str:
        """The same for a user with the rights to keep locks and no others. The sentinels need no user name."""
        return self._url(f"{LOCK_USER}:{LOCK_PASSWORD}@", db)

    def _url(self, user: str, db: int) -> str:
        return ";".join(f"sentinel://{user}{HOST}:{sentinel.port}/{db}" for sentinel in self.sentinels)

    def primary(self, within: float = 30.0) -> Server:
        """The node that all living sentinels name and that says itself that it is the primary."""
        found = eventually(self._agreed, within, message="the sentinels do not agree on a primary")
        assert found is not None  # for mypy: `eventually` returns what is truthy
        return found

    def replicas(self) -> list[Server]:
        primary = self.primary()
        return [node for node in self.nodes if node is not primary and node.answering]

    def fail_over(self, how: How = "kill", *, wait: bool = True) -> Server:
        """Take the primary away, and wait until another one is in its place; returns the one that was taken away."""
        old = self.primary()
        if how == "manual":
            eventually(self._ordered, within=20, every=0.1, message="no sentinel carries the failover out")
        else:
            old.kill() if how == "kill" else old.pause()
            self.away.append(old)
        if wait:
            self.wait_for_promotion(old)
        return old

    def wait_for_promotion(self, old: Server, within: float = 40.0) -> Server:
        """The primary in place of `old`."""
        found = eventually(lambda: self._other_than(old), within, message="no other node was promoted")
        assert found is not None  # for mypy
        return found

    def client(self, **options: Any) -> redis.Redis:
        """A client of the current primary, asked of the sentinels at each connection."""
        settings = {"decode_responses": True, "socket_timeout": 5, "password": self.password} | options
        places = [(HOST, sentinel.port) for sentinel in self.sentinels]
        once = Retry(NoBackoff(), 0)
        sentinel = Sentinel(places, sentinel_kwargs={"socket_timeout": 5, "retry": once})  # type: ignore[no-untyped-call]
        found: redis.Redis = sentinel.master_for(MASTER_NAME, retry=once, **settings)  # type: ignore[no-untyped-call]
        return found

    def flush(self) -> None:
        self.primary().flush()

    def _ordered(self) -> bool:
        with self.sentinels[0].client() as client:
            try:
                return bool(client.execute_command("SENTINEL FAILOVER", MASTER_NAME))
            except redis.ResponseError:  # no good replica yet, or another failover still goes on
                return False

    def _other_than(self, old: Server) -> Server | None:
        agreed = self._agreed()
        return None if agreed is old else agreed

    def _agreed(self) -> Server | None:
        living = [sentinel for sentinel in self.sentinels if sentinel.answering]
        (port, votes) = Counter(map(_named_by, living)).most_common(1)[0]
        named = next((node for node in self.nodes if node.port == port), None)
        if votes < len(living) or named is None or not named.answering:
            return None
        return named if _replication(named).get("role") == "master" else None


def _make_replica(node: Server, primary: Server) -> None:
    with node.client() as client:
        client.replicaof(HOST, primary.port)


def _named_by(sentinel: Server) -> int | None:
    with sentinel.client() as client:
        told = client.sentinel_get_master_addr_by_name(MASTER_NAME)
    return int(told[1]) if told else None


def _replication(node: Server) -> dict[str, Any]:
    try:
        with node.client() as client:
            told: dict[str, Any] = client.info("replication")
    except redis.ConnectionError:
        return {}
    return told
