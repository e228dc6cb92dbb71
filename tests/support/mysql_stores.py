"""Lock stores in MariaDB for tests: each has a database of its own, and a user with the documented rights only."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pymysql

from celery_dlock.store.location import StoreLocation
from celery_dlock.store.sql.mysql.migrate import MySQLMigrator
from tests.support.mariadb import ADMINISTRATOR, MariaDB
from tests.support.processes import HOST

__all__ = ["USER", "administrator", "migrated_database", "own_database", "url_of"]

#: The user that keeps locks.
USER = "dlock"


def url_of(server: MariaDB, database: str, *, user: str = USER, query: str = "", port: int = 0) -> str:
    """Return the URL of a store in a database of the server. ``port``: that of a proxy before the server."""
    return f"mysql://{user}@{HOST}:{port or server.port}/{database}{query and '?'}{query}"


@contextmanager
def administrator(server: MariaDB) -> Iterator[Any]:
    """Return a context with a cursor."""
    with pymysql.connect(host=HOST, port=server.port, user=ADMINISTRATOR, autocommit=True) as connection:
        yield connection.cursor()


@contextmanager
def own_database(server: MariaDB) -> Iterator[str]:
    """Return a context with the name of an empty database, which is dropped afterwards."""
    database = f"d{uuid.uuid4().hex[:12]}"
    with administrator(server) as admin:
        admin.execute(f"CREATE USER IF NOT EXISTS {USER}@'{HOST}'")
        admin.execute(f"CREATE DATABASE {database}")
    try:
        yield database
    finally:
        # Another connection: a test may have killed the server and started it again.
        with administrator(server) as admin:
            admin.execute(f"DROP DATABASE {database}")


@contextmanager
def migrated_database(server: MariaDB) -> Iterator[str]:
    """Return a context with the name of a database that has the tables, and a user that may use them."""
    with own_database(server) as database:
        MySQLMigrator(StoreLocation.of(url_of(server, database, user=ADMINISTRATOR)), 10).migrate()
        with administrator(server) as admin:
            admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO {USER}@'{HOST}'")
        yield database
