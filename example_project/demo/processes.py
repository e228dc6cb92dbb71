"""The demo's programs: start them, and end each one by pid, whatever happens."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from typing_extensions import Self

from example_project.demo import tied


class Processes:
    """Running programs, each with its own log in `folder`. The first one is ended last."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            server, *clients = self._running  # the others need the first one to end well
            self.stop(*clients)
            self.stop(server)

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, tied.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,  # Ctrl-C must reach the demo alone, which ends the others
            )

    def alive(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def dead(self) -> list[str]:
        """Return the programs that ended unexpectedly, with their last lines."""
        return [
            f"{name} (exit code {process.returncode}): {self._last_line(name)}"
            for name, process in self._running.items()
            if process.poll() is not None
        ]

    def stop(self, *names: str, patience: float = 4.0) -> None:
        """End programs: all together by SIGTERM, then by SIGKILL."""
        stopping = [self._running.pop(name) for name in names]
        families = [child for process in stopping for child in _children(process.pid)]
        for process in stopping:
            process.terminate()
        deadline = time.monotonic() + patience
        for process in stopping:
            _await_end(process, deadline)
        # Pool children end with their worker on Linux only. psutil knows them by pid and start time.
        _, alive = psutil.wait_procs(families, timeout=1.0)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def pause(self, name: str) -> None:
        """Suspend a program and its children until `resume` or `kill`."""
        os.killpg(self.pid(name), signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.killpg(self.pid(name), signal.SIGCONT)

    def kill(self, name: str) -> list[int]:
        """Kill a program and its children at once, as a power cut does, and return their pids."""
        process = self._running.pop(name)
        pids = [process.pid, *(child.pid for child in _children(process.pid))]
        os.killpg(process.pid, signal.SIGKILL)  # the first process of a session leads its group too
        process.wait()
        return pids

    def _last_line(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no output")


def _await_end(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
