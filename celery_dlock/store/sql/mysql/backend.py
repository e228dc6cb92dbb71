"""The data of the store in MySQL or MariaDB (:mod:`celery_dlock.store.sql.backend`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from pymysql.constants import ER

from ....errors import GuardRefused, ReplyTimeout
from ....keys.lock_name import LockName
from ...base import NO_GUARD, ReleaseListener
from ...engine.backend import Changes, Conflict, Wanted
from ...location import StoreLocation
from ...model import Released
from ...rules.data import Guard
from ..backend import Lease, SQLBackend
from ..guard import BEGAN_BEFORE, NO_TRANSACTION, UserTransaction
from ..rows import WAKE_US, Row
from ..session import SQLSession
from .connection import Connection, ConnectionPool
from .listener import Listener
from .server_errors import RowLocked
from .statements import Statements

__all__ = ["MySQLBackend"]

_COMMIT: Final = ("COMMIT", ())
_READ_ONLY: Final = "a transaction that is read-only, or on a replica, cannot be guarded"
#: Why a connection of the user refuses a statement of its guard.
_REFUSALS: Final = {
    1305: NO_TRANSACTION,  # the savepoint ended with its statement
    ER.NO_SUCH_TABLE: NO_GUARD,
    ER.BAD_DB_ERROR: NO_GUARD,
    1792: _READ_ONLY,
    1020: BEGAN_BEFORE,  # MariaDB's innodb_snapshot_isolation
}


class MySQLBackend(SQLBackend):
    """The data of one app.

    Args:
        location: The location of the server.
        timeout: Seconds that each statement may take.
        prefix: The start of every name of this app.
        clock: The expression for the time in microseconds; None: the server's clock. Tests have a clock of their own.

    Raises:
        ValueError: The location has an unknown option.
    """

    def __init__(self, location: StoreLocation, timeout: float, prefix: str, clock: str | None = None) -> None:
        self.pool = ConnectionPool(location, timeout)
        self.sql = Statements(str(location.options.get("database", "")), clock)
        super().__init__(location, timeout, prefix, self.sql)

    @contextmanager
    def open(self, name: LockName, wanted: Wanted) -> Iterator[MySQLSession]:
        try:
            with self.pool.lent(wanted.within) as connection:
                session = MySQLSession(self.sql, connection, self.key(name), wanted)
                yield session
                if not session.ended:
                    connection.ask("ROLLBACK")
        except RowLocked as error:
            raise Conflict(f"another transaction had locked the row of {name.text}") from error

    def guard_of(self, connection: Any) -> Callable[[LockName, Guard], bool]:
        user = UserTransaction(connection)
        # Without a transaction, there is no savepoint to release. Neither server tells every user in another way.
        _ask_user(user, "SAVEPOINT dlock_guard")
        _ask_user(user, "RELEASE SAVEPOINT dlock_guard")

        def guard(name: LockName, made: Guard) -> bool:
            # All of these come after the commit of the guard, so that the snapshot of the transaction has it.
            theirs, ours = _ask_user(user, self.sql.store_id), self._ask(self.sql.store_id)[0]
            if theirs is None or theirs[0] != ours[0]:
                raise GuardRefused(NO_GUARD)
            if theirs != ours:
                raise GuardRefused(_READ_ONLY)
            return self._lock_guard(user, self.key(name), made)

        return guard

    def _lock_guard(self, user: UserTransaction, key: str, made: Guard) -> bool:
        # Bytes: the connection of the user may have another character set.
        theirs = key.encode(), made.token
        if _ask_user(user, self.sql.sees_guard, theirs) == (0,):
            if self._ask(self.sql.has_guard, (key, made.token)):
                raise GuardRefused(BEGAN_BEFORE)
            return False
        if _ask_user(user, self.sql.lock_guard, theirs) is None:
            return False
        if made.settled is not None:
            tick, mark = made.settled.tick, made.settled.mark
            values = key.encode(), b"run", tick.encode(), mark.text.encode(), mark.until
            _ask_user(user, self.sql.settle, values)
        return True

    def release_listener(self, name: LockName) -> ReleaseListener:
        return Listener(self.pool, self.sql, self.key(name))

    def close(self) -> None:
        self.pool.close()

    def _ask(self, statement: str, values: Any = ()) -> list[tuple[Any, ...]]:
        with self.pool.lent() as connection:
            return connection.ask(statement, values).rows

    def _remove(self, after: str) -> str | None:
        sql = self.sql
        # The next sweep tries a failed removal again.
        with suppress(RowLocked, ReplyTimeout), self.pool.lent() as connection:
            for find, remove in ((sql.old_marks, sql.remove_marks), (sql.old_calls, sql.remove_calls)):
                old = connection.run((sql.begin, ()), (find, ()))[1].rows
                connection.run(*([(remove, (old,))] if old else []), _COMMIT)
            if old := connection.ask(sql.old_guards).rows:
                free = connection.run((sql.begin, ()), (sql.free_guards, (old,)))[1].rows
                connection.run(*([(sql.remove_guards, (free,))] if free else []), _COMMIT)
            ((last,),) = connection.ask(sql.next_range, (after, self._end)).rows
            if last is not None:
                old = connection.run((sql.begin, ()), (sql.old_names, (after, last)))[1].rows
                guarded = connection.ask(sql.guarded, ([name for name, _ in old],)).rows if old else []
                tokens = {name: token for name, token in old if (name,) not in guarded}
                floor = max(tokens.values(), default=0)
                removal = [(sql.raise_floor, (floor,)), (sql.remove_names, (list(tokens),))] if tokens else []
                connection.run(*removal, _COMMIT)
            return None if last is None else str(last)
        return after

    # A plain path that a deadlock ended has written nothing: the rules do the same in a transaction.

    def _acquire(self, values: dict[str, Any]) -> tuple[int, int] | None:
        with suppress(RowLocked), self.pool.lent() as connection:
            taken, found = connection.run((self.sql.acquire, values), (self.sql.acquired, values))
            if taken.changed and found.rows:
                token, since = found.rows[0]
                return token, since
        return None

    def _release(self, key: str, acquisition: str) -> Released | None:
        with suppress(RowLocked), self.pool.lent() as connection:
            if connection.ask(self.sql.release, (key, acquisition)).changed:
                return Released(ours=True, duplicate_seen=False)
        return None

    def _renew(self, leases: list[Lease], within: float | None) -> list[int]:
        sql, lives = self.sql, defaultdict[int, dict[tuple[str, str], int]](dict)
        for key, owner, ttl_ms, number in leases:
            lives[ttl_ms][key, owner] = number
        groups = [{"ttl_ms": ttl_ms, "leases": list(numbers)} for ttl_ms, numbers in lives.items()]
        with suppress(RowLocked), self.pool.lent(within) as connection:
            at_once = sql.renew_all if connection.mariadb else sql.renew_all_waiting
            results = connection.run(*((at_once, values) for values in groups))
            if sum(result.changed for result in results) == len(leases):
                return [lease.number for lease in leases]
        # Some are lost, did not change, or are locked by another transaction. To find them takes longer.
        with suppress(RowLocked), self.pool.lent(within) as connection:
            reads = [(sql.renewable, values) for values in groups]
            found = connection.run((sql.renew_at, ()), (sql.begin, ()), *reads)[2:]
            renewals = [
                (sql.renew, {"ttl_ms": values["ttl_ms"], "leases": result.rows})
                for values, result in zip(groups, found, strict=True)
                if result.rows
            ]
            connection.run(*renewals, _COMMIT)
            kept = zip(lives.values(), found, strict=True)
            return [numbers[key, owner] for numbers, result in kept for key, owner in result.rows]
        return []


def _ask_user(user: UserTransaction, statement: str, values: tuple[Any, ...] = ()) -> Any:
    """Return the first row of a statement in the transaction of the user."""
    try:
        return user.ask(statement, values)
    except Exception as error:
        number = error.args[0] if error.args else None
        if number not in _REFUSALS:
            raise
        raise GuardRefused(_REFUSALS[number]) from error


class MySQLSession(SQLSession):
    """A transaction on one lock name."""

    def __init__(self, sql: Statements, connection: Connection, key: str, wanted: Wanted) -> None:
        self._sql, self._connection = sql, connection
        #: Whether the transaction has been committed.
        self.ended = False
        super().__init__(sql, key, wanted)

    def _read(self, wanted: Wanted) -> None:
        sql = self._sql
        starts = [sql.begin, sql.lock] if wanted.write else [*sql.begin_reading, sql.head]
        if not self._read_after(starts, wanted) and wanted.write:
            # The row exists from now on, and is ours: it vanishes if nothing is committed.
            self._read_after([sql.make, sql.lock], wanted)

    def _read_after(self, starts: Sequence[str], wanted: Wanted) -> bool:
        """Read everything in one round trip. Return whether the row exists.

        Args:
            starts: The first statements. The last of them reads the row.
            wanted: What else the rule will read.
        """
        sql, key = self._sql, self._key
        reads: list[tuple[str, Any]] = [(text, (key,) if "%s" in text else ()) for text in starts]
        reads.append((sql.now, ()))
        if wanted.marks:
            reads.append((sql.marks, self._marks_asked(wanted.marks)))
        if wanted.waiters:
            reads.append((sql.waiters, (key, wanted.waiters)))
        rows, ((self.now, self._floor),), *more = [
            one.rows for one in self._connection.run(*reads)[len(starts) - 1 :]
        ]  # fmt: skip
        self._row = Row(*rows[0]) if rows else Row()
        self._marks, self._waiters = {}, {}
        self._note(more[0] if wanted.marks else (), more[-1] if wanted.waiters else ())
        return bool(rows)

    def _ask(self, statement: str, values: Any) -> list[tuple[Any, ...]]:
        return self._connection.ask(statement, values).rows

    def _end_guard(self, guard: tuple[str, int]) -> None:
        if self._ask(self._sql.free_guard, guard):
            self._connection.ask(self._sql.end_guard, guard)

    def _wakes(self, changes: Changes, row: Row) -> list[tuple[str, Any]]:
        del row
        wake = {"name": self._key, "wakes": changes.wakes, "kept_us": WAKE_US}
        return [(self._sql.keep_wake, wake), (self._sql.wake, wake)] if changes.wakes else []

    def _commit(self, writes: list[tuple[str, Any]]) -> None:
        self._connection.run(*writes, _COMMIT)
        self.ended = True
