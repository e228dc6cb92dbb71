"""Migrates the tables of a store in PostgreSQL."""

from __future__ import annotations

from ...location import StoreLocation
from ..migrations import Migrator, check_version, migrations
from .connection import Connection, ConnectionPool

__all__ = ["PostgreSQLMigrator"]

#: The advisory lock of migrations: two deployments migrate one after the other.
_LOCK = 0x646C6F636B


class PostgreSQLMigrator(Migrator):
    """The tables of one schema (:class:`~celery_dlock.store.sql.migrations.Migrator`).

    Args:
        location: The location of the server.
        timeout: Seconds that connecting may take. Migrations take as long as they take.
    """

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        self._pool = ConnectionPool(location, timeout)
        self._schema = self._pool.schema
        create = [] if self._schema == "public" else [f'CREATE SCHEMA IF NOT EXISTS "{self._schema}"']
        self._start = [*create, f'SET LOCAL search_path TO "{self._schema}"']

    def text(self) -> str:
        start = "".join(f"{statement};\n" for statement in self._start)
        files = "\n".join(f"-- {one.name}\n{one.sql}" for one in migrations("postgresql"))
        return f"BEGIN;\n{start}\n{files}\nCOMMIT;\n"

    def statements(self, version: int) -> list[str]:
        one = next(migrations("postgresql", after=version - 1))
        return [*self._start, *one.statements, "SET LOCAL search_path TO DEFAULT"]

    def check(self) -> None:
        with self._pool.bare() as connection:
            check_version(self._version(connection))

    def migrate(self) -> list[str]:
        """Run all migrations in one transaction."""
        with self._pool.bare() as connection, connection.transaction():
            connection.reply_within = None
            run = connection.execute
            run("SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = 0")
            run("SELECT pg_advisory_xact_lock(%s::bigint)", (_LOCK,))
            if not run("SELECT FROM pg_namespace WHERE nspname = %s", (self._schema,)).fetchall():
                run(f'CREATE SCHEMA "{self._schema}"')
            version = self._version(connection)
            run(f'SET LOCAL search_path TO "{self._schema}"')
            done = list(migrations("postgresql", after=version))
            for one in done:
                run(one.sql)
            check_version(self._version(connection))
        return [one.name for one in done]

    def _version(self, connection: Connection) -> int:
        """Return the version of the tables; 0 if there are none."""
        table = f'"{self._schema}".dlock_meta'
        if connection.execute("SELECT to_regclass(%s)", (table,)).fetchall() == [(None,)]:
            return 0
        found = connection.execute(f"SELECT v FROM {table} WHERE k = 'schema_version'").fetchall()  # noqa: S608  # ours
        return int(found[0][0]) if found else 0
