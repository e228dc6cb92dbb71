"""The stores of other apps in which the pool children of a worker hold leases.

A body may take a lock of any app. The worker then treats that store like its own. A watchdog renews the leases and
releases those of dead children. Crash recovery releases those of an earlier worker. Each store has its own threads,
because a store that does not answer must delay the renewals of no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..locking.other_tables import OtherTables
from ..locking.shared_lease_table import SharedLeaseTable
from ..store.factory import StoreDescription
from ..utils.background import Loop
from ..utils.fork_guard import no_fork
from ..utils.log import logger
from .crash_record import WorkerRecord
from .crash_recovery import CrashRecovery
from .pool_children import PoolChild

if TYPE_CHECKING:
    from ..locking.watchdog import Watchdog
    from ..runtime import Runtime

__all__ = ["OtherStores"]

#: Seconds between two looks at the children. A lease must be renewed 0.33 s after its acquisition at the earliest.
ROUND: Final = 0.2


@dataclass(slots=True)
class _Child:
    child: PoolChild
    tables: OtherTables
    watched: list[SharedLeaseTable] = field(default_factory=list)


@dataclass(slots=True)
class _Store:
    watchdog: Watchdog
    recovery: CrashRecovery | None = None

    def is_used(self) -> bool:
        """Return whether a child that has taken a lock here lives, or has ended a moment ago."""
        return self.watchdog.has_sources or self.watchdog.running


class OtherStores:
    """Watches the leases that pool children hold in other stores than their worker's.

    Args:
        runtime: The runtime of the worker's app.
        node: The worker's name.
        goes_on: Called before each round; false ends the thread.
        mine: This worker's record, still empty; None if the system does not identify processes.
    """

    def __init__(self, runtime: Runtime, node: str, goes_on: Callable[[], bool], mine: WorkerRecord | None) -> None:
        self._runtime = runtime
        self._node = node
        self._goes_on = goes_on
        self._mine = mine
        self._children: list[_Child] = []
        #: By description.
        self._stores: dict[bytes, _Store] = {}
        self._numbers = itertools.count(1)
        self.loop = Loop("other stores", self._run_round, goes_on=goes_on)

    def add(self, child: PoolChild, tables: OtherTables) -> None:
        """Watch the leases of a child in these tables. Called after its fork."""
        self._children.append(_Child(child, tables))

    def _run_round(self) -> float:
        for each in list(self._children):
            ended = each.child.ended()  # ask first: the child may take its first lock now
            for table in each.tables.tables:
                if table.store and table not in each.watched:
                    each.watched.append(table)
                    self._watch(table)
            if ended:
                self._children.remove(each)
        return ROUND

    def _watch(self, table: SharedLeaseTable) -> None:
        description = table.store
        try:
            if (store := self._stores.get(description)) is None:
                self._stores = {each: its for each, its in self._stores.items() if its.is_used()}
                with no_fork():  # opening a store imports modules
                    store = self._stores[description] = self._open(StoreDescription.from_text(description))
        except Exception:
            logger.exception(
                "the leases of pool child %d in the store of another app are not renewed, and end with their ttl",
                table.pid,
            )
            return
        store.watchdog.watch(PoolChild(table))
        if store.recovery is not None:
            store.recovery.loop.wake()

    def _open(self, description: StoreDescription) -> _Store:
        watchdog = self._runtime.new_watchdog(description.open, description.timeout)
        store = _Store(watchdog)
        if self._mine is not None:
            # This worker's records in different stores, or of different apps in one store, have different ids.
            mine = self._mine._replace(number=next(self._numbers))
            opened, goes_on = description.open(description.timeout), self._goes_on
            store.recovery = CrashRecovery(
                self._runtime, self._node, lambda: goes_on() and store.is_used(), mine, (opened, watchdog)
            )
        return store
