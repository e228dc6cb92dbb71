"""The workers of a run: started without waiting for them, and started again when they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from chaos.history import History
from tests.support.processes import kill_session, living_children, spawn

APP = "tests.support.apps.chaos"
#: Pool and concurrency of each worker.
POOLS = (("prefork", 2), ("prefork", 2), ("threads", 2), ("gevent", 3))
#: Seconds that a worker has after SIGTERM; then it is killed and recorded as stuck.
PATIENCE = 25.0


class Member:
    """One place in the fleet; its process changes."""

    def __init__(self, place: int, pool: str, concurrency: int, folder: Path, environ: Mapping[str, str]) -> None:
        self.place, self.pool, self.concurrency = place, pool, concurrency
        self._folder, self._environ = folder, {**environ, "DLOCK_CHAOS_POOL": pool}
        self.generation = 0
        self.logs: list[Path] = []
        self.ending_since: float | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.generation += 1
        self.ending_since = None
        # The name stays: a worker that starts where one died frees what that one held.
        node, self.log = f"w{self.place}@chaos", f"w{self.place}-{self.generation}"
        options = ["--without-mingle", "--without-gossip", "--loglevel", "INFO", "--hostname", node]
        command = [sys.executable, "-m", "celery", "-A", APP, "worker", "-P", self.pool, "-c", str(self.concurrency)]
        self.log_file = self._folder / f"{self.log}.log"
        self.logs.append(self.log_file)
        return spawn([*command, *options], self.log_file, environ={**self._environ, "DLOCK_CHAOS_LOG": self.log})

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def ready(self) -> bool:
        return self.running and " ready." in self.log_file.read_text(errors="replace")

    def restart(self) -> None:
        kill_session(self.process)
        self.process = self._start()

    def stop(self) -> None:
        kill_session(self.process)

    def send(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def living(self) -> list[int]:
        """Pids of the pool's children."""
        return living_children(self.pid)

    def everybody(self) -> list[int]:
        return [self.pid, *self.living()]


class Fleet:
    """All workers; `look` records the processes that ended and starts them again."""

    def __init__(
        self, folder: Path, environ: Mapping[str, str], history: History, pools: list[tuple[str, int]]
    ) -> None:
        self._history = history
        self._alive: dict[int, int] = {}
        self.members = [Member(place, *pool, folder, environ) for place, pool in enumerate(pools)]
        self.ended = 0
        self.stuck = 0

    def look(self) -> None:
        """Called all the time."""
        now = time.monotonic_ns()
        seen = {}
        for member in self.members:
            if member.running:
                seen.update(dict.fromkeys(member.everybody(), now))
        for pid in self._alive.keys() - seen.keys():
            # It may have died any time since it was last seen.
            self._history.note("gone", pid=pid, seen=self._alive[pid])
        self._alive = seen
        for member in self.members:
            if member.ending_since is not None and member.running and time.monotonic() - member.ending_since > PATIENCE:
                self.stuck += 1
                facts = {"kind": "kill main", "target": "worker", "main": member.pid, "log": member.log}
                self._history.note("fault", **facts, number=-member.pid, pids=member.everybody(), deadly=True)
                member.send([member.pid], signal.SIGKILL)
                member.process.wait(10)
            if not member.running:
                self.ended += 1
                member.restart()

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def logs(self) -> list[Path]:
        return [log for member in self.members for log in member.logs]
