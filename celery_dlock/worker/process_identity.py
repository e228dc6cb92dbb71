"""What tells a process from every other, past and to come; and whether it is surely gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["HostIdentity", "Process", "home", "process"]


class HostIdentity(NamedTuple):
    """Where a pid means one process and no other.

    Args:
        machine: ``/etc/machine-id``; "" where there is none (containers). Never enough by itself: images are cloned.
        boot: The running kernel's own number, new with each boot.
        pids: The namespace of pids.
        times: The namespace of clocks, in which start times are told; "" before Linux 5.6.
    """

    machine: str
    boot: str
    pids: str
    times: str


class Process(NamedTuple):
    """One process of a :class:`HostIdentity`.

    Args:
        pid: Given to others after its end.
        started: Clock ticks from the boot to its start, which no two processes of one pid share.
    """

    pid: int
    started: int

    def gone(self) -> bool:
        """It surely lives no more. Asked in its own :class:`HostIdentity` only."""
        try:
            os.kill(self.pid, 0)  # asks the kernel, where /proc may hide the processes of other users
        except ProcessLookupError:
            return True
        except OSError:
            pass  # it lives, and is not ours to signal
        found = _stat(self.pid)
        return found is not None and (found.started != self.started or found.dead)


def home() -> HostIdentity | None:
    """Where this process lives; None where the system does not say."""
    spaces = Path("/proc/self/ns")
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            return None  # this is the /proc of another namespace
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pids = str((spaces / "pid").readlink())
        times = str((spaces / "time").readlink()) if (spaces / "time").is_symlink() else ""
    except (OSError, ValueError):
        return None
    return HostIdentity(_machine(), boot, pids, times) if boot else None


def _machine() -> str:
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def process(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none, or the system does not say."""
    found = _stat(pid)
    return None if found is None or found.dead else Process(pid, found.started)


class _Stat(NamedTuple):
    started: int
    dead: bool


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name before the state may hold spaces and parentheses. proc(5) counts from 1, and the state is the third.
    state, *fields = text.rpartition(b")")[2].split()
    threads, started = int(fields[20 - 4]), int(fields[22 - 4])
    # Of a zombie other threads may still run: its first thread ended alone.
    return _Stat(started, dead=state in (b"Z", b"X") and threads <= 1)
