"""Stores in PostgreSQL and MariaDB, and connections of users to their servers, as tests of both use them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql

from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation

__all__ = ["a_store", "connected_user", "execute", "server_url"]


def a_store(url: str, timeout: float = 5.0) -> EngineStore:
    made = open_store((StoreLocation.of(url),), timeout=timeout, prefix="dlock")
    assert isinstance(made, EngineStore)
    return made


def execute(store: EngineStore, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Run a statement on a connection of the store, and return its rows."""
    pool: Any = store.backend.pool  # type: ignore[attr-defined]  # of both SQL backends
    with pool.lent() as connection:
        if hasattr(connection, "ask"):
            return connection.ask(statement, values).rows  # type: ignore[no-any-return]
        cursor = connection.execute(statement.replace("dlock_", f'"{pool.schema}".dlock_'), values)
        return cursor.fetchall() if cursor.description else []


def server_url(url: str) -> str:
    """Return the URL of a user who may do everything, in a database that is not the store's in MariaDB."""
    parts = urlsplit(url)
    user, database = ("postgres", "postgres") if parts.scheme == "postgresql" else ("root", "")
    return f"{parts.scheme}://{user}@{parts.hostname}:{parts.port}/{database}"


def connected_user(url: str) -> Any:
    """Return a connection of a user, by :func:`server_url`, with ``execute`` and ``transaction`` as psycopg has them.

    It is a context manager that closes it.
    """
    parts = urlsplit(url)
    if parts.scheme == "postgresql":
        return psycopg.connect(url, autocommit=True)
    return _MySQLUser(host=parts.hostname, port=parts.port, user=parts.username, autocommit=True)


class _MySQLUser(pymysql.Connection):  # type: ignore[type-arg]  # its stubs have a parameter that the class has not
    """A connection of PyMySQL, which is used as one of psycopg."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.execute("CREATE DATABASE IF NOT EXISTS users_own")
        self.select_db("users_own")

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> Any:
        cursor = self.cursor()
        cursor.execute(statement, values)
        return cursor

    @contextmanager
    def transaction(self, *, force_rollback: bool = False) -> Iterator[None]:
        """Return a context with a transaction, or with a savepoint in one. ``psycopg.Rollback`` rolls it back."""
        inner = not self.get_autocommit()
        if inner:
            self.execute("SAVEPOINT inner_one")
        else:
            # It begins with the next statement, so that its isolation level can be set.
            self.autocommit(False)
        try:
            yield
        except BaseException as error:
            force_rollback = True
            if not isinstance(error, psycopg.Rollback):
                raise
        finally:
            if inner:
                self.execute(f"{'ROLLBACK TO' if force_rollback else 'RELEASE'} SAVEPOINT inner_one")
            else:
                self.rollback() if force_rollback else self.commit()
                self.autocommit(True)
