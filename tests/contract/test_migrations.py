"""The tables of a store in SQL, made by a migration of Django or of Alembic."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from alembic import command
from alembic.config import Config
from celery import Celery

from celery_dlock.control import LockControl
from celery_dlock.errors import StoreRefused
from celery_dlock.store.factory import open_migrator
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.sql.migrations import VERSION, Migrator, migrations
from tests.support import mysql_stores, postgresql_stores
from tests.support.mariadb import running_mariadb
from tests.support.processes import ROOT

pytestmark = pytest.mark.servers

#: The database of the project is on the server of the fixture ``postgresql``.
SCHEMA = "locks"


class Place(NamedTuple):
    """A place without tables: the URL of the locks, and the same database for SQLAlchemy and for Django."""

    dlock_url: str
    sqlalchemy: str
    django: dict[str, Any]

    @property
    def migrator(self) -> Migrator:
        return open_migrator([StoreLocation.of(self.dlock_url)], timeout=10)

    def migrate_by_django(self, *command: str, dlock_url: str = "") -> str:
        run = [sys.executable, "-m", "tests.contract.django_migration", dlock_url or self.dlock_url]
        words = [*run, json.dumps(self.django), *(command or ("migrate", "--verbosity=0"))]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout

    def missing(self) -> bool:
        """Return whether there are no tables, or not all."""
        try:
            self.migrator.check()
        except StoreRefused:
            return True
        return False


@pytest.fixture(params=["postgresql", "mariadb"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "postgresql":
        server = request.getfixturevalue("postgresql")
        parts = urlsplit(server)
        with postgresql_stores.administrator(server) as admin:
            admin.execute("CREATE DATABASE project")
        try:
            at = f"postgres@{parts.hostname}:{parts.port}/project"
            django = {"ENGINE": "django.db.backends.postgresql", "NAME": "project", "USER": "postgres"}
            django |= {"HOST": str(parts.hostname), "PORT": str(parts.port)}
            yield Place(f"postgresql://{at}?schema={SCHEMA}", f"postgresql+psycopg://{at}", django)
        finally:
            with postgresql_stores.administrator(server) as admin:
                admin.execute("DROP DATABASE project WITH (FORCE)")
        return
    with running_mariadb() as mariadb, mysql_stores.own_database(mariadb) as name:
        at = mysql_stores.url_of(mariadb, name, user="root")
        django = {"ENGINE": "django.db.backends.mysql", "NAME": name, "USER": "root", "HOST": "127.0.0.1"}
        django["PORT"] = str(mariadb.port)
        yield Place(at, at.replace("mysql://", "mysql+pymysql://"), django)


def test_django_migrate_makes_the_tables_of_a_store_in_its_database(place: Place) -> None:
    assert place.missing()
    place.migrate_by_django()
    place.migrator.check()


def test_django_migrate_leaves_tables_of_dlock_migrate_as_they_are(place: Place) -> None:
    place.migrator.migrate()
    place.migrate_by_django()
    place.migrator.check()
    assert place.migrator.migrate() == []


def test_django_migrate_makes_no_tables_for_a_store_elsewhere(place: Place) -> None:
    for dlock_url in ("redis://localhost", place.dlock_url.replace("/project", "/other").replace("/d", "/x")):
        place.migrate_by_django(dlock_url=dlock_url)
        assert place.missing()


def test_django_has_a_migration_for_each_version_and_for_its_permissions(place: Place) -> None:
    place.migrate_by_django("makemigrations", "--check", "--dry-run", "celery_dlock")
    shown = place.migrate_by_django("showmigrations", "celery_dlock")
    assert shown.count("[ ]") == VERSION
    assert "CREATE TABLE IF NOT EXISTS dlock_name" in place.migrate_by_django("sqlmigrate", "celery_dlock", "0001")


ENVIRONMENT = """
from alembic import context
from sqlalchemy import create_engine, pool

with create_engine(context.config.get_main_option("sqlalchemy.url"), poolclass=pool.NullPool).connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
"""
#: As docs/how-to/keep-locks-in-postgresql.md shows it.
REVISION = """
from alembic import op
from celery_dlock.control import LockControl
from tests_alembic_app import app

revision, down_revision = "1", None


def upgrade():
    for statement in LockControl(app).table_statements(1):
        op.execute(statement)
"""


def test_alembic_upgrade_makes_the_tables(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dlock_url = place.dlock_url
    monkeypatch.setitem(sys.modules, "tests_alembic_app", type(sys)("tests_alembic_app"))
    sys.modules["tests_alembic_app"].app = app  # type: ignore[attr-defined]  # a module of this test
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "versions" / "1_locks.py").write_text(REVISION)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", place.sqlalchemy)
    command.upgrade(config, "head")
    place.migrator.check()


@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_statements_of_a_migration_are_those_of_its_file(database: str) -> None:
    (one,) = migrations(database)
    assert [statement.split()[0] for statement in one.statements].count("CREATE") == one.sql.count("\nCREATE ")


def test_table_statements_are_of_a_store_with_tables() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.dlock_url = "redis://localhost"
    with LockControl(app) as control, pytest.raises(Exception, match="has no tables"):
        control.table_statements(1)
