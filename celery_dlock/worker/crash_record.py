"""The record that a worker keeps in the store: its leases, and the processes that hold them.

A worker that starts under the same name reads the record of a dead one, and releases those leases at once. So the
record also identifies each process among all others, past and to come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..keys.key_spec import LockName
from ..locking.lease_table import LeaseRecord
from ..messaging.wire import WIRE_VERSION, NewerWireVersion, reject_newer
from ..utils.clock import boot_and_times

__all__ = ["HeldLease", "HostIdentity", "ProcessIdentity", "WorkerRecord", "current_host", "identify_process"]

#: The largest pid that the kernel allows.
MAX_PID: Final = 2**22


class HostIdentity(NamedTuple):
    """A system in which a pid means one process and no other.

    Args:
        machine: ``/etc/machine-id``; "" if there is none (containers). Not enough by itself: images are cloned.
        boot: The id of the kernel's current boot.
        pids: The namespace of pids.
        times: The namespace of clocks, to which start times refer; "" before Linux 5.6.
    """

    machine: str
    boot: str
    pids: str
    times: str


class ProcessIdentity(NamedTuple):
    """One process of a :class:`HostIdentity`.

    Args:
        pid: The system reuses it after the process has ended.
        started: Clock ticks from the boot to the start of the process. No two processes of one pid share it.
    """

    pid: int
    started: int

    def is_dead(self) -> bool:
        """Return whether the process has surely ended. Ask only in the process's own :class:`HostIdentity`."""
        try:
            os.kill(self.pid, 0)  # asks the kernel, because /proc may hide the processes of other users
        except ProcessLookupError:
            return True
        except OSError:
            pass  # the process lives, and this user may not signal it
        found = _stat(self.pid)
        return found is not None and (found.started != self.started or found.dead)


def current_host() -> HostIdentity | None:
    """Return the identity of the system that this process runs in; None if the system does not tell it."""
    try:
        if str(Path("/proc/self").readlink()) != str(os.getpid()):
            return None  # this is the /proc of another namespace
        boot, times = boot_and_times()
        pids = str(Path("/proc/self/ns/pid").readlink())
    except (OSError, ValueError):
        return None
    return HostIdentity(_machine_id(), boot, pids, times) if boot else None


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the process that has this pid now; None if there is none, or if the system does not tell."""
    found = _stat(pid)
    return None if found is None or found.dead else ProcessIdentity(pid, found.started)


class _Stat(NamedTuple):
    started: int
    dead: bool


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name before the state may hold spaces and parentheses. proc(5) counts fields from 1, and the state is third.
    state, *fields = text.rpartition(b")")[2].split()
    threads, started = int(fields[20 - 4]), int(fields[22 - 4])
    # A zombie with several threads still runs: only its first thread has ended.
    return _Stat(started, dead=state in (b"Z", b"X") and threads <= 1)


class HeldLease(NamedTuple):
    """One acquisition, and the process that holds it.

    Args:
        name: The lock name.
        acquisition: Owner and number.
        ttl: Seconds.
        holder: The worker's main process, or one of its pool children.
    """

    name: LockName
    acquisition: str
    ttl: float
    holder: ProcessIdentity


class WorkerRecord(NamedTuple):
    """The leases of one worker.

    Args:
        host: The system that its processes run in.
        main: Its main process.
        leases: The leases of the main process and of the pool children.
        number: 0 for the store of the worker's app. The records for other apps, whose leases may be in the same store,
            have other numbers. It is no part of the text.
    """

    host: HostIdentity
    main: ProcessIdentity
    leases: tuple[HeldLease, ...] = ()
    number: int = 0

    @classmethod
    def of_this_process(cls) -> WorkerRecord | None:
        """Return an empty record; None if the system does not identify processes. Then leases end with their ttl."""
        host, main = current_host(), identify_process(os.getpid())
        return None if host is None or main is None else cls(host, main)

    @property
    def worker_id(self) -> str:
        """The id of this worker's record. Another worker of the same node name has other ids."""
        process = f"{self.host.boot}/{self.host.pids}/{self.main.pid}/{self.main.started}"
        return f"{process}/{self.number}" if self.number else process

    def with_leases(self, records: Sequence[LeaseRecord]) -> WorkerRecord:
        """Return the worker's record with the leases of these records.

        Leases of processes that have ended are left out: the worker's own watchdog releases those.
        """
        found = {
            pid: self.main if pid == self.main.pid else identify_process(pid) for pid in {each.pid for each in records}
        }
        held = ((each, found[each.pid]) for each in records)
        return self._replace(
            leases=tuple(
                HeldLease(each.name, each.acquisition, each.ttl, holder) for each, holder in held if holder is not None
            )
        )

    def is_dead(self) -> bool:
        """Return whether all processes of the worker have surely ended. Ask only on the worker's own host."""
        return self.main.is_dead() and all(lease.holder.is_dead() for lease in self.leases)

    @property
    def text(self) -> str:
        """The record as JSON. It shows lock names, which Redis keys show too, and no arguments of tasks."""
        leases = [_fields_of(lease) for lease in self.leases]
        return json.dumps([self.host, self.main, leases, WIRE_VERSION], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> WorkerRecord | None:
        """Read a record from its text; None if the text is malformed.

        Raises:
            NewerWireVersion: A worker of a newer wire version wrote it.
        """
        try:
            host, main, leases, *version = json.loads(text)
            reject_newer(version[0] if version else None)
            record = cls(
                HostIdentity(*map(str, host)), ProcessIdentity(*map(int, main)), tuple(map(_lease_from, leases))
            )
        except NewerWireVersion:
            raise
        except (ValueError, TypeError):
            return None
        # To `os.kill`, a pid of zero or less means a group of processes.
        processes = (record.main, *(lease.holder for lease in record.leases))
        return record if all(0 < process.pid <= MAX_PID for process in processes) else None


def _fields_of(lease: HeldLease) -> list[str | float]:
    text, bucket, seats = lease.name
    fields: list[str | float] = [text, bucket, lease.acquisition, lease.ttl, *lease.holder]
    return fields if seats == 1 else [*fields, seats]


def _lease_from(fields: Sequence[str | float]) -> HeldLease:
    text, bucket, acquisition, ttl, pid, started, *seats = fields
    name = LockName(str(text), int(bucket), *map(int, seats))
    return HeldLease(name, str(acquisition), float(ttl), ProcessIdentity(int(pid), int(started)))
