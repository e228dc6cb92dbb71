"""A PostgreSQL server of the distribution's package, and sessions on it that look like those of sqlite3."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.support.polling import eventually
from tests.support.processes import HOST, free_port, kill_session, living_children, spawn, tail

PLACE = Path("/usr/lib/postgresql")
USER = "postgres"
COUNT = re.compile(r"(?:INSERT 0|UPDATE|DELETE) (\d+)")
DONE = "-- done --"


class PostgreSQL:
    """A server on one port, which it keeps over kill and restart, with its data.

    Args:
        folder: A folder of the server's user.
        further: Further options.
    """

    def __init__(self, folder: Path, further: tuple[str, ...] = ()) -> None:
        self.port, self._folder, self._further = free_port(), folder, further
        self._binaries = max(PLACE.glob("*/bin"), key=lambda path: int(path.parent.name))
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the administrator."""
        return f"postgresql://{USER}@{HOST}:{self.port}/postgres"

    def install(self) -> None:
        command = ["initdb", "-D", "data", "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(
            [self._binaries / command[0], *command[1:]],
            user=USER, group=USER, extra_groups=[], cwd=self._folder, check=True, capture_output=True,
        )  # fmt: skip

    def start(self) -> None:
        log = self._folder / "log"
        # The files survive a killed server, so tests need no flush to the disk.
        options = ["-c", f"listen_addresses={HOST}", "-c", "fsync=off", "-p", str(self.port), "-k", str(self._folder)]
        command: list[str | Path] = [self._binaries / "postgres", "-D", self._folder / "data", *options, *self._further]
        # INT: a fast end, which takes the server's own processes along.
        self._server = server = spawn(command, log, user=USER, death_signal="INT")
        eventually(lambda: _answers(self.url) or server.poll() is not None, within=60, message=f"PostgreSQL, see {log}")
        assert server.poll() is None, f"PostgreSQL does not start:\n{tail(log)}"

    def stop(self) -> None:
        """End it orderly (SIGINT): it ends its sessions first."""
        assert self._server is not None, "the server is not running"
        self._server.send_signal(signal.SIGINT)
        self._server.wait(30)
        self._server = None

    def kill(self) -> None:
        if self._server is not None:
            self._signal(signal.SIGKILL)
            kill_session(self._server)
            self._server = None

    def pause(self) -> None:
        """SIGSTOP to all of its processes: the kernel accepts connections, nothing is answered."""
        self._signal(signal.SIGSTOP)
        # The signal may be a moment on its way.
        eventually(lambda: not self.answering, message="the server does not stop")

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def answering(self) -> bool:
        """It runs and is not paused."""
        return self._server is not None and psutil.Process(self._server.pid).status() != psutil.STATUS_STOPPED

    def _signal(self, number: signal.Signals) -> None:
        assert self._server is not None, "the server is not running"
        # Each of its processes has a session of its own. The first one comes first, so that it starts no others.
        for pid in (self._server.pid, *living_children(self._server.pid, recursive=True)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@contextmanager
def own_postgresql(*further: str) -> Iterator[PostgreSQL]:
    """Return a context with a fresh server with further options, which is gone afterwards."""
    # Not pytest's folder: that is closed to other users, and the server refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    shutil.chown(folder, USER, USER)
    made = PostgreSQL(folder, further)
    try:
        made.install()
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder)


@contextmanager
def running_postgresql(*further: str) -> Iterator[str]:
    """The URL of a fresh server with further options, which is gone afterwards."""
    with own_postgresql(*further) as server:
        yield server.url


