"""The connections of one process to a MySQL or MariaDB server."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pymysql
from pymysql.constants import CLIENT

from ....errors import StoreNotReady, StoreRefused, StoreUnavailable
from ....utils.fork_guard import no_fork
from ...engine.pool import IDLE_SECONDS, Pool
from ...location import Address, StoreLocation
from ..migrations import check_version
from .server_errors import READ_ONLY, READ_ONLY_NUMBERS, RowLocked, connection_error, number_of, statement_error

__all__ = ["Connection", "ConnectionPool", "Result"]

#: The text of a statement and its values.
Statement: TypeAlias = "tuple[str, Any]"
#: The options of a location that are given to PyMySQL, with their types.
_OPTIONS: Final[dict[str, type]] = {
    "ssl_ca": str, "ssl_cert": str, "ssl_key": str, "ssl_key_password": str, "ssl_verify_cert": bool,
    "ssl_verify_identity": bool, "ssl_disabled": bool, "server_public_key": bytes,
}  # fmt: skip
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
#: A READ COMMITTED transaction locks no gaps, and reads what was committed before each statement.
_ISOLATION: Final = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"


class Result(NamedTuple):
    """The result of a statement.

    Args:
        rows: The rows. Their texts are str.
        changed: The number of rows that changed; 2 for a row that ``ON DUPLICATE KEY UPDATE`` has changed.
        number: The number that an ``AUTO_INCREMENT`` column got.
    """

    rows: list[tuple[Any, ...]]
    changed: int
    number: int


class Connection:
    """A connection whose statements end within a time, even if the server is silent.

    Args:
        parameters: The parameters of PyMySQL's connection.
        limit: Seconds that connecting may take.
    """

    def __init__(self, parameters: dict[str, Any], limit: float) -> None:
        connect: Any = pymysql.connect  # its type stubs are not complete
        self._driver = connect(
            **parameters, charset="utf8mb4", autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS,
            connect_timeout=max(0.01, limit), read_timeout=max(0.01, limit), write_timeout=max(0.01, limit),
            program_name="celery-dlock",
        )  # fmt: skip
        self.mariadb = "mariadb" in self._driver.get_server_info().lower()

    @property
    def reply_within(self) -> float | None:
        return self._driver._read_timeout  # type: ignore[no-any-return]  # noqa: SLF001  # no public name

    @reply_within.setter
    def reply_within(self, seconds: float | None) -> None:
        self._driver._read_timeout = self._driver._write_timeout = seconds  # noqa: SLF001  # no public name

    @property
    def open(self) -> bool:
        return bool(self._driver.open)

    def usable(self) -> bool:
        return self.open and not select.select([self._driver._sock], [], [], 0)[0]  # noqa: SLF001  # no public name

    def run(self, *statements: Statement) -> list[Result]:
        """Run statements in one round trip. The first one that fails ends it."""
        results = []
        with self._driver.cursor() as cursor:
            cursor.execute(";".join(cursor.mogrify(self._waiting(text), values) for text, values in statements))
            while True:
                rows = [
                    tuple(value.decode() if isinstance(value, bytes) else value for value in row)
                    for row in cursor.fetchall()
                ]
                results.append(Result(rows, cursor.rowcount, cursor.lastrowid or 0))
                if not cursor.nextset():
                    return results

    def _waiting(self, text: str) -> str:
        """Return a statement that skips locked rows. MariaDB fails with error 1180 if it may wait for less than 1 s."""
        skips = self.mariadb and text.endswith("SKIP LOCKED")
        return f"SET STATEMENT innodb_lock_wait_timeout = 1 FOR {text}" if skips else text

    def ask(self, text: str, values: Any = ()) -> Result:
        return self.run((text, values))[0]

    def close(self) -> None:
        with suppress(pymysql.Error):  # it is closed already
            self._driver.close()


class ConnectionPool(Pool[Connection]):
    """The connections to one server. If the location names several, that is the first one that can be written to.

    Args:
        location: The location.
        timeout: Seconds that connecting, waiting for a connection, and each reply may take.

    Raises:
        ValueError: The location has an unknown option.
    """

    error = pymysql.Error

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        options = dict(location.options)
        self._account = {name: options.pop(name) for name in ("user", "password", "database") if name in options}
        self._addresses = location.addresses
        self._options: dict[str, Any] = {}
        for name, value in options.items():
            if name not in _OPTIONS:
                raise ValueError(f"unknown option {name!r}: expected one of {', '.join(sorted(_OPTIONS))}")
            if _OPTIONS[name] is bool and value not in _BOOLEANS:
                raise ValueError(f"invalid {name}: expected 'true' or 'false'")
            self._options[name] = _BOOLEANS[value] if _OPTIONS[name] is bool else _OPTIONS[name](value)
        super().__init__(timeout)

    def _failed(self, connection: Connection, error: Any) -> tuple[StoreUnavailable, bool]:
        failure = statement_error(error)
        if isinstance(failure, RowLocked) and connection.open:
            with suppress(pymysql.Error):
                connection.ask("ROLLBACK")
                self._keep(connection)
                return failure, False
        useless = not connection.open or number_of(error) in READ_ONLY_NUMBERS
        connection.close()
        return failure, useless

    @contextmanager
    def bare(self) -> Iterator[Connection]:
        """Return a context with a connection of its own, which does not need our tables.

        Raises:
            StoreUnavailable: It could not be opened, or the server refused a statement.
        """
        connection = self._first(self._connected, self._timeout)
        try:
            yield connection
        except pymysql.Error as error:
            raise statement_error(error) from error
        finally:
            connection.close()

    def _opened(self, limit: float) -> Connection:
        with no_fork():
            return self._first(self._checked, limit)

    def _first(self, open_at: Callable[[Address, float], Connection], limit: float) -> Connection:
        """Return a connection to the first server at which one can be opened.

        Raises:
            StoreUnavailable: There is none.
        """
        failure = StoreUnavailable("dlock_url names no server")
        for address in self._addresses:
            try:
                return open_at(address, limit)
            except StoreUnavailable as error:
                # A server that is read-only tells more than one that does not answer.
                failure = failure if isinstance(failure, StoreNotReady) else error
        raise failure

    def _connected(self, address: Address, limit: float) -> Connection:
        host, port = address
        account = self._account | {"password": self._account.get("password", "").encode()}
        files = {name: self._options.get(name) for name in ("ssl_ca", "ssl_cert", "ssl_key")}
        for name, file in files.items():
            if file and not Path(file).exists():
                raise StoreRefused(f"the lock store refused: {name} in dlock_url names no file: {file}")
        try:
            return Connection({**account, **self._options, "host": host, "port": port}, limit)
        except (pymysql.Error, OSError, RuntimeError) as error:
            raise connection_error(error) from error

    def _checked(self, address: Address, limit: float) -> Connection:
        """Return a connection with our settings, after a check whether the server can be written to."""
        connection = self._connected(address, limit)
        settings = ", ".join(f"{name} = {value}" for name, value in self._settings(connection).items())
        try:
            connection.run((f"SET SESSION {settings}", ()), (_ISOLATION, ()))
            self._check(connection)
        except pymysql.Error as error:
            connection.close()
            raise statement_error(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    @staticmethod
    def _check(connection: Connection) -> None:
        read_only, *_ = connection.ask("SELECT @@global.read_only").rows[0]
        if read_only:
            raise StoreNotReady(f"the lock store refused: {READ_ONLY}")
        found = connection.ask("SELECT v FROM dlock_meta WHERE k = 'schema_version'").rows
        check_version(found[0][0] if found else None)

    def _settings(self, connection: Connection) -> dict[str, object]:
        # Whole seconds, and less than a reply may take. Without any, the engine pauses and runs the rule again.
        lock_wait = max(0 if connection.mariadb else 1, math.floor(0.8 * self._timeout))
        settings: dict[str, object] = {
            # The time of an hour that a time zone has twice would be ambiguous.
            "time_zone": "'+00:00'",
            # STRICT: a text that is too long for its column is an error, and not cut.
            "sql_mode": "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
            "innodb_lock_wait_timeout": lock_wait,
            "lock_wait_timeout": lock_wait,
            "wait_timeout": IDLE_SECONDS,
        }
        if connection.mariadb:
            settings["max_statement_time"] = self._timeout
            settings["idle_transaction_timeout"] = math.ceil(2 * self._timeout)
        else:
            settings["max_execution_time"] = math.ceil(1000 * self._timeout)
        return settings
