"""Lock stores in a database for tests that run with any store: their servers, and what their tables say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import psycopg
import pymysql

from celery_dlock.keys.lock_name import LockName, split_seat
from celery_dlock.store.acquisition import kind_of
from celery_dlock.store.sql.rows import HIGHEST, Row
from tests.support import mysql_stores, postgresql_stores
from tests.support.mariadb import ADMINISTRATOR, MariaDB, running_mariadb
from tests.support.postgresql import own_postgresql
from tests.support.processes import HOST

__all__ = ["DATABASES", "Database", "HeldLock", "LockTables", "lock_tables", "running_database"]

#: The databases that keep locks, by the scheme of their URLs.
DATABASES: Final = ("postgresql", "mysql")

_ROW: Final = "owner, until_us, since_us, token, ttl_ms, holder, rest, wake_us"
_NOW: Final = {
    "postgresql": "(extract(epoch from clock_timestamp()) * 1000000)::bigint",
    "mysql": "timestampdiff(microsecond, '1970-01-01', convert_tz(sysdate(6), @@session.time_zone, '+00:00'))",
}


class Database(Protocol):
    """A server that a test can kill, restart and pause."""

    port: int

    @property
    def url(self) -> str: ...
    @property
    def answering(self) -> bool: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class HeldLock(NamedTuple):
    """A held lock.

    Args:
        name: The name of its row.
        token: Its fencing token.
        until_us: When it ends without a renewal, by the server's clock.
        left_ms: Milliseconds until then.
    """

    name: str
    token: int
    until_us: int
    left_ms: int


class LockTables:
    """The tables of one store, read and emptied past the library, with a connection of our own for each call.

    Args:
        server: The server.
        place: The schema (PostgreSQL) or the database (MariaDB).
    """

    def __init__(self, server: Database, place: str) -> None:
        self.server, self.place = server, place
        self.scheme = urlsplit(server.url).scheme

    def url(self, port: int = 0) -> str:
        """Return the URL of the store. ``port``: that of a proxy before the server."""
        if isinstance(self.server, MariaDB):
            return mysql_stores.url_of(self.server, self.place, port=port)
        return postgresql_stores.url_of(
            self.server.url.replace(f":{self.server.port}/", f":{port or self.server.port}/"), self.place
        )

    def held(self, name: str | None = None) -> list[HeldLock]:
        """Return the locks that a body holds, or that of one row only."""
        which = "" if name is None else " WHERE name = %s"
        rows = self._ask(
            f"SELECT {_NOW[self.scheme]}, name, {_ROW} FROM dlock_name{which}", *([] if name is None else [name])
        )
        found = []
        for now, text, *columns in rows:
            for timed in Row(*columns).head.locks.values():
                until = HIGHEST if timed.until is None else timed.until
                if until > now and kind_of(timed.record.acquisition) == "owner":
                    found.append(HeldLock(text, timed.record.token, until, (until - now) // 1000))
        return found

    def parked(self) -> list[tuple[str, str]]:
        """Return each parked message with the word "messages", and each dead letter with the word "dead"."""
        rows = self._ask("SELECT entry, dead FROM dlock_waiter")
        return [(word, text) for row in rows for word, text in zip(("messages", "dead"), row, strict=True) if text]

    def row(self, name: LockName) -> str:
        """Return the name of the row of a lock of an app with the default prefix."""
        return f"dlock:{name.bucket:03x}:{split_seat(name)[0]}"

    def empty(self) -> None:
        """Forget everything but the tokens."""
        for table in ("dlock_waiter", "dlock_mark", "dlock_call", "dlock_name"):
            self._ask(f"DELETE FROM {table}")

    def end_sessions(self) -> None:
        """End every session of the library."""
        if isinstance(self.server, MariaDB):
            for (number,) in self._ask(
                "SELECT id FROM information_schema.processlist WHERE user = %s", mysql_stores.USER
            ):
                self._ask(f"KILL {number}", missing=1094)
        else:
            self._ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", postgresql_stores.USER
            )

    def _ask(self, statement: str, *values: Any, missing: int = 0) -> list[tuple[Any, ...]]:
        with closing(self._connection()) as connection, connection.cursor() as cursor:
            try:
                cursor.execute(statement, values or None)
            except pymysql.OperationalError as error:
                if error.args[0] != missing:
                    raise
                return []
            return [tuple(map(_text, row)) for row in cursor.fetchall()] if cursor.description else []

    def _connection(self) -> Any:
        if isinstance(self.server, MariaDB):
            return pymysql.connect(
                host=HOST, port=self.server.port, user=ADMINISTRATOR, database=self.place, autocommit=True,
                connect_timeout=5, read_timeout=5,
            )  # fmt: skip
        path = f"-c search_path={self.place} -c statement_timeout=5000"
        return psycopg.connect(self.server.url, autocommit=True, options=path, connect_timeout=5)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


@contextmanager
def running_database(scheme: str) -> Iterator[Database]:
    """Return a context with a fresh server of the kind that this scheme names."""
    with own_postgresql() if scheme == "postgresql" else running_mariadb() as server:
        yield server


@contextmanager
def lock_tables(server: Database) -> Iterator[LockTables]:
    """Return a context with the tables of a store of their own."""
    if isinstance(server, MariaDB):
        with mysql_stores.migrated_database(server) as place:
            yield LockTables(server, place)
    else:
        with postgresql_stores.migrated_schema(server.url) as place:
            yield LockTables(server, place)
