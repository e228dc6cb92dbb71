"""Migrates the tables of a store in MySQL or MariaDB."""

from __future__ import annotations

from typing import Final

from ....errors import StoreNotReady
from ...location import StoreLocation
from ..migrations import Migrator, check_version, migrations
from .connection import Connection, ConnectionPool

__all__ = ["MySQLMigrator"]

#: Seconds to wait for another migration of the same database.
_WAIT_SECONDS: Final = 600


class MySQLMigrator(Migrator):
    """The tables of one database (:class:`~celery_dlock.store.sql.migrations.Migrator`).

    The server commits after each statement that makes a table. So a migration that failed is run again as a whole.

    Args:
        location: The location of the server.
        timeout: Seconds that connecting may take. Migrations take as long as they take.
    """

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        self._pool = ConnectionPool(location, timeout)

    def text(self) -> str:
        return "\n".join(f"-- {one.name}\n{one.sql}" for one in migrations("mysql"))

    def statements(self, version: int) -> list[str]:
        return next(migrations("mysql", after=version - 1)).statements

    def check(self) -> None:
        with self._pool.bare() as connection:
            check_version(self._version(connection))

    def migrate(self) -> list[str]:
        with self._pool.bare() as connection:
            connection.reply_within = None
            (database,) = connection.ask("SELECT DATABASE()").rows[0]
            # The lock ends with the connection. Locks of the server have names of at most 64 characters.
            lock = f"dlock {database}"[:64]
            if connection.ask("SELECT GET_LOCK(%s, %s)", (lock, _WAIT_SECONDS)).rows != [(1,)]:
                raise StoreNotReady(f"another migration has been running for {_WAIT_SECONDS} s")
            done = list(migrations("mysql", after=self._version(connection)))
            for one in done:
                for statement in one.statements:
                    connection.ask(statement)
            check_version(self._version(connection))
        return [one.name for one in done]

    @staticmethod
    def _version(connection: Connection) -> int:
        """Return the version of the tables; 0 if there are none."""
        tables = connection.ask(
            "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE()"
            " AND table_name = 'dlock_meta'"
        )
        if tables.rows == [(0,)]:
            return 0
        found = connection.ask("SELECT v FROM dlock_meta WHERE k = 'schema_version'").rows
        return int(found[0][0]) if found else 0
