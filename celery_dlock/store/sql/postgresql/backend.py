"""The data of the store in PostgreSQL.

A write session locks the row of its lock name, so two transactions of one name run one after the other.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from psycopg.pq import TransactionStatus

from ....errors import GuardRefused
from ....keys.lock_name import ONE_LOCK, LockName, split_seat
from ...acquisition import kind_of
from ...base import NO_GUARD, ReleaseListener, ReleaseRequest
from ...engine.backend import Backend, Changes, Conflict, Listed, Wanted
from ...location import StoreLocation
from ...model import Acquired, AcquireRequest, Released, Renewal
from ...operator import Place as ListPlace
from ...rules.data import Head, LockRecord, Mark, MarkKind, Place, Timed, Waiter
from ...rules.texts import head_from_text, head_text, record_fields, waiter_from_texts, waiter_text
from ...server_model import StoreInfo
from ..guard import UserTransaction
from .connection import Connection, ConnectionPool
from .listener import WAKE_US, Listener
from .statements import Statements

__all__ = ["PostgreSQLBackend"]

#: Leases that one statement renews.
RENEWED_AT_ONCE: Final = 1000
#: Seconds between two removals of what has expired.
REMOVAL_SECONDS: Final = 1.0
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
#: The fields of a plain lock that the column ``holder`` has.
_HOLDER: Final = ("identity", "task", "task_id", "node", "pid")
#: The error of a transaction whose snapshot is older than a change of the row that it wants to lock.
_SERIALIZATION_FAILURE: Final = "40001"
_PLAIN: Final = {"acquisition", "token", "since", "ttl_ms", *_HOLDER}


class Row(NamedTuple):
    """The row of a lock name."""

    owner: str | None = None
    until_us: int = 0
    since_us: int = 0
    token: int = 0
    ttl_ms: int | None = None
    holder: str | None = None
    rest: str | None = None
    wake_us: int = 0

    @property
    def head(self) -> Head:
        if self.owner is None:
            return head_from_text(self.rest or "")
        holder = dict(zip(_HOLDER, json.loads(self.holder or "[]"), strict=True))
        lock = LockRecord(self.owner, token=self.token, since=self.since_us, ttl_ms=self.ttl_ms, **holder)
        return Head(locks={0: Timed(lock, self.until_us)})

    def with_head(self, head: Head, token: int, now: int) -> Row:
        """Return the row for a head that has changed.

        Args:
            head: The head.
            token: The highest token that was issued for the name.
            now: The time. The row of an empty head stays for a while, because most names are used again.
        """
        text = head_text(head)
        if not text:
            return Row(since_us=now, token=token)
        lock = head.locks.get(0)
        if lock is not None and lock.until is not None and head == Head(locks={0: lock}):
            record = lock.record
            if (
                record.token == token
                and kind_of(record.acquisition) == "owner"
                and record_fields(record).keys() <= _PLAIN
            ):
                holder = json.dumps([getattr(record, name) for name in _HOLDER])
                return Row(record.acquisition, lock.until, record.since, token, record.ttl_ms, holder)
        return Row(until_us=_last(head), since_us=now, token=token, rest=text)


def _last(head: Head) -> int:
    """Return the time from which nothing of a head exists; a time that never comes if something does not expire."""
    if head.sweeps or head.parked or head.waiting or head.delayed or head.dead:
        return _HIGHEST
    timed = *head.locks.values(), head.seats, head.claim, head.newest_call, head.replaced
    untils = [one.until for one in timed if one is not None]
    return max((_HIGHEST if until is None else until for until in untils), default=0)


class PostgreSQLBackend(Backend):
    """The data of one app.

    Args:
        location: The location of the server.
        timeout: Seconds that each statement may take.
        prefix: The start of every name of this app.

    Raises:
        ValueError: libpq does not know an option of the location.
    """

    def __init__(self, location: StoreLocation, timeout: float, prefix: str) -> None:
        self.shown, self.timeout = location.shown, timeout
        self.pool = ConnectionPool(location, timeout)
        self.sql = Statements(self.pool.schema)
        #: Every name begins with the first text, and is less than the second. No other prefix has names between.
        self._start = f"{quote(prefix, safe='')}:"
        self._end = f"{self._start[:-1]};"
        self._removed_to, self._next_removal = self._start, 0.0

    def key(self, name: LockName) -> str:
        """Return the name of a row. Rows are in the order of :class:`~celery_dlock.store.operator.Place`."""
        return f"{self._start}{name.bucket:03x}:{split_seat(name)[0]}"

    def _parts(self, key: str) -> tuple[int, str]:
        """Return the bucket and the text of a row's name."""
        bucket, _, text = key[len(self._start) :].partition(":")
        return int(bucket, 16), text

    @contextmanager
    def open(self, name: LockName, wanted: Wanted) -> Iterator[PostgreSQLSession]:
        refused = None
        with self.pool.lent(wanted.within) as connection:
            limit = str(math.ceil(self.timeout * 1000)) if self.pool.pooled else ""
            try:
                yield PostgreSQLSession(self.sql, connection, self.key(name), wanted, limit)
            except Conflict as conflict:  # the connection stays usable
                refused = conflict
            if connection.info.transaction_status != TransactionStatus.IDLE:
                connection.execute("ROLLBACK")
        if refused is not None:
            raise refused

    def guard_of(self, connection: Any) -> Callable[[LockName, int], bool]:
        user = UserTransaction(connection)

        def guard(name: LockName, token: int) -> bool:
            # All of these come after the commit of the guard, so that the snapshot of the transaction has it.
            here, read_only = user.ask(self.sql.can_guard) or (False, False)
            # Two databases may both have such tables.
            if not here or user.ask(self.sql.store_id) != self._ask(self.sql.store_id)[0]:
                raise GuardRefused(NO_GUARD)
            if read_only:
                raise GuardRefused("a transaction that is read-only, or on a replica, cannot be guarded")
            return self._lock_guard(user, self.key(name), token)

        return guard

    def _lock_guard(self, user: UserTransaction, key: str, token: int) -> bool:
        try:
            if user.ask(self.sql.lock_guard, (key, token)) is not None:
                return True
        except Exception as error:
            if getattr(error, "sqlstate", getattr(error, "pgcode", None)) != _SERIALIZATION_FAILURE:
                raise
        if self._ask(self.sql.has_guard, key, token):
            raise GuardRefused(
                "this transaction began before its guard: under REPEATABLE READ or SERIALIZABLE, call guard() before "
                "any other statement of the transaction"
            )
        return False

    def release_listener(self, name: LockName) -> ReleaseListener:
        return Listener(self.pool, self.sql, self.key(name))

    def places(self, listed: Listed, after: ListPlace | None, most: int) -> list[ListPlace]:
        statements = {"run": self.sql.runs, "dead": self.sql.dead_letters, "queue": self.sql.queues}
        name, detail = (
            (self._start, "") if after is None else (self.key(LockName(after.name, after.bucket)), after.detail)
        )
        values = {"name": name, "detail": detail, "end": self._end, "most": most}
        with self.pool.lent() as connection:
            found = connection.execute(statements.get(listed, self.sql.names), values).fetchall()
        return [ListPlace(*self._parts(key), one) for key, one in found]

    def due(self, buckets: Sequence[int], most: int, within_us: int) -> list[LockName]:
        self._remove_expired()
        wanted = [f"{bucket:03x}" for bucket in buckets]
        place = len(self._start) + 1
        found = []
        for key, rest, now in self._ask(self.sql.due, place, wanted, within_us, self._start, self._end, most):
            bucket, text = self._parts(key)
            sweeps = head_from_text(rest).sweeps.items()
            found += [(when, LockName(text, bucket, seats)) for seats, when in sweeps if when <= now + within_us]
        return [name for _, name in sorted(found)]

    def _remove_expired(self) -> None:
        """Remove some of what has expired, at most once a second."""
        if time.monotonic() < self._next_removal:
            return
        self._next_removal = time.monotonic() + REMOVAL_SECONDS
        sql = self.sql
        with self.pool.lent() as connection:
            connection.execute(sql.remove_marks)
            connection.execute(sql.remove_calls)
            connection.execute(sql.remove_guards)
            (last,) = connection.execute(sql.next_range, (self._removed_to, self._end)).fetchall()[0]
            if last is not None:
                connection.execute(sql.remove_names, (self._removed_to, last))
            self._removed_to = last or self._start

    def count(self) -> int:
        return int(self._ask(self.sql.count, self._start, self._end)[0][0])

    def now(self) -> float:
        return float(self._ask(self.sql.clock)[0][0]) / 1e6

    def info(self) -> StoreInfo:
        return StoreInfo(durable=bool(self._ask(self.sql.info)[0][0]), eviction="noeviction")

    def close(self) -> None:
        self.pool.close()

    def acquire_plain(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | None:
        plain = AcquireRequest(
            request.requester, request.identity, age_us=request.age_us, rank_us=request.rank_us, notify=request.notify,
            run_mark_ms=request.run_mark_ms, hold_if_unknown=request.hold_if_unknown, tick=request.tick,
            doubt_us=request.doubt_us,
        )  # fmt: skip
        if name.seats != ONE_LOCK or request != plain:
            return None
        identity = request.identity.digest if request.identity else ""
        holder = json.dumps([identity, *request.requester])
        found = self._ask(self.sql.acquire, self.key(name), acquisition, identity, ttl_ms, holder)
        if not found:
            return None
        token, since = found[0]
        return Acquired(token, since / 1e6, since - request.age_us if request.rank_us is None else request.rank_us)

    def release_plain(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released | None:
        plain = ReleaseRequest(
            final=ending.final, identity=ending.identity, requester=ending.requester, tick=ending.tick,
            seed=ending.seed, window_ms=ending.window_ms,
        )  # fmt: skip
        if name.seats != ONE_LOCK or ending != plain:
            return None
        found = self._ask(self.sql.release, self.key(name), acquisition)
        return Released(ours=True, duplicate_seen=False) if found else None

    def renew_plain(self, renewals: Sequence[Renewal], within: float | None) -> Sequence[bool | None]:
        answers: list[bool | None] = [None] * len(renewals)
        plain = [
            (self.key(one.name), one.acquisition, one.ttl_ms, number)
            for number, one in enumerate(renewals)
            if one.name.seats == ONE_LOCK and not one.fields and not one.stoppable
        ]
        with self.pool.lent(within) as connection:
            for first in range(0, len(plain), RENEWED_AT_ONCE):
                # In the order of names: so two such statements do not wait for each other.
                part = sorted(plain[first : first + RENEWED_AT_ONCE])
                names, owners, lives, numbers = map(list, zip(*part, strict=True))
                for (place,) in connection.execute(self.sql.renew, (names, owners, lives)).fetchall():
                    answers[numbers[place - 1]] = True
        return answers

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.pool.lent() as connection:
            return connection.execute(statement, values).fetchall()


class PostgreSQLSession:
    """A transaction on one lock name (:class:`~celery_dlock.store.rules.session.Session`).

    Args:
        sql: The statements.
        connection: A connection without a transaction.
        key: The name of the row.
        wanted: What to read at once.
        limit: Milliseconds after which the server ends a statement or an idle transaction; "": the session's own.
    """

    def __init__(self, sql: Statements, connection: Connection, key: str, wanted: Wanted, limit: str = "") -> None:
        self._sql, self._connection, self._key, self._limit = sql, connection, key, limit
        self._marks: dict[tuple[MarkKind, str], Mark] = {}
        self._waiters: dict[str, Waiter] = {}
        while not self._begin(wanted):
            # Between the two statements, another transaction may have removed the row again.
            connection.execute(sql.make, (key,))
        self.head = self._row.head
        self.next_token = max(self._row.token + 1, self._floor + 1, self.now)

    def _begin(self, wanted: Wanted) -> bool:
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
                marks = run(sql.marks, (key, *map(list, zip(*wanted.marks, strict=True))))
            if wanted.waiters:
                waiters = run(sql.waiters, (key, list(wanted.waiters)))
        found = row.fetchone()
        self._row = Row(*found) if found else Row()
        self.now, self._floor = now.fetchall()[0]
        self._read_marks, self._read_waiters = set(wanted.marks), set(wanted.waiters)
        if marks:
            self._marks = {(kind, name): Mark(text, until) for kind, name, text, until in marks.fetchall()}
        if waiters:
            self._waiters = dict(map(_waiter, waiters.fetchall()))
        return found is not None or not wanted.write

    def mark(self, kind: MarkKind, key: str) -> Mark | None:
        if (kind, key) not in self._read_marks:
            found = self._connection.execute(self._sql.marks, (self._key, [kind], [key])).fetchone()
            if found:
                self._marks[kind, key] = Mark(*found[2:])
            self._read_marks.add((kind, key))
        return self._marks.get((kind, key))

    def marks(self, kind: MarkKind) -> dict[str, Mark]:
        found = self._connection.execute(self._sql.marks_of_kind, (self._key, kind))
        return {key: Mark(text, until) for key, text, until in found}

    def waiter(self, identity: str) -> Waiter | None:
        if identity not in self._read_waiters:
            found = self._connection.execute(self._sql.waiters, (self._key, [identity]))
            self._waiters.update(map(_waiter, found))
            self._read_waiters.add(identity)
        return self._waiters.get(identity)

    def entries(self) -> dict[str, str]:
        return dict(self._connection.execute(self._sql.entries, (self._key,)).fetchall())

    def first_in(self, place: Place, most: int, low: int | None, high: int | None) -> list[tuple[str, Waiter]]:
        statement = self._sql.first_waiting if place == "waiting" else self._sql.first_delayed
        bounds = _LOWEST if low is None else low, _HIGHEST if high is None else high
        return list(map(_waiter, self._connection.execute(statement, (self._key, *bounds, most))))

    def count_before(self, place: Place, score: int, identity: str) -> int:
        statement = self._sql.before_waiting if place == "waiting" else self._sql.before_delayed
        return int(self._connection.execute(statement, (self._key, score, identity)).fetchall()[0][0])

    def end_guard(self, token: int) -> bool:
        self._connection.execute(self._sql.end_guard, (self._key, token))
        return self._connection.execute(self._sql.has_guard, (self._key, token)).fetchone() is None

    def commit(self, changes: Changes) -> None:
        sql, run, key = self._sql, self._connection.execute, self._key
        with self._connection.pipeline():
            if changes.head is not None or changes.token is not None:
                head = self.head if changes.head is None else changes.head
                row = self._row.with_head(head, max(self._row.token, changes.token or 0), self.now)
                sweep = min(head.sweeps.values(), default=None)
                run(sql.put_head, (*row[:-1], sweep, key))
            for identity, waiter in changes.waiters.items():
                if waiter is None:
                    run(sql.drop_waiter, (key, identity))
                else:
                    places = waiter.waiting, waiter.delayed, waiter.entry, waiter.dead
                    run(sql.put_waiter, (key, identity, *places, waiter_text(waiter), bool(waiter.shown)))
            for (kind, name), mark in changes.marks.items():
                if mark is None:
                    run(sql.drop_mark, (key, kind, name))
                else:
                    run(sql.put_mark, (key, kind, name, mark.text, mark.until))
            if changes.guard is not None:
                run(sql.put_guard, (key, changes.guard))
            if changes.wakes:
                run(sql.keep_wake, (WAKE_US, key, changes.wakes, key))
                run(sql.wake, (key, changes.wakes))
            run("COMMIT")


def _waiter(row: tuple[Any, ...]) -> tuple[str, Waiter]:
    return row[0], waiter_from_texts(*row[1:])
