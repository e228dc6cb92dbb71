"""An SQL store and a memory store under one engine that do the same at the same time, and their differences.

Both have a clock that the test moves. That of the SQL store is a row.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from celery_dlock.store.engine.backend import Backend, Wanted
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.rules.data import Head
from tests.contract.histories import NAMES
from tests.contract.two_stores import START_US, same

__all__ = ["MOST_HISTORIES", "TwoBackends"]

#: The number of histories of the slow form.
MOST_HISTORIES: Final = int(os.environ.get("DLOCK_TEST_SQL_HISTORIES", "100"))

_TABLES: Final = "dlock_name", "dlock_waiter", "dlock_mark"


class TwoBackends(ABC):
    """The two stores, as :class:`~tests.contract.histories.History` uses them.

    Args:
        backend: The backend in SQL, with migrated tables. They are emptied. Its time is ``clock``.
        fast: Whether its plain paths are used.
    """

    #: The expression for the time of the SQL store.
    clock = "(SELECT v FROM dlock_meta WHERE k = 'clock')"

    def __init__(self, backend: Backend, *, fast: bool) -> None:
        self.now_us = START_US
        self.memory = MemoryBackend(MemoryClock(lambda: self.now_us))
        self.local = EngineStore(self.memory)
        self.backend, self.other = backend, EngineStore(backend)
        if not fast:
            for verb in ("acquire_plain", "release_plain", "renew_plain"):
                setattr(backend, verb, getattr(Backend, verb).__get__(backend))
        for table in _TABLES:
            self.execute(f"DELETE FROM {table}")
        # Removed names have raised it to a time of an earlier history.
        self.execute("UPDATE dlock_meta SET v = 0 WHERE k = 'token_floor'")
        self.execute("DELETE FROM dlock_meta WHERE k = 'clock'")
        self.execute(f"INSERT INTO dlock_meta VALUES ('clock', {self.now_us})")
        self.travel(1)

    @abstractmethod
    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute a statement in the SQL store, and return its rows."""

    def travel(self, microseconds: int) -> None:
        self.now_us += microseconds
        self.execute(f"UPDATE dlock_meta SET v = {self.now_us} WHERE k = 'clock'")

    def do(self, command: Callable[[Any], Any]) -> Any:
        seen, expected = command(self.other), command(self.local)
        same(seen, expected, "reply")
        return expected

    def check(self) -> None:
        for name in NAMES:
            data = self.memory.data(name)
            with self.backend.open(name, Wanted(write=False)) as session:
                assert _alive(session.head, self.now_us) == _alive(data.head, self.now_us)
                assert session.entries() == {
                    one: waiter.entry for one, waiter in data.waiters.items() if waiter.entry is not None
                }
                for identity, waiter in data.waiters.items():
                    assert session.waiter(identity) == waiter
                for (kind, key), mark in data.marks.items():
                    if mark.until > self.now_us:
                        same(getattr(session.mark(kind, key), "text", None), mark.text, f"{kind} {key}")
        counted = len([one for name in NAMES for one in self.memory.data(name).waiters])
        assert self.execute("SELECT COUNT(*) FROM dlock_waiter") == [(counted,)]


def _alive(head: Head, now: int) -> dict[str, Any]:
    """Return what of a head exists, with its expiry to the millisecond."""

    def shown(timed: Any) -> Any:
        if timed is None or (timed.until is not None and timed.until <= now):
            return None
        return timed.record, timed.until and -(-timed.until // 1000)

    found = {name: shown(getattr(head, name)) for name in ("seats", "claim", "newest_call", "replaced")}
    found["locks"] = {seat: shown(lock) for seat, lock in head.locks.items() if shown(lock) is not None}
    return found | {name: getattr(head, name) for name in ("sweeps", "parked", "waiting", "delayed", "dead")}
