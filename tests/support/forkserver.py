"""Workers without the half second of CPU that importing Celery takes: forks of one process that has done it.

A fork goes on as ``python -m celery`` does, with its own command line, environment, session and log. It ends as an
interpreter ends; only its imports came earlier. Pools that patch before they import (gevent, eventlet) cannot be
started so. Neither can a process that needs another network, or variables that Python or the loader reads first.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, spawn, tail

IMPORTED = [
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "celery_dlock.worker",
    "kombu.transport.redis",
]
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


class Child:
    """A fork of the fork server, as `subprocess.Popen` would show it."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._fork_server.ask(status=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0)
            time.sleep(0.01)
        return status

    def send_signal(self, sig: int) -> None:
        # A pid is not reused before its status was asked for.
        if self.poll() is None:
            os.kill(self.pid, sig)


class ForkServer:
    """The process that has imported Celery; it ends with this one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "fork_server.log"
        ours, its = socket.socketpair()
        environ = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "tests.support.forkserver", str(its.fileno())]
        with its:
            self._process = spawn(command, self._log, environ=environ, descriptors=[its.fileno()])
        self._lines = ours.makefile("rw")
        ours.close()

    def fork(self, arguments: Sequence[str], log: Path, environ: Mapping[str, str]) -> Child:
        """A process that goes on as ``python -m celery`` with these arguments and nothing else in its environment."""
        return Child(self, self.ask(arguments=arguments, log=str(log), environ=dict(environ)))

    def ask(self, **request: Any) -> Any:
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        assert answer, f"the fork server is dead:\n{tail(self._log)}"
        return json.loads(answer)

    def close(self) -> None:
        self._lines.close()
        self._process.wait(10)
        self._folder.cleanup()


@functools.cache
def fork_server() -> ForkServer:
    """That of this process, started when it is first asked for."""
    started = ForkServer()
    atexit.register(started.close)
    return started


def serve(asker: socket.socket) -> list[str]:
    """Fork whenever it is asked for; in each fork, return the arguments that Celery gets."""
    with asker, asker.makefile("rw") as lines:
        for line in lines:
            request = json.loads(line)
            if pid := request.get("status"):
                ended, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
            else:
                # Who asked may look for its session or its log at once.
                done, doing = os.pipe()
                answer = os.fork()
                if not answer:
                    settle(request["log"], request["environ"])
                    os.close(done)
                    os.close(doing)
                    return list(request["arguments"])
                os.close(doing)
                os.read(done, 1)
                os.close(done)
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    sys.exit()


def settle(log: str, environ: Mapping[str, str]) -> None:
    """Be as `tests.support.processes.spawn` would have started this process."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environ)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    sys.argv[1:] = serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("celery", run_name="__main__", alter_sys=True)
