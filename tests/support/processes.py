"""Starting processes that cannot outlive the test run."""

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from tests.support.polling import eventually


class Process(Protocol):
    """A process that the tests started; `subprocess.Popen` is one."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


def spawn(
    command: Sequence[str | Path],
    log: Path,
    *,
    environ: Mapping[str, str] | None = None,
    user: str | None = None,
    death_signal: str = "KILL",
    descriptors: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, at the repository's root, writing to `log`.

    The kernel sends it `death_signal` when the thread that called this ends: call it from the main thread. It inherits
    the `descriptors` and no others.
    """
    # setpriv execs, so the pid is the command's own; a preexec_fn would be unsafe beside threads.
    setpriv = shutil.which("setpriv")
    guard = [setpriv, "--pdeathsig", death_signal] if setpriv else []
    with log.open("ab") as output:
        return subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
            pass_fds=descriptors,
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )


def free_port() -> int:
    """Return a port without a listener at this moment. The caller must still be ready to lose the race."""
    # Not port 0: the kernel would choose an ephemeral port. An outgoing connection may take it while a server is
    # down, or a client that reconnects may connect to itself.
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port


def living_children(pid: int, *, recursive: bool = False) -> list[int]:
    """Pids of its children (and theirs) that have not ended, in no order; none if it has ended itself."""
    try:
        found = psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []
    living = []
    for child in found:
        with suppress(psutil.NoSuchProcess):  # any of them may end at any moment
            if child.status() != psutil.STATUS_ZOMBIE:
                living.append(child.pid)
    return living


def session_of(leader: int) -> list[psutil.Process]:
    """Every living process of the session that `leader` opened, also where `leader` itself is dead."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def kill_session(process: Process) -> None:
    """Kill `process`, its children and the orphans it left, and wait until none lives."""

    def none_left() -> bool:
        living = session_of(process.pid)
        for member in living:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        return not living

    eventually(none_left, within=10, message=f"processes of session {process.pid} still live")
    process.wait(10)


def tail(path: Path, lines: int = 40) -> str:
    if not path.exists():
        return f"(no {path})"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
