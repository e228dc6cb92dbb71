"""The pool children of a worker: each gets slots in memory that its main process keeps."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..locking.shared_lease_table import SharedLeaseTable
from ..locking.watchdog import LeaseSource
from .abort import STOP_SIGNAL
from .child_liveness import ChildWatch

if TYPE_CHECKING:
    from ..locking.lease_table import LeaseRecord
    from ..runtime import Runtime
    from ..store.model import Released

__all__ = ["PoolChildren"]

#: Ticks that a fork may take to name its pid, before the fork counts as failed.
NAMELESS_TICKS = 150


class PoolChildren:
    """Maps memory before each fork of the main process, and has the keeper watch what the child writes there.

    Args:
        runtime: The app's; in the child it is told to use the mapped slots.
        freed: Called with each slot whose lock the keeper freed after the child's death.
    """

    def __init__(self, runtime: Runtime, freed: Callable[[LeaseRecord, Released], None]) -> None:
        self._runtime = runtime
        self._freed = freed
        self._main_pid = os.getpid()
        # A fork runs its three hooks in one thread, which in the child is the one that goes on.
        self._forking = threading.local()

    def map_before_forks(self) -> None:
        """From now on, each child of this process gets slots."""
        # The hooks cannot be taken back, so they must not keep the worker's objects alive.
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
        # First: if the memory cannot be mapped, the fork goes on, and the child may not get the slots of another one.
        self._forking.slots = None
        # A body that forks in a child runs these hooks too: only the main process maps.
        if os.getpid() == self._main_pid:
            self._forking.slots = SharedLeaseTable()

    def _in_parent(self) -> None:
        if self._forking.slots is not None:
            self._runtime.keeper.watch(_Child(self._forking.slots, self._freed))

    def _in_child(self) -> None:
        if self._forking.slots is not None:
            # Also where the watchdog cannot be started: the child notices that it never looked.
            self._forking.slots.looked_at = self._runtime.clock.monotonic()
            self._forking.slots.adopt()
            self._runtime.adopt(self._forking.slots)


class _Child(LeaseSource):
    """One child, as the keeper sees it."""

    def __init__(self, slots: SharedLeaseTable, freed: Callable[[LeaseRecord, Released], None]) -> None:
        self._slots = slots
        self._on_freed = freed
        self._watch: ChildWatch | None = None
        self._nameless = 0
        slots.interrupt = self._interrupt

    def gone(self) -> bool:
        if self._watch is None:
            if not self._slots.pid:
                self._nameless += 1
                return self._nameless > NAMELESS_TICKS
            self._watch = ChildWatch(self._slots.pid)
        return self._watch.gone()

    def pidfd(self) -> int | None:
        return None if self._watch is None else self._watch.pidfd

    def _interrupt(self) -> None:
        if self._watch is not None:
            self._watch.send(STOP_SIGNAL)

    def taken(self) -> Sequence[LeaseRecord]:
        return self._slots.taken(dead=self._watch is not None and self._watch.gone())

    def closed(self) -> bool:
        return self._watch is not None and self._watch.gone()

    def looked_at(self, now: float) -> None:
        if now:  # a watchdog that ended must not hide from the child that it no longer looks
            self._slots.looked_at = now

    def freed(self, slot: LeaseRecord, released: Released) -> None:
        self._on_freed(slot, released)
