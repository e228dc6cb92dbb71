"""The data of the store in PostgreSQL (:mod:`celery_dlock.store.sql.backend`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from psycopg import errors
from psycopg.pq import TransactionStatus

from ....errors import GuardRefused, ReplyTimeout, StoreNotReady
from ....keys.lock_name import LockName
from ...base import NO_GUARD, ReleaseListener
from ...engine.backend import Changes, Conflict, Wanted
from ...location import StoreLocation
from ...model import Released
from ...rules.data import Guard
from ...server_model import StoreInfo
from ..backend import Lease, SQLBackend
from ..guard import BEGAN_BEFORE, NO_TRANSACTION, UserTransaction
from ..rows import WAKE_US, Row
from ..session import SQLSession
from .calls import WaitingCalls
from .connection import Connection, ConnectionPool
from .line import Entry
from .listener import Listener
from .statements import Statements

__all__ = ["PostgreSQLBackend"]

#: The error of a transaction whose snapshot is older than a change of the row that it wants to lock.
_SERIALIZATION_FAILURE: Final = "40001"
#: Another transaction was in the way, and nothing was written.
_LOCKED: Final = errors.LockNotAvailable, errors.DeadlockDetected


class PostgreSQLBackend(SQLBackend):
    """The data of one app.

    Args:
        location: The location of the server.
        timeout: Seconds that each statement may take.
        prefix: The start of every name of this app.
        clock: The expression for the time in microseconds; None: the server's clock. Tests have a clock of their own.

    Raises:
        ValueError: libpq does not know an option of the location.
    """

    def __init__(self, location: StoreLocation, timeout: float, prefix: str, clock: str | None = None) -> None:
        self.pool = ConnectionPool(location, timeout)
        self.sql = Statements(self.pool.schema, clock)
        self.calls = WaitingCalls(self.pool)
        super().__init__(location, timeout, prefix, self.sql)

    @contextmanager
    def open(self, name: LockName, wanted: Wanted) -> Iterator[PostgreSQLSession]:
        refused = None
        with self.pool.lent(wanted.within) as connection:
            limit = str(math.ceil(self.timeout * 1000)) if self.pool.pooled else ""
            try:
                yield PostgreSQLSession(self.sql, connection, self.key(name), wanted, limit)
            except Conflict as conflict:  # the connection stays usable
                refused = conflict
            except _LOCKED:
                refused = Conflict(f"another transaction had locked the row of {name.text}")
            if connection.info.transaction_status != TransactionStatus.IDLE:
                connection.execute("ROLLBACK")
        if refused is not None:
            raise refused

    def guard_of(self, connection: Any) -> Callable[[LockName, Guard], bool]:
        user = UserTransaction(connection)

        def guard(name: LockName, made: Guard) -> bool:
            # All of these come after the commit of the guard, so that the snapshot of the transaction has it.
            here, read_only, began = user.ask(self.sql.can_guard)
            # Two databases may both have such tables.
            if not here or user.ask(self.sql.store_id) != self._ask(self.sql.store_id)[0]:
                raise GuardRefused(NO_GUARD)
            if read_only:
                raise GuardRefused("a transaction that is read-only, or on a replica, cannot be guarded")
            return self._lock_guard(user, self.key(name), made, began)

        return guard

    def _lock_guard(self, user: UserTransaction, key: str, made: Guard, began: object) -> bool:
        locked = _written(user, self.sql.lock_guard, (key, made.token))
        if locked is None:
            if self._ask(self.sql.has_guard, (key, made.token)):
                raise GuardRefused(BEGAN_BEFORE)
            return False
        if locked[0] != began:
            raise GuardRefused(NO_TRANSACTION)
        if made.settled is not None:
            tick, mark = made.settled.tick, made.settled.mark
            if _written(user, self.sql.settle, (key, "run", tick, mark.text, mark.until)) is None:
                raise GuardRefused(BEGAN_BEFORE)
        return True

    def release_listener(self, name: LockName) -> ReleaseListener:
        def pass_on() -> None:
            with self.open(name, Wanted()) as session:
                session.commit(Changes(wakes=1))

        return Listener(self.calls, self._ask, self.sql, self.key(name), functools.partial(self._plain, name), pass_on)

    def info(self) -> StoreInfo:
        return super().info()._replace(polls=self.pool.pooled)

    def close(self) -> None:
        self.calls.close()
        self.pool.close()

    def _ask(self, statement: str, values: Any = ()) -> list[tuple[Any, ...]]:
        with self.pool.lent() as connection:
            return connection.execute(statement, values).fetchall()

    def _remove(self, after: str) -> str | None:
        sql = self.sql
        # The next sweep tries a failed removal again.
        with suppress(StoreNotReady, ReplyTimeout), self.pool.lent() as connection:
            connection.execute(sql.remove_marks)
            connection.execute(sql.remove_guards)
            (last,) = connection.execute(sql.next_range, (after, self._end)).fetchall()[0]
            if last is not None:
                connection.execute(sql.remove_names, (after, last))
            return None if last is None else str(last)
        return after

    def _acquire(self, values: dict[str, Any]) -> tuple[int, int] | None:
        for token, since in self._ask(self.sql.acquire, values):
            return token, since
        return None

    def _release(self, key: str, acquisition: str) -> Released | None:
        for woke, _ in self._ask(self.sql.release, (key, acquisition)):
            return Released(ours=True, duplicate_seen=False, woke=woke)
        return None

    def _renew(self, leases: list[Lease], within: float | None) -> list[int]:
        names, owners, lives, _ = map(list, zip(*leases, strict=True))
        asked = names, owners, lives
        with self.pool.lent(within) as connection:
            try:
                with connection.pipeline():
                    connection.execute(self.sql.begin)
                    connection.execute(self.sql.at_once)
                    found = connection.execute(self.sql.renew_all, asked)
                    connection.execute("COMMIT")
                renewed = found.fetchall()
            except _LOCKED:
                connection.execute("ROLLBACK")
                renewed = connection.execute(self.sql.renew, asked).fetchall()
        return [leases[number - 1].number for (number,) in renewed]


def _written(user: UserTransaction, statement: str, values: tuple[Any, ...]) -> Any:
    """Return the row that a statement has locked or written; None if the transaction does not see it."""
    try:
        return user.ask(statement, values)
    except Exception as error:
        if getattr(error, "sqlstate", getattr(error, "pgcode", None)) != _SERIALIZATION_FAILURE:
            raise
        return None


class PostgreSQLSession(SQLSession):
    """A transaction on one lock name.

    Args:
        sql: The statements.
        connection: A connection without a transaction.
        key: The name of the row.
        wanted: What to read at once.
        limit: Milliseconds after which the server ends a statement or an idle transaction; "": the session's own.
    """

    _lines = True

    def __init__(self, sql: Statements, connection: Connection, key: str, wanted: Wanted, limit: str = "") -> None:
        self._sql, self._connection, self._limit = sql, connection, limit
        super().__init__(sql, key, wanted)

    def _read(self, wanted: Wanted) -> None:
        while not self._read_once(wanted):
            # Between the two statements, another transaction may have removed the row again.
            self._connection.execute(self._sql.make, (self._key,))

    def _read_once(self, wanted: Wanted) -> bool:
        """Read the data, in one round trip. Return false if the row that should be locked does not exist."""
        sql, run, key = self._sql, self._connection.execute, self._key
        marks = waiters = None
        with self._connection.pipeline():
            if self._connection.info.transaction_status == TransactionStatus.IDLE:
                run(sql.begin if wanted.write else sql.begin_reading)
                if self._limit:
                    run(sql.limits, {"limit": self._limit})
            row = run(sql.lock if wanted.write else sql.head, (key,))
            now = run(sql.now)
            if wanted.marks:
                marks = run(sql.marks, self._marks_asked(wanted.marks))
            if wanted.waiters:
                waiters = run(sql.waiters, (key, list(wanted.waiters)))
        found = row.fetchone()
        self._row = Row(*found) if found else Row()
        self.now, self._floor = now.fetchall()[0]
        self._marks, self._waiters = {}, {}
        self._note(marks.fetchall() if marks else (), waiters.fetchall() if waiters else ())
        return found is not None or not wanted.write

    def _ask(self, statement: str, values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement, values).fetchall()

    def _end_guard(self, guard: tuple[str, int]) -> None:
        self._connection.execute(self._sql.end_guard, guard)

    def _wakes(self, changes: Changes, row: Row) -> list[tuple[str, Any]]:
        if self._row.line is None and row.line is None and not changes.wakes:
            return []
        line = [entry for entry in map(Entry.of, self._row.line or ()) if int(entry.alive_us) > self.now]
        woken, line = line[: changes.wakes], line[changes.wakes :]
        # The rules decide about a call whose message has ended, or that has been abandoned.
        marked = {key for (_, key), mark in changes.marks.items() if mark is not None}
        texts = [(one.to_wake() if marked & {one.acquisition, one.identity} else one).text for one in line]
        values = {
            "name": self._key,
            "line": texts or row.line,
            "kept_us": WAKE_US if len(woken) < changes.wakes else 0,
        }
        told = [(self._sql.tell, (one.channel, one.acquisition)) for one in woken]
        return [(self._sql.put_line, values), *told]

    def _commit(self, writes: list[tuple[str, Any]]) -> None:
        with self._connection.pipeline():
            for statement, values in writes:
                self._connection.execute(statement, values)
            self._connection.execute("COMMIT")
