"""What a worker notes in the store about what it holds, for the worker that starts where it died."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..keys.key_spec import LockName
from ..locking.lease_table import LeaseRecord
from .process_identity import HostIdentity, Process, home, process

__all__ = ["HeldLease", "WorkerRecord"]


#: The kernel's own limit.
MOST_PIDS: Final = 2**22


class HeldLease(NamedTuple):
    """One acquisition, and the process that holds it.

    Args:
        name: Of the lock.
        acquisition: Owner and number.
        ttl: Seconds.
        holder: The worker's main process itself, or one of its pool children.
    """

    name: LockName
    acquisition: str
    ttl: float
    holder: Process


class WorkerRecord(NamedTuple):
    """What one worker holds.

    Args:
        home: Where its processes live.
        main: Its main process.
        kept: What it and its children hold.
    """

    home: HostIdentity
    main: Process
    kept: tuple[HeldLease, ...] = ()

    @classmethod
    def of_this_process(cls) -> WorkerRecord | None:
        """An empty one; None where the system does not tell processes apart, so that the ttl decides alone."""
        here, main = home(), process(os.getpid())
        return None if here is None or main is None else cls(here, main)

    @property
    def worker(self) -> str:
        """Which worker's: no other's, also of the same node name."""
        return f"{self.home.boot}/{self.home.pids}/{self.main.pid}/{self.main.started}"

    def keeping(self, slots: Sequence[LeaseRecord]) -> WorkerRecord:
        """The same worker's note of what these slots hold now, but for what died meanwhile: that its keeper frees."""
        found = {pid: self.main if pid == self.main.pid else process(pid) for pid in {slot.pid for slot in slots}}
        held = ((slot, found[slot.pid]) for slot in slots)
        return self._replace(
            kept=tuple(HeldLease(s.name, s.acquisition, s.ttl, by) for s, by in held if by is not None)
        )

    def gone(self) -> bool:
        """Does surely none of its processes live? Asked in its own home only."""
        return self.main.gone() and all(kept.holder.gone() for kept in self.kept)

    @property
    def text(self) -> str:
        """As JSON. It shows names of locks, which are keys already, and nothing of the tasks."""
        kept = [[*one.name, one.acquisition, one.ttl, *one.holder] for one in self.kept]
        return json.dumps([self.home, self.main, kept], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> WorkerRecord | None:
        """Reads :attr:`text`; None for what cannot be read, which nobody may act on."""
        try:
            home, main, kept = json.loads(text)
            note = cls(HostIdentity(*map(str, home)), Process(*map(int, main)), tuple(map(_kept, kept)))
        except (ValueError, TypeError):
            return None
        # Zero and less would stand for groups of processes, and more for none.
        possible = all(0 < one.pid <= MOST_PIDS for one in (note.main, *(kept.holder for kept in note.kept)))
        return note if possible else None


def _kept(fields: Sequence[str | float]) -> HeldLease:
    text, bucket, acquisition, ttl, pid, started = fields
    return HeldLease(LockName(str(text), int(bucket)), str(acquisition), float(ttl), Process(int(pid), int(started)))
