"""Crash recovery: a worker releases the leases of a dead worker that had the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import StoreRefused, StoreUnavailable
from ..keys.lock_name import task_of_name
from ..messaging.wire import NewerWireVersion
from ..store.base import ReleaseRequest
from ..utils.background import Loop, begin_thread
from ..utils.log import log_fields, logger
from .crash_record import HeldLease, WorkerRecord

if TYPE_CHECKING:
    from ..locking.watchdog import Watchdog
    from ..runtime import Runtime
    from ..store.base import LockStore

__all__ = ["CrashRecovery"]


#: Seconds between two rounds. Each round looks for dead predecessors and updates this worker's record.
ROUND: Final = 0.2
#: A record with n times this many leases is stored at most every n rounds (n is rounded down, and at least 1). So large
#: records cost the store no more. The resulting intervals are in docs/explanation/how-a-lock-ends.md.
LEASES_PER_ROUND: Final = 100
#: A worker with n times this many leases looks through all of them every n rounds, to spare the processor. Here, too, n
#: is rounded down, and at least 1.
LEASES_PER_LOOK: Final = 1000


class CrashRecovery:
    """Stores this worker's leases, and releases those of an earlier worker of its name that has died.

    It runs in a thread of its own, or a greenlet in a green pool. If the store is slow, neither renewals nor the start
    of the worker wait for this thread. Short tasks cost nothing: a lease is stored only if it is held in two successive
    rounds.

    Args:
        runtime: The app's runtime, in the worker's main process.
        node: The worker's name. Two live workers may have the same name.
        goes_on: Called before each round; false ends the thread.
        mine: This worker's record, still empty.
        other: The store of another app, and the watchdog of the leases that this worker's children hold there. None:
            the store of the worker's own app.
    """

    def __init__(
        self,
        runtime: Runtime,
        node: str,
        goes_on: Callable[[], bool],
        mine: WorkerRecord,
        other: tuple[LockStore, Watchdog] | None = None,
    ) -> None:
        self._runtime = runtime
        self._mine = mine
        self._clock = runtime.clock
        self._node = node
        self._is_other = other is not None
        # Open it before the thread starts, because it imports modules. A fork during an import would break the child.
        self._store, self._watchdog = other or (runtime.open_store(runtime.settings.timeout), runtime.watchdog)
        #: The records of predecessors that may still live, by worker id; None until they were read.
        self._predecessors: dict[str, WorkerRecord] | None = None
        self._look_until = 0.0
        self._seen: frozenset[str] = frozenset()
        self._saved: frozenset[str] = frozenset()
        self._next_look = self._next_save = self._fresh_until = 0.0
        #: For the store of another app, which may be used again after a pause, its thread may be woken again.
        self.loop = Loop(
            "crash recovery",
            self._run_round,
            goes_on=goes_on,
            needed=goes_on if other else lambda: False,
            close=self._store.close,
            begin=begin_thread("crash-recovery"),
        )

    def _run_round(self) -> float:
        try:
            self._try(self.release_dead_leases)
        finally:
            self._try(self.save_record)
        return ROUND

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except StoreUnavailable as error:
            logger.debug("crash records of %s: the store does not answer, retrying: %s", self._node, error)

    # Predecessors

    def release_dead_leases(self) -> None:
        """Release the leases of predecessors that have died since the last call.

        Each call checks the predecessors once, until the longest ttl in their records has passed. One call is not
        enough: the pool children of a killed worker die a moment after it, and a predecessor may be killed later.
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
        """Return the records of workers on this host. This process cannot check processes of other hosts."""
        records = {}
        for worker, text in self._store.worker_records(self._node).items():
            try:
                record = WorkerRecord.from_text(text)
            except NewerWireVersion as newer:
                logger.warning("%s: a record of this name is left to newer workers: %s", self._node, newer)
                continue
            if record is not None and record.host == self._mine.host:
                records[worker] = record
        return records

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
                    "%s: cannot release the lease of a dead worker, so its lock is held until the ttl ends: %s",
                    lease.name, error, extra=log_fields(lock_name=lease.name.text),
                )  # fmt: skip
        return True

    def _release(self, lease: HeldLease) -> None:
        # Release only this acquisition: a later holder keeps its lock. No done mark: the message may be redelivered.
        released = self._store.release(lease.name, lease.acquisition, ReleaseRequest())
        if released.ours:
            self._runtime.counts.count("released", task_of_name(lease.name), "crash_recovery")
            logger.info(
                "%s is released: process %d of an earlier worker of this name held it and has ended",
                lease.name, lease.holder.pid, extra=log_fields(lock_name=lease.name.text),
            )  # fmt: skip
        if not self._is_other:  # this worker cannot publish the messages of another app; that app's workers do
            self._runtime.worker.hand_off(lease.name, released.granted)

    # This worker's record

    def save_record(self) -> None:
        """Store the record if a lease was added, if no lease is left, or if the stored record would expire.

        A lease that has ended may stay in the record until the record is stored again. This is harmless: a release of
        a lease that has ended releases nothing.
        """
        now = self._clock.monotonic()
        if now < self._next_look:
            return
        held = {lease.acquisition: lease for lease in self._watchdog.held}
        self._next_look = now + ROUND * (len(held) // LEASES_PER_LOOK)
        steady, self._seen = self._seen & held.keys(), frozenset(held)
        same = steady <= self._saved and bool(steady) == bool(self._saved)
        if (same and (not steady or now < self._fresh_until)) or now < self._next_save:
            return
        leases = [held[acquisition] for acquisition in steady]
        # The record expires after twice the longest lease. It is stored again after half of that time, so it always
        # outlives its leases.
        life = 2 * max((max(lease.ttl, lease.deadline - now) for lease in leases), default=0.0)
        text = self._mine.with_leases(leases).text if leases else ""
        self._store.save_worker_record(self._node, self._mine.worker_id, text, round(life * 1000))
        self._saved, self._fresh_until = steady, now + life / 2
        self._next_save = now + ROUND * (len(leases) // LEASES_PER_ROUND)
