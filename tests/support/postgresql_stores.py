"""Lock stores in PostgreSQL for tests: each has a schema of its own, and a user with the documented rights only."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

import psycopg

from celery_dlock.store.location import StoreLocation
from celery_dlock.store.sql.postgresql.migrate import PostgreSQLMigrator

__all__ = ["USER", "administrator", "migrated_schema", "own_schema", "url_of"]

#: The user that keeps locks.
USER = "dlock"


def url_of(server: str, schema: str, *, user: str = USER, **options: str) -> str:
    """Return the URL of a store in a schema of the server."""
    parts = urlsplit(server)
    return f"postgresql://{user}@{parts.hostname}:{parts.port}{parts.path}?{urlencode({'schema': schema} | options)}"


@contextmanager
def administrator(server: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server, autocommit=True) as connection:
        yield connection


@contextmanager
def own_schema(server: str) -> Iterator[str]:
    """Return a context with the name of a schema that does not exist yet, and is dropped afterwards."""
    schema = f"s{uuid.uuid4().hex[:12]}"
    with administrator(server) as admin:
        if not admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (USER,)).fetchall():
            admin.execute(f"CREATE ROLE {USER} LOGIN")
    try:
        yield schema
    finally:
        # Another connection: a test may have killed the server and started it again.
        with administrator(server) as admin:
            admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


@contextmanager
def migrated_schema(server: str) -> Iterator[str]:
    """Return a context with the name of a schema that has the tables, and a user that may use them."""
    with own_schema(server) as schema:
        location = StoreLocation.of(url_of(server, schema, user="postgres"))
        PostgreSQLMigrator(location, 10).migrate()
        with administrator(server) as admin:
            admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO {USER}")
            admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {USER}")
        yield schema
