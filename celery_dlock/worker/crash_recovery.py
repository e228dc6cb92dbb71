"""Crash recovery: a worker that starts under the name of a dead one releases that one's leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import StoreRefused, StoreUnavailable
from ..store.base import ReleaseRequest
from ..utils.background import Loop, begin_thread
from ..utils.log import log_fields, logger
from .crash_record import HeldLease, WorkerRecord

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["CrashRecovery"]


#: Seconds between two rounds. In each, the record is brought up to date and dead predecessors are looked for.
TICK: Final = 0.2
#: Leases that a worker stores in each round. With more, it stores its record less often, to spare the store.
LEASES_PER_ROUND: Final = 100


class CrashRecovery:
    """Stores this worker's leases, and releases those of an earlier worker of its name that has died.

    It has its own thread, in a green pool its own greenlet. So no renewal and no start waits for it if the store is
    slow. Short tasks cost nothing: a lease is stored only if it is held in two successive rounds.

    Args:
        runtime: The app's runtime, in the worker's main process.
        node: The worker's name. Two live workers may have the same name.
        goes_on: Called before each round; false ends the thread.
        mine: This worker's record, still empty.
    """

    def __init__(self, runtime: Runtime, node: str, goes_on: Callable[[], bool], mine: WorkerRecord) -> None:
        self._runtime = runtime
        self._mine = mine
        self._clock = runtime.clock
        self._watchdog = runtime.watchdog
        self._goes_on = goes_on
        self._node = node
        # Opened here: if this process forks while a thread imports, the import is never finished in the child.
        self._store = runtime.open_store(runtime.settings.timeout)
        #: The records of predecessors that may still live, by worker id; None until they were read.
        self._predecessors: dict[str, WorkerRecord] | None = None
        self._look_until = 0.0
        self._seen: frozenset[str] = frozenset()
        self._saved: frozenset[str] = frozenset()
        self._next_save = self._fresh_until = 0.0
        self._loop = Loop("crash recovery", self._turn, close=self._close, begin=begin_thread("crash-recovery"))

    def start(self) -> None:
        self._loop.start()

    def _turn(self) -> float | None:
        if not self._goes_on():
            return None
        try:
            self._try(self.release_dead_leases)
        finally:
            self._try(self.save_record)
        return TICK

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except StoreUnavailable as error:
            logger.debug("crash records of %s: the store does not answer, retrying: %s", self._node, error)

    def _close(self) -> None:
        self._store.close()

    # Predecessors

    def release_dead_leases(self) -> None:
        """Release the leases of predecessors that have died since the last call.

        Predecessors are looked at for as long as the longest ttl in their records. One look is not enough: the pool
        children of a killed worker die a moment after it, and a predecessor may be killed later.
        """
        if self._predecessors is None:
            self._predecessors = self._read()
            leases = (lease for record in self._predecessors.values() for lease in record.leases)
            self._look_until = self._clock.monotonic() + max((lease.ttl for lease in leases), default=0.0)
        elif self._predecessors and self._clock.monotonic() > self._look_until:
            self._predecessors = {}
        for worker, record in list(self._predecessors.items()):
            if self._released_all_of(worker, record):
                self._store.save_worker_record(self._node, worker, "", 0)
                del self._predecessors[worker]

    def _read(self) -> dict[str, WorkerRecord]:
        """Return the records of workers on this host. Whether other hosts' processes are dead cannot be found here."""
        host = self._mine.host
        texts = self._store.worker_records(self._node)
        records = {worker: WorkerRecord.from_text(text) for worker, text in texts.items()}
        return {worker: record for worker, record in records.items() if record is not None and record.host == host}

    def _released_all_of(self, worker: str, record: WorkerRecord) -> bool:
        if not record.is_dead():
            return False
        # Read again, because the worker may have stored more leases before it died.
        last = self._read().get(worker, record)
        if not last.is_dead():
            return False
        for lease in last.leases:
            try:
                self._release(lease)
            except StoreRefused as error:
                # Release the worker's other leases all the same.
                logger.warning(
                    "%s: cannot release the lease of a dead worker, it ends by its ttl: %s", lease.name, error,
                    extra=log_fields(lock_name=lease.name.text),
                )  # fmt: skip
        return True

    def _release(self, lease: HeldLease) -> None:
        # By acquisition, so that a later holder keeps its lock. Without a done mark: the message may be redelivered.
        released = self._store.release(lease.name, lease.acquisition, ReleaseRequest())
        if released.ours:
            logger.info(
                "%s is released: process %d of an earlier worker of this name held it and has ended",
                lease.name, lease.holder.pid, extra=log_fields(lock_name=lease.name.text),
            )  # fmt: skip
        self._runtime.worker.hand_off(lease.name, released.granted)

    # This worker's record

    def save_record(self) -> None:
        """Store the record if a lease was added, if the last lease ended, or if the stored record would expire.

        It is not stored if one of several leases ended, because releasing an ended lease is harmless.
        """
        now = self._clock.monotonic()
        held = {lease.acquisition: lease for lease in self._watchdog.held}
        steady, self._seen = self._seen & held.keys(), frozenset(held)
        same = steady <= self._saved and bool(steady) == bool(self._saved)
        if (same and (not steady or now < self._fresh_until)) or now < self._next_save:
            return
        leases = [held[acquisition] for acquisition in steady]
        # Twice as long as the leases: the record is stored again after half of that, and must not expire before.
        life = 2 * max((max(lease.ttl, lease.deadline - now) for lease in leases), default=0.0)
        text = self._mine.with_leases(leases).text if leases else ""
        self._store.save_worker_record(self._node, self._mine.worker_id, text, round(life * 1000))
        self._saved, self._fresh_until = steady, now + life / 2
        self._next_save = now + TICK * (len(leases) // LEASES_PER_ROUND)
