"""A worker that starts where one of its name died frees what that one held, once it is surely gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..errors import StoreRefused, StoreUnavailable
from ..store.base import ReleaseRequest
from ..utils.background import Loop, begin_thread
from ..utils.log import logger
from .crash_record import HeldLease, WorkerRecord

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["CrashRecovery"]


#: Seconds between two looks: at what is held, and whether who died is gone.
TICK: Final = 0.2
#: Locks that are noted at each look; many more are noted less often, so that the store is not kept busy with them.
A_LOOK: Final = 100


class CrashRecovery:
    """Notes what this worker holds, and frees what an earlier one of its name noted.

    In a thread of its own (in a green pool, a greenlet): no renewal and no start waits for it, however long the store
    takes. A task that lasts a moment costs nothing: only what is held at two looks in a row is noted.

    Args:
        runtime: The app's, in the worker's main process.
        node: The worker's name. Two that live may have the same.
        goes_on: Asked before each look; false ends the thread.
        mine: This worker's note, still empty.
    """

    def __init__(self, runtime: Runtime, node: str, goes_on: Callable[[], bool], mine: WorkerRecord) -> None:
        self._runtime = runtime
        self._mine = mine
        self._clock = runtime.clock
        self._keeper = runtime.keeper
        self._goes_on = goes_on
        self._node = node
        # Made here: a thread that imports while this process forks would leave its import unfinished in the child.
        self._store = runtime.store(runtime.settings.timeout)
        #: By worker, the notes of those who are not surely gone yet; None until the store was asked.
        self._earlier: dict[str, WorkerRecord] | None = None
        self._look_until = 0.0
        self._seen: frozenset[str] = frozenset()
        self._noted: frozenset[str] = frozenset()
        self._again_at = self._fresh_until = 0.0
        self._loop = Loop("crash recovery", self._turn, close=self._close, begin=begin_thread("predecessors"))

    def start(self) -> None:
        self._loop.start()

    def _turn(self) -> float | None:
        if not self._goes_on():
            return None
        try:
            self._try(self.free_the_dead)
        finally:
            self._try(self.note)
        return TICK

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except StoreUnavailable as error:
            logger.debug("crash records of %s: %s", self._node, error)

    def _close(self) -> None:
        self._store.close()

    # What others held

    def free_the_dead(self) -> None:
        """One look at the earlier workers. They are looked for as long as the longest ttl that they noted.

        Not once: the children of a killed worker die a moment after it, and it may be killed just now.
        """
        if self._earlier is None:
            self._earlier = self._read()
            longest = max((kept.ttl for note in self._earlier.values() for kept in note.leases), default=0.0)
            self._look_until = self._clock.monotonic() + longest
        elif self._earlier and self._clock.monotonic() > self._look_until:
            self._earlier = {}
        for worker, note in list(self._earlier.items()):
            if self._freed_all_of(worker, note):
                self._store.save_worker_record(self._node, worker, "", 0)
                del self._earlier[worker]

    def _read(self) -> dict[str, WorkerRecord]:
        """The notes of those about whom this machine can tell whether they are gone."""
        here = self._mine.host
        texts = self._store.worker_records(self._node)
        notes = {worker: WorkerRecord.from_text(text) for worker, text in texts.items()}
        return {worker: note for worker, note in notes.items() if note is not None and note.host == here}

    def _freed_all_of(self, worker: str, note: WorkerRecord) -> bool:
        if not note.is_dead():
            return False
        # Read again, because it may have noted more before it died.
        last = self._read().get(worker, note)
        if not last.is_dead():
            return False
        for kept in last.leases:
            try:
                self._free(kept)
            except StoreRefused as error:
                # The worker's other locks are released all the same.
                logger.warning(
                    "%s: cannot release the lease of a dead worker, it ends by its ttl: %s", kept.name, error
                )
        return True

    def _free(self, kept: HeldLease) -> None:
        # By acquisition: a lock that has changed hands is left alone. No end of the message: it may come again.
        released = self._store.release(kept.name, kept.acquisition, ReleaseRequest())
        if released.ours:
            pid = kept.holder.pid
            logger.info("%s is free: process %d of an earlier worker of this name held it and is gone", kept.name, pid)
        self._runtime.worker.hand_off(kept.name, released.granted)

    # What this worker holds

    def note(self) -> None:
        """One look at what is held; it is written when it grew, ended, or the last note would expire.

        Not when one of several ended: to free what has ended is harmless.
        """
        now = self._clock.monotonic()
        slots = {slot.acquisition: slot for slot in self._keeper.held}
        steady, self._seen = self._seen & slots.keys(), frozenset(slots)
        same = steady <= self._noted and bool(steady) == bool(self._noted)
        if (same and (not steady or now < self._fresh_until)) or now < self._again_at:
            return
        held = [slots[acquisition] for acquisition in steady]
        # Twice: so it lives as long as the locks do until it is written again, once half its life has passed.
        life = 2 * max((max(slot.ttl, slot.deadline - now) for slot in held), default=0.0)
        text = self._mine.with_leases(held).text if held else ""
        self._store.save_worker_record(self._node, self._mine.worker_id, text, round(life * 1000))
        self._noted, self._fresh_until = steady, now + life / 2
        self._again_at = now + TICK * (len(held) // A_LOOK)
