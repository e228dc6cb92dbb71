"""A transaction on one lock name in SQL (:class:`~celery_dlock.store.engine.backend.Session`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from ..engine.backend import Changes, Conflict, Wanted
from ..rules.data import Mark, MarkKind, QueuePart, Waiter
from ..rules.texts import waiter_from_texts, waiter_text
from .rows import HIGHEST, LOWEST, Row

__all__ = ["SQLSession", "SessionStatements"]


class SessionStatements(Protocol):
    """The statements of a session. The values of most have the order of the columns, the others have names."""

    marks: str
    marks_of_kind: str
    put_mark: str
    drop_mark: str
    lock_mark: str
    waiters: str
    first_waiting: str
    first_delayed: str
    before_waiting: str
    before_delayed: str
    entries: str
    put_waiter: str
    drop_waiter: str
    put_head: str
    put_guard: str
    has_guard: str


class SQLSession(ABC):
    """A transaction.

    Args:
        sql: The statements.
        key: The name of the row.
        wanted: Data that the rule will read.
    """

    now: int
    #: Whether rows have a line of the calls that wait.
    _lines = False

    def __init__(self, sql: SessionStatements, key: str, wanted: Wanted) -> None:
        self._texts, self._key, self._writes = sql, key, wanted.write
        self._read_marks, self._read_waiters = set(wanted.marks), set(wanted.waiters)
        self._marks: dict[tuple[MarkKind, str], Mark] = {}
        self._waiters: dict[str, Waiter] = {}
        self._row, self._floor = Row(), 0
        self._read(wanted)
        self.head = self._row.head
        self.next_token = max(self._row.token + 1, self._floor + 1, self.now)

    @abstractmethod
    def _read(self, wanted: Wanted) -> None:
        """Begin the transaction, and read the row, the time and the data that the rule will read."""

    @abstractmethod
    def _ask(self, statement: str, values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of one statement."""

    @abstractmethod
    def _end_guard(self, guard: tuple[str, int]) -> None:
        """Delete the row of a guard, if no transaction of a user has locked it."""

    @abstractmethod
    def _commit(self, writes: list[tuple[str, Any]]) -> None:
        """Execute statements, and commit."""

    def _marks_asked(self, marks: Sequence[tuple[MarkKind, str]]) -> dict[str, Any]:
        """Return the values of the statement that reads marks."""
        kinds, keys = [kind for kind, _ in marks], [key for _, key in marks]
        keyed = [(kind, self._key, key) for kind, key in marks]
        return {"name": self._key, "kinds": kinds, "keys": keys, "marks": keyed}

    def _note(self, marks: Sequence[tuple[Any, ...]], waiters: Sequence[tuple[Any, ...]]) -> None:
        """Keep the rows of marks and waiters that were read."""
        self._marks |= {(kind, key): Mark(text, until) for kind, key, text, until in marks}
        self._waiters |= dict(map(_waiter, waiters))

    def mark(self, kind: MarkKind, key: str) -> Mark | None:
        if (kind, key) not in self._read_marks:
            self._note(self._ask(self._texts.marks, self._marks_asked([(kind, key)])), ())
            self._read_marks.add((kind, key))
        return self._marks.get((kind, key))

    def marks(self, kind: MarkKind) -> dict[str, Mark]:
        found = self._ask(self._texts.marks_of_kind, (self._key, kind))
        return {key: Mark(text, until) for key, text, until in found}

    def waiter(self, identity: str) -> Waiter | None:
        if identity not in self._read_waiters:
            self._note((), self._ask(self._texts.waiters, (self._key, [identity])))
            self._read_waiters.add(identity)
        return self._waiters.get(identity)

    def entries(self) -> dict[str, str]:
        return dict(self._ask(self._texts.entries, (self._key,)))

    def first_in(self, part: QueuePart, most: int, low: int | None, high: int | None) -> list[tuple[str, Waiter]]:
        statement = self._texts.first_waiting if part == "waiting" else self._texts.first_delayed
        bounds = LOWEST if low is None else low, HIGHEST if high is None else high
        return list(map(_waiter, self._ask(statement, (self._key, *bounds, most))))

    def count_before(self, part: QueuePart, score: int, identity: str) -> int:
        statement = self._texts.before_waiting if part == "waiting" else self._texts.before_delayed
        values = {"name": self._key, "score": score, "identity": identity}
        return int(self._ask(statement, values)[0][0])

    def end_guard(self, token: int) -> bool:
        if not self._writes:
            return True  # it may not lock a row
        self._end_guard((self._key, token))
        # The transaction may have settled its run after these were read.
        self._read_marks.clear()
        self._marks.clear()
        return not self._ask(self._texts.has_guard, (self._key, token))

    def commit(self, changes: Changes) -> None:
        sql, key = self._texts, self._key
        # The row is always written: that tells a plain acquire that marks may have changed since it read them.
        head = self.head if changes.head is None else changes.head
        row = self._row.with_head(head, max(self._row.token, changes.token or 0), self.now, lines=self._lines)
        sweep = min(head.sweeps.values(), default=None)
        writes: list[tuple[str, Any]] = [(sql.put_head, (*row[:7], sweep, key))]
        if changes.guard is not None:
            writes.append((sql.put_guard, (key, changes.guard)))
        for identity, waiter in changes.waiters.items():
            if waiter is None:
                writes.append((sql.drop_waiter, (key, identity)))
            else:
                columns = waiter.waiting, waiter.delayed, waiter.entry, waiter.dead
                writes.append((
                    sql.put_waiter, (key, identity, *columns, bool(waiter.shown), waiter_text(waiter))
                ))  # fmt: skip
        for (kind, name), mark in changes.marks.items():
            if mark is None:
                writes.append((sql.drop_mark, (key, kind, name)))
            else:
                self._check_run_mark(kind, name)
                writes.append((sql.put_mark, (key, kind, name, mark.text, mark.until)))
        self._commit([*writes, *self._wakes(changes, row)])

    def _check_run_mark(self, kind: MarkKind, key: str) -> None:
        """Check that no transaction has settled the run since its mark was read: it does not lock the row of the name.

        Raises:
            Conflict: One has.
        """
        read = self._marks.get((kind, key)) if kind == "run" else None
        if read is None:
            return
        found = self._ask(self._texts.lock_mark, (self._key, kind, key))
        if found and found[0][0] != read.text:
            raise Conflict(f"a transaction has settled the run of {self._key}")

    @abstractmethod
    def _wakes(self, changes: Changes, row: Row) -> list[tuple[str, Any]]:
        """Return the statements that wake calls.

        Args:
            changes: All changes.
            row: The row after them.
        """


def _waiter(row: tuple[Any, ...]) -> tuple[str, Waiter]:
    return row[0], waiter_from_texts(*row[1:])
