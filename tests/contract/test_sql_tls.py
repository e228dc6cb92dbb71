"""TLS to both databases: the certificate of the server is verified, and each refusal names the option to set."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from celery_dlock.errors import StoreRefused
from celery_dlock.store.factory import open_migrator
from celery_dlock.store.location import StoreLocation
from tests.contract.sql_helpers import a_store, execute
from tests.support import mysql_stores, postgresql_stores
from tests.support.mariadb import MariaDB, running_mariadb
from tests.support.postgresql import running_postgresql
from tests.support.tls import make_certificates

pytestmark = [pytest.mark.servers, pytest.mark.invariant("store-errors-name-the-remedy")]

#: Makes the URL of the store, with options of the driver.
UrlOf = Callable[..., str]


def certificates(user: str) -> Path:
    """Return a folder with certificates that a server of this user reads."""
    folder = Path(tempfile.mkdtemp(prefix="tls-"))
    make_certificates(folder)
    folder.chmod(0o755)
    for file in folder.iterdir():
        shutil.chown(file, user, user)
    (folder / "server.key").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def postgresql_tls() -> Iterator[tuple[UrlOf, Path]]:
    folder = certificates("postgres")
    options = {"ssl": "on", "ssl_cert_file": folder / "server.crt", "ssl_key_file": folder / "server.key"}
    words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
    with running_postgresql(*words) as server, postgresql_stores.migrated_schema(server) as schema:
        yield lambda **more: postgresql_stores.url_of(server, schema, **more), folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def mariadb_tls() -> Iterator[tuple[UrlOf, Path]]:
    folder = certificates("mysql")
    options = f"--ssl-cert={folder / 'server.crt'}", f"--ssl-key={folder / 'server.key'}"
    with (
        running_mariadb(*options) as server,
        mysql_stores.migrated_database(server) as database,
        mysql_stores.administrator(server) as admin,
    ):
        admin.execute("SET GLOBAL require_secure_transport = ON")

        def url_of(**more: Any) -> str:
            query = "&".join(f"{name}={value}" for name, value in more.items())
            return mysql_stores.url_of(server, database, query=query)

        yield url_of, folder
    shutil.rmtree(folder)


def test_postgresql_is_verified_and_encrypted(postgresql_tls: tuple[UrlOf, Path]) -> None:
    url_of, folder = postgresql_tls
    with closing(a_store(url_of(sslmode="verify-full", sslrootcert=str(folder / "ca.crt")))) as store:
        assert execute(store, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]


def test_mariadb_is_verified_and_encrypted(mariadb_tls: tuple[UrlOf, Path]) -> None:
    url_of, folder = mariadb_tls
    with closing(a_store(url_of(ssl_ca=folder / "ca.crt", ssl_verify_identity="true"))) as store:
        ((_, cipher),) = execute(store, "SHOW STATUS LIKE 'Ssl_cipher'")
        assert cipher


def refusal(url: str) -> str:
    with pytest.raises(StoreRefused) as raised:
        open_migrator([StoreLocation.of(url)], timeout=5).check()
    return str(raised.value)


def test_certificate_of_another_authority_is_refused(
    postgresql_tls: tuple[UrlOf, Path], mariadb_tls: tuple[UrlOf, Path], tmp_path: Path
) -> None:
    make_certificates(tmp_path)
    other = tmp_path / "ca.crt"
    assert "let sslrootcert name its CA" in refusal(postgresql_tls[0](sslmode="verify-full", sslrootcert=str(other)))
    assert "let ssl_ca name its CA" in refusal(mariadb_tls[0](ssl_ca=other, ssl_verify_identity="true"))


def test_server_without_tls_is_refused_if_the_url_asks_for_it(postgresql_url: str, mariadb_url: str) -> None:
    assert "set ssl=on on the server; only in a trusted network, set sslmode=disable" in refusal(
        f"{postgresql_url}&sslmode=require"
    )
    assert "on the server; only in a trusted network, set ssl_disabled=true" in refusal(
        f"{mariadb_url}?ssl_verify_identity=true"
    )


def test_missing_certificate_file_of_mariadb_is_named(mariadb_url: str) -> None:
    assert "ssl_ca in dlock_url names no file: /no/ca.crt" in refusal(f"{mariadb_url}?ssl_ca=/no/ca.crt")


@pytest.mark.usefixtures("postgresql_url")  # it makes the user
def test_migrate_without_the_right_to_create_says_who_can_make_the_tables(postgresql: str, mariadb: MariaDB) -> None:
    with postgresql_stores.administrator(postgresql) as admin, mysql_stores.own_database(mariadb) as database:
        admin.execute("CREATE SCHEMA bare; GRANT USAGE ON SCHEMA bare TO dlock")
        with mysql_stores.administrator(mariadb) as root:
            root.execute(f"GRANT SELECT ON {database}.* TO {mysql_stores.USER}@'{mysql_stores.HOST}'")
        try:
            urls = postgresql_stores.url_of(postgresql, "bare"), mysql_stores.url_of(mariadb, database)
            for url, what in zip(urls, ("schema", "database"), strict=True):
                with pytest.raises(StoreRefused, match=rf"grant CREATE on the {what}.* `dlock migrate --sql`"):
                    open_migrator([StoreLocation.of(url)], timeout=5).migrate()
        finally:
            admin.execute("DROP SCHEMA bare")


def test_server_that_wants_tls_refuses_a_url_that_disables_it(mariadb_tls: tuple[UrlOf, Path]) -> None:
    assert "or it wants TLS: correct dlock_url" in refusal(mariadb_tls[0](ssl_disabled="true"))
