"""The lease tables of a pool child for the stores of other apps than its worker's.

A body may take a lock of any app. Its worker knows the store of its own app only, so the child describes the other
store in the lease table itself. The description may contain a password. It is only in memory that the child shares
with the worker's main process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from .shared_lease_table import SharedLeaseTable

__all__ = ["COUNT", "NoOtherTable", "OtherTables", "other_table"]

#: The number of other stores in which one pool child can hold leases that its worker renews.
COUNT: Final = 4


class NoOtherTable(Exception):
    """There is no table for this store. The text says why."""


class OtherTables:
    """The tables of one child, created before the fork. The child calls :meth:`adopt` first."""

    def __init__(self) -> None:
        self.tables = tuple(SharedLeaseTable() for _ in range(COUNT))

    def adopt(self) -> None:
        """Make these the tables of the calling child."""
        self._taking = threading.Lock()
        for table in self.tables:
            table.adopt()
        _tables.clear()
        _tables[os.getpid()] = self

    def take(self, store: bytes) -> SharedLeaseTable:
        """Return the table for the leases in this store. Called by the child."""
        with self._taking:
            for table in self.tables:
                if table.store == store:
                    return table
                if not table.store:
                    if table.describe_store(store):
                        return table
                    raise NoOtherTable("the description of its store is too long")
        raise NoOtherTable(f"this process has locks in {COUNT} other stores already")


#: The tables of this process, by its pid. They belong to the process and not to an app: the app that takes a lock may
#: not exist before the fork. A process that the child forks has another pid, and so no tables.
_tables: Final[dict[int, OtherTables]] = {}


def other_table(describe: Callable[[], bytes | None]) -> SharedLeaseTable | None:
    """Return the table for the leases of another app in this process; None if this process is no pool child.

    Args:
        describe: Returns the description of the app's store; None if the store cannot be described.

    Raises:
        NoOtherTable: This process is a pool child, and there is no table for this store.
    """
    tables = _tables.get(os.getpid())
    if tables is None:
        return None
    if (store := describe()) is None:
        raise NoOtherTable("the options of its store cannot be passed to another process")
    return tables.take(store)
