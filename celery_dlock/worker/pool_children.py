"""The pool children of a worker: their lease tables, and whether each child still lives.

The main process maps a lease table before each fork. The child writes its leases there, and the watchdog of the main
process reads them.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..locking.shared_lease_table import SharedLeaseTable
from ..locking.watchdog import LeaseSource
from .abort import STOP_SIGNAL

if TYPE_CHECKING:
    from ..locking.lease_table import LeaseRecord
    from ..runtime import Runtime
    from ..store.model import Released

__all__ = ["ChildWatch", "PoolChildren"]

#: Ticks of the watchdog after which a fork that has not stored its pid counts as failed.
MAX_TICKS_WITHOUT_PID = 150


class ChildWatch:
    """Watches one child of this process.

    A pid alone is not enough. The system reuses pids, and until a dead child is reaped, ``kill(pid, 0)`` succeeds.
    A pidfd names the process itself (Linux). On other systems ``waitid`` looks without reaping.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        self._gone = False
        if hasattr(os, "pidfd_open"):
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                self._fd = -1  # an old kernel, or a sandbox that forbids the call

    @property
    def pidfd(self) -> int | None:
        """The descriptor that becomes readable when the child dies; None if the child is dead, or without pidfds."""
        return self._fd if self._fd >= 0 else None

    def gone(self) -> bool:
        """Return whether the child has ended."""
        if not self._gone:
            self._gone = self._exited()
            if self._gone:
                self.close()
        return self._gone

    def send(self, number: int) -> None:
        """Send the child a signal. A child that has ended is left alone."""
        if self.gone():
            return
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # the child has ended since the check

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _exited(self) -> bool:
        if self._fd >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True


class PoolChildren:
    """Maps a lease table before each fork of the main process, and has the watchdog read it.

    Args:
        runtime: The app's runtime. In the child, it uses the mapped table.
        freed: Called with each lease that the watchdog released after the child's death.
    """

    def __init__(self, runtime: Runtime, freed: Callable[[LeaseRecord, Released], None]) -> None:
        self._runtime = runtime
        self._freed = freed
        self._main_pid = os.getpid()
        # A fork runs its three hooks in one thread. In the child, that thread is the one that goes on.
        self._forking = threading.local()

    def map_before_forks(self) -> None:
        """Give a lease table to every child that this process forks from now on."""
        # The hooks cannot be removed. A strong reference here would keep the worker's objects alive for ever.
        me = weakref.ref(self)

        def call(name: str) -> Callable[[], None]:
            def hook() -> None:
                if (children := me()) is not None:
                    getattr(children, name)()

            return hook

        os.register_at_fork(
            before=call("_before"), after_in_parent=call("_in_parent"), after_in_child=call("_in_child")
        )

    def _before(self) -> None:
        # First, because the mapping may fail and the fork then goes on: the child must not get another child's table.
        self._forking.table = None
        # If a task body in a child forks, these hooks run there too. Only the main process maps tables.
        if os.getpid() == self._main_pid:
            self._forking.table = SharedLeaseTable()

    def _in_parent(self) -> None:
        if self._forking.table is not None:
            self._runtime.watchdog.watch(_Child(self._forking.table, self._freed))

    def _in_child(self) -> None:
        if self._forking.table is not None:
            # Set even if the watchdog cannot be started: the child then notices that the watchdog never looked.
            self._forking.table.scanned_at = self._runtime.clock.monotonic()
            self._forking.table.adopt()
            self._runtime.adopt(self._forking.table)


class _Child(LeaseSource):
    """One pool child, as the watchdog sees it."""

    def __init__(self, table: SharedLeaseTable, freed: Callable[[LeaseRecord, Released], None]) -> None:
        self._table = table
        self._on_freed = freed
        self._watch: ChildWatch | None = None
        self._ticks_without_pid = 0
        table.interrupt = self._interrupt

    def is_dead(self) -> bool:
        if self._watch is None:
            if not self._table.pid:
                self._ticks_without_pid += 1
                return self._ticks_without_pid > MAX_TICKS_WITHOUT_PID
            self._watch = ChildWatch(self._table.pid)
        return self._watch.gone()

    def pidfd(self) -> int | None:
        return None if self._watch is None else self._watch.pidfd

    def _interrupt(self) -> None:
        if self._watch is not None:
            self._watch.send(STOP_SIGNAL)

    def records(self) -> Sequence[LeaseRecord]:
        return self._table.records(dead=self._watch is not None and self._watch.gone())

    def is_closed(self) -> bool:
        return self._watch is not None and self._watch.gone()

    def on_scan(self, now: float) -> None:
        if now:  # 0 means that the watchdog ended. The child must notice that the watchdog no longer looks.
            self._table.scanned_at = now

    def on_released(self, record: LeaseRecord, released: Released) -> None:
        self._on_freed(record, released)
