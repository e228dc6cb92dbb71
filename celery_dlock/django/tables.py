"""The tables of a lock store in the project's own database, as a migration of Django."""

from __future__ import annotations

from typing import Any

from celery.app import app_or_default
from django.db.migrations.operations.base import Operation

from ..errors import NoLockStore
from ..runtime import Runtime
from ..store.factory import open_migrator

__all__ = ["MakeTables"]


class MakeTables(Operation):
    """Bring the tables of the lock store to a version, if ``dlock_url`` names the database that is migrated.

    For another store, this does nothing. It changes nothing either if ``dlock migrate`` has run before.

    Args:
        version: The version.
    """

    reduces_to_sql = True
    reversible = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: no model has these tables."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        for statement in _statements(schema_editor.connection, self.version):
            schema_editor.execute(statement)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Keep the tables: locks may be held."""

    def describe(self) -> str:
        return f"Tables of the lock store, version {self.version}"


def _statements(connection: Any, version: int) -> list[str]:
    runtime = Runtime.of(app_or_default())
    try:
        settings = runtime.settings
    except NoLockStore:
        return []
    location = settings.locations[0]
    names = location.options.get("dbname"), location.options.get("database")
    if location.kind != connection.vendor or connection.settings_dict["NAME"] not in names:
        return []
    return open_migrator(settings.locations, timeout=settings.timeout).statements(version)
