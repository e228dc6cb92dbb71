"""The pool children of a worker: their lease tables, and whether each child still lives.

The main process maps a lease table before each fork. The child writes its leases there, and the watchdog of the main
process reads them.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..locking.lease_source import LeaseSource
from ..locking.other_tables import OtherTables
from ..locking.shared_lease_table import SharedLeaseTable
from ..utils import threads
from ..utils.log import log_fields, logger
from .body_kill import StopDeadlines
from .body_stop import STOP_SIGNAL

if TYPE_CHECKING:
    from ..locking.lease_table import LeaseRecord
    from ..locking.shared_lease_table import WatchdogRecord
    from ..store.model import Released
    from .delivery_registry import DeliveryRegistry

__all__ = ["ChildWatch", "PoolChild", "PoolChildren"]

#: Rounds of the watchdog after which a fork that has not stored its pid counts as failed.
MAX_ROUNDS_WITHOUT_PID = 150
#: Maximum seconds from SIGSTOP until a child stands still, unless the machine is overloaded.
PAUSED_WITHIN = 0.05


class ChildWatch:
    """Watches one child of this process.

    A pid alone is not enough. The system reuses pids, and until a dead child is reaped, ``kill(pid, 0)`` succeeds.
    A pidfd names the process itself (Linux). On other systems ``waitid`` looks without reaping.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        #: This process has sent SIGKILL. A child with much memory, or on a dead disk, takes a while to end.
        self.killed = False
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
        """The descriptor that becomes readable when the child dies; None if the child is dead or has no pidfd."""
        return self._fd if self._fd >= 0 else None

    @property
    def found_gone(self) -> bool:
        """Whether :meth:`gone` has returned true."""
        return self._gone

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
        self.killed = self.killed or number == signal.SIGKILL
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # the child has ended since the check

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Pause the child, and let it go on at the end. The value is whether it stands still.

        Nothing that the child has written changes during a pause.
        """
        self.send(signal.SIGSTOP)
        try:
            yield self._stands_still()
        finally:
            self.send(signal.SIGCONT)

    def _stands_still(self) -> bool:
        until = time.monotonic() + PAUSED_WITHIN
        while True:
            late = time.monotonic() >= until
            try:
                # Without WNOWAIT, the next call would no longer report this pause.
                if os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                    return True
            except ChildProcessError:
                return False  # it has ended
            if _waits_in_kernel(self.pid):
                return True
            if late:
                return False
            threads.sleep(0.0005)

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


def _waits_in_kernel(pid: int) -> bool:
    """Return whether the main thread is in a system call that only SIGKILL ends, or nothing (Linux: state D).

    Such a thread does not pause before the call ends. It also executes no code of its own: if SIGSTOP has been sent,
    it stops on its way out of the call.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"D"]
    except OSError:
        return False  # it has ended, or the system has no such file


class PoolChildren:
    """Maps a lease table before each fork of the main process, and has the watchdog read it.

    Args:
        deliveries: The deliveries of this worker. In the child, their runtime uses the mapped table.
        others: Called after each fork with the child and its lease tables for the stores of other apps.
    """

    def __init__(
        self,
        deliveries: DeliveryRegistry,
        others: Callable[[PoolChild, OtherTables], None] = lambda child, tables: None,
    ) -> None:
        self._deliveries = deliveries
        self._runtime = deliveries.runtime
        self._others = others
        self._main_pid = os.getpid()
        # A fork runs its three hooks in the thread that forks, which is the child's only thread. So they share this.
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
        # Reset first. If the mapping fails, the fork continues, and the child must not get an earlier child's table.
        self._forking.table = self._forking.others = self._forking.counters = None
        # If a task body in a child forks, these hooks run there too. Only the main process maps tables.
        if os.getpid() == self._main_pid:
            self._forking.table = SharedLeaseTable()
            self._forking.others = OtherTables()
            if (meter := self._runtime.counts.meter) is not None:
                self._forking.counters = meter.open_table()

    def _in_parent(self) -> None:
        if self._forking.table is not None:
            child = PoolChild(self._forking.table, self._deliveries)
            self._runtime.watchdog.watch(child)
            if self._forking.others is not None:
                self._others(child, self._forking.others)
            if self._runtime.counts.meter is not None and self._forking.counters is not None:
                self._runtime.counts.meter.watch(self._forking.counters, child.ended)

    def _in_child(self) -> None:
        if self._forking.table is not None:
            # Set this in any case. If the watchdog could not be started, the child notices that no scan follows.
            self._forking.table.scanned_at = self._runtime.clock.monotonic()
            self._forking.table.adopt()
            if self._runtime.counts.meter is not None and self._forking.counters is not None:
                self._runtime.counts.meter.adopt(self._forking.counters)
            if self._forking.others is not None:
                self._forking.others.adopt()
            self._runtime.adopt(self._forking.table)


class PoolChild(LeaseSource):
    """One pool child and its leases in one store, as the watchdog of that store sees them.

    Args:
        table: The leases.
        deliveries: The deliveries of this worker; None for the leases in the store of another app.
    """

    _scanned: Sequence[WatchdogRecord] = ()

    def __init__(self, table: SharedLeaseTable, deliveries: DeliveryRegistry | None = None) -> None:
        self._table = table
        self._deliveries = deliveries
        self._stop_deadlines = StopDeadlines()
        self._watch: ChildWatch | None = None
        self._rounds_without_pid = 0
        table.interrupt = self._interrupt

    def is_dead(self) -> bool:
        if self._watch is None:
            if not self._table.pid:
                self._rounds_without_pid += 1
                return self._rounds_without_pid > MAX_ROUNDS_WITHOUT_PID
            self._watch = ChildWatch(self._table.pid)
        return self._watch.gone()

    def ended(self) -> bool:
        """Return whether the watchdog has found the child dead. Any thread may call this: it polls no child."""
        return self._rounds_without_pid > MAX_ROUNDS_WITHOUT_PID or (self._watch is not None and self._watch.found_gone)

    def pidfd(self) -> int | None:
        return None if self._watch is None else self._watch.pidfd

    def _interrupt(self) -> None:
        if self._watch is not None:
            self._watch.send(STOP_SIGNAL)

    def records(self) -> Sequence[WatchdogRecord]:
        self._scanned = self._table.records(dead=self.is_closed())
        return self._scanned

    def known_records(self) -> Sequence[WatchdogRecord]:
        return self._scanned

    def is_closed(self) -> bool:
        return self._watch is not None and self._watch.gone()

    def on_scan(self, now: float) -> None:
        if now:  # 0: the watchdog ends. Keep the old time, so that the child notices the missing scans.
            self._table.scanned_at = now
            for record in self._stop_deadlines.overdue(self._scanned, now):
                if self._watch is not None and self._deliveries is not None:
                    self._deliveries.body_killer.kill(self._watch, record)

    def on_released(self, record: LeaseRecord, released: Released) -> None:
        if released.ours and self._watch is not None and self._watch.found_gone:
            logger.info(
                "%s is released: pool child %d held it and has ended",
                record.name, self._table.pid, extra=log_fields(lock_name=record.name.text),
            )  # fmt: skip
        if self._deliveries is not None:
            self._deliveries.freed(record, released)