@contextmanager
def running_pgbouncer(server: str) -> Iterator[str]:
    """The URL of a connection pooler in front of a server, in transaction mode, which is gone afterwards."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
    shutil.chown(folder, USER, USER)
    (folder / "users").write_text("".join(f'"{user}" ""\n' for user in (USER, "dlock")))
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={HOST} port={urlsplit(server).port}\n"
        f"[pgbouncer]\nlisten_addr={HOST}\nlisten_port={port}\n"
        f"unix_socket_dir=\nauth_type=trust\nauth_file={folder}/users\npool_mode=transaction\ndefault_pool_size=20\n"
    )
    pooler = spawn(["pgbouncer", folder / "pgbouncer.ini"], folder / "log", user=USER, death_signal="INT")
    url = server.replace(f":{urlsplit(server).port}/", f":{port}/")
    try:
        eventually(lambda: _answers(url) or pooler.poll() is not None, within=30, message="pgbouncer")
        assert pooler.poll() is None, f"pgbouncer does not start:\n{tail(folder / 'log')}"
        yield url
    finally:
        kill_session(pooler)
        shutil.rmtree(folder)


class ReplicaPair:
    """A primary and its synchronous replica, which a test can promote.

    Args:
        folder: The folder of both, which belongs to the servers' user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ports = free_port(), free_port()
        self._binaries = max(PLACE.glob("*/bin"), key=lambda path: int(path.parent.name))
        self._servers: list[subprocess.Popen[bytes]] = []

    def url(self, query: str) -> str:
        hosts = ",".join(f"{HOST}:{port}" for port in self.ports)
        return f"postgresql://{USER}@{hosts}/postgres?target_session_attrs=read-write&{query}"

    def start(self) -> None:
        self._run("initdb", "-D", "0", "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        self._serve(0)
        self._run("pg_basebackup", "-D", "1", "-U", USER, "-h", HOST, "-p", str(self.ports[0]), "-R", "-X", "stream")
        self._serve(1)
        primary = f"postgresql://{USER}@{HOST}:{self.ports[0]}/postgres"
        for statement in ("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"):
            subprocess.run(["psql", "-X", primary, "-c", statement], check=True, capture_output=True)
        query = "SELECT 'found' FROM pg_stat_replication WHERE sync_state = 'sync'"

        def synchronous() -> bool:
            seen = subprocess.run(["psql", "-X", primary, "-c", query], check=True, capture_output=True)
            return b"found" in seen.stdout

        eventually(synchronous, within=30, message="the replica does not follow")

    def fail_over(self) -> None:
        """Kill the primary, and promote the replica."""
        kill_session(self._servers[0])
        self._run("pg_ctl", "-D", "1", "-w", "promote")

    def stop(self) -> None:
        for server in self._servers:
            kill_session(server)

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [self._binaries / program, *words],
            user=USER, group=USER, extra_groups=[], cwd=self._folder, check=True, capture_output=True,
        )  # fmt: skip

    def _serve(self, number: int) -> None:
        port, log = self.ports[number], self._folder / f"log{number}"
        options = ["-c", f"listen_addresses={HOST}", "-c", "fsync=off", "-p", str(port), "-k", str(self._folder)]
        command: list[str | Path] = [self._binaries / "postgres", "-D", self._folder / str(number), *options]
        server = spawn(command, log, user=USER, death_signal="INT")
        self._servers.append(server)
        url = f"postgresql://{USER}@{HOST}:{port}/postgres"
        eventually(lambda: _answers(url) or server.poll() is not None, within=30, message=f"PostgreSQL, see {log}")
        assert server.poll() is None, f"PostgreSQL does not start:\n{tail(log)}"


@contextmanager
def running_replica_pair() -> Iterator[ReplicaPair]:
    """A primary and its synchronous replica, which are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    shutil.chown(folder, USER, USER)
    pair = ReplicaPair(folder)
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()
        shutil.rmtree(folder)


def _answers(url: str) -> bool:
    return subprocess.run(["psql", "-X", url, "-c", "SELECT 1"], capture_output=True, check=False).returncode == 0


class Session:
    """One connection, in transactions, by the client of the package, not by the driver of the store."""

    def __init__(self, url: str) -> None:
        command = ["psql", "-X", "-A", "-t", "-v", "AUTOCOMMIT=off", url]
        self._psql = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def execute(self, statement: str, values: Mapping[str, object] | None = None) -> "Answer":
        """Run one statement; its parameters are written `:name`.

        Raises:
            RuntimeError: What the server said against it.
        """
        given = [f"\\set {name} '{value}'" for name, value in (values or {}).items()]
        text = re.sub(r":(\w+)", r":'\1'", statement) if values else statement
        return Answer(self._say("\n".join([*given, f"{text.strip()};"])))

    def commit(self) -> None:
        self._say("COMMIT;")

    def rollback(self) -> None:
        self._say("ROLLBACK;")

    def close(self) -> None:
        self._psql.communicate("\\q\n", timeout=10)

    def _say(self, text: str) -> list[str]:
        assert self._psql.stdin is not None
        assert self._psql.stdout is not None
        self._psql.stdin.write(f"{text}\n\\echo {DONE}\n")
        self._psql.stdin.flush()
        lines = [line.rstrip("\n") for line in iter(self._psql.stdout.readline, f"{DONE}\n")]
        if any(line.startswith("ERROR") for line in lines):
            raise RuntimeError("\n".join(lines))
        return lines


class Answer:
    """The result of a statement, as a cursor shows it."""

    def __init__(self, lines: list[str]) -> None:
        counts = [int(found[1]) for line in lines if (found := COUNT.fullmatch(line))]
        self.rowcount = counts[0] if counts else len(lines)
        self._rows = [] if counts else lines

    def fetchone(self) -> tuple[Any, ...] | None:
        if not self._rows:
            return None
        return tuple(int(text) if re.fullmatch(r"-?\d+", text) else text for text in self._rows[0].split("|"))
