"""The versions of the tables of an SQL store, and the statements that make them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final, NamedTuple, Protocol

from ...errors import StoreRefused

__all__ = ["VERSION", "Migration", "Migrator", "check_version", "migrations"]

#: The version of the tables that this release reads and writes.
VERSION: Final = 1


class Migration(NamedTuple):
    """The statements that lead to a version of the tables. Each may run again on tables that have the version.

    Args:
        version: The version.
        name: The name of the file.
        sql: The statements. They name the tables without a schema. No comment and no value contains a semicolon.
    """

    version: int
    name: str
    sql: str

    @property
    def statements(self) -> list[str]:
        lines = [line for line in self.sql.splitlines() if not line.lstrip().startswith("--")]
        return [statement.strip() for statement in "\n".join(lines).split(";") if statement.strip()]


class Migrator(Protocol):
    """The tables of one store. Each method raises StoreUnavailable if the server does not answer, or refuses."""

    def text(self) -> str:
        """Return the statements that make the tables, for an administrator to run. Asks no server."""
        ...

    def statements(self, version: int) -> list[str]:
        """Return the statements from the version before this one, for a migration of the user. Asks no server."""
        ...

    def check(self) -> None:
        """Check the version of the tables.

        Raises:
            StoreRefused: They are missing, or they have another version.
        """
        ...

    def migrate(self) -> list[str]:
        """Bring the tables to the version of this release. Return the names of the migrations that were run."""
        ...


def migrations(database: str, after: int = 0) -> Iterator[Migration]:
    """Yield the migrations behind a version of the tables, in their order.

    Args:
        database: The package of the database, ``"postgresql"``.
        after: The version of the tables; 0: there are none.
    """
    folder = files(f"{__package__}.{database}") / "migrations"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".sql") and (version := int(file.name[:4])) > after:
            yield Migration(version, file.name, file.read_text(encoding="utf-8"))


def check_version(found: int | None) -> None:
    """Check the version of the tables.

    Raises:
        StoreRefused: This release cannot use them.
    """
    if found is None or found < VERSION:
        raise StoreRefused(
            f"the lock store refused: its tables have version {found or 0}, and this celery-dlock needs version "
            f"{VERSION}: run `celery -A <app> dlock migrate`"
        )
    if found > VERSION:
        raise StoreRefused(
            f"the lock store refused: its tables have version {found}, and this celery-dlock knows version {VERSION}: "
            "install the celery-dlock that migrated them"
        )
