"""The connections of one process to a PostgreSQL server."""

from __future__ import annotations

import math
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors
from psycopg.abc import PQGen

from ....errors import StoreRefused, StoreUnavailable
from ....utils.fork_guard import no_fork
from ...engine.pool import IDLE_SECONDS, Pool
from ...location import StoreLocation
from ..migrations import check_version
from .server_errors import connection_error, statement_error

__all__ = ["Connection", "ConnectionPool"]

RV = TypeVar("RV")

#: Options of a location that are not libpq's, or that this library sets.
_OURS: Final = frozenset(("connect_timeout", "schema", "synchronous_commit"))


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose statements end within a time, even if the server is silent."""

    #: Seconds to wait for each reply.
    reply_within: float | None = None

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        return super().wait(gen, interval, self.reply_within if timeout is None else timeout)

    def usable(self) -> bool:
        return not self.closed and not select.select([self.fileno()], [], [], 0)[0]


class ConnectionPool(Pool[Connection]):
    """The connections to one server. Each statement or transaction borrows one.

    Args:
        location: The location.
        timeout: Seconds that connecting, waiting for a connection, and each reply may take.

    Raises:
        ValueError: libpq does not know an option of the location.
    """

    error = psycopg.Error

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        super().__init__(timeout)
        self.schema: str = location.options.get("schema", "public")
        self._synchronous_commit: str | None = location.options.get("synchronous_commit")
        self._parameters = {key: value for key, value in location.options.items() if key not in _OURS}
        try:
            psycopg.conninfo.make_conninfo(**self._parameters)
        except psycopg.ProgrammingError as error:
            raise ValueError(" ".join(str(error).split())) from None
        #: Whether a pooler such as pgbouncer stands before the server, and drops the settings of a session.
        self.pooled = False
        self._knows_idle_limit = True

    def _failed(self, connection: Connection, error: Any) -> tuple[StoreUnavailable, bool]:
        late = isinstance(error, errors._WaitTimeout)  # noqa: SLF001  # no public name
        lost = late or connection.broken
        connection.close()
        return statement_error(error, late=late, lost=lost), lost or isinstance(error, errors.ReadOnlySqlTransaction)

    @contextmanager
    def bare(self) -> Iterator[Connection]:
        """Return a context with a connection of its own, which does not need our tables.

        Raises:
            StoreUnavailable: It could not be opened, or the server refused a statement.
        """
        try:
            connection = self._connected(self._timeout)
        except psycopg.Error as error:
            raise connection_error(error) from error
        connection.reply_within = self._timeout
        try:
            yield connection
        except psycopg.Error as error:
            raise statement_error(error, lost=connection.broken) from error
        finally:
            connection.close()

    def _opened(self, limit: float) -> Connection:
        try:
            with no_fork():
                connection = self._connected(limit)
        except psycopg.Error as error:
            raise connection_error(error) from error
        connection.reply_within = limit
        try:
            self._check(connection)
        except psycopg.Error as error:
            connection.close()
            raise statement_error(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def listening(self, channel: str) -> Connection:
        """Return a connection of its own that listens on a channel."""
        connection = self._opened(self._timeout)
        try:
            connection.execute(f"LISTEN {channel}")
        except psycopg.Error as error:
            connection.close()
            raise statement_error(error) from error
        return connection

    def _connected(self, limit: float) -> Connection:
        parameters = {"application_name": "celery-dlock"} | self._parameters
        parameters["options"] = f"{parameters.get('options', '')} {self._session_options()}".strip()
        parameters["connect_timeout"] = str(max(2, math.ceil(limit)))  # libpq's minimum
        try:
            return Connection.connect(autocommit=True, prepare_threshold=None if self.pooled else 5, **parameters)
        except psycopg.OperationalError as error:
            if "idle_session_timeout" in str(error) and self._knows_idle_limit:
                self._knows_idle_limit = False
            elif "startup parameter" in str(error) and not self.pooled:
                self.pooled = True
            else:
                raise
        return self._connected(limit)

    def _session_options(self) -> str:
        if self.pooled:
            return ""
        milliseconds = math.ceil(self._timeout * 1000)
        settings: dict[str, object] = {
            "dlock.session": "ours",
            "statement_timeout": milliseconds,
            # Shorter: so the error says what the statement has waited for.
            "lock_timeout": math.ceil(0.8 * milliseconds),
            "idle_in_transaction_session_timeout": 2 * milliseconds,
        }
        if self._knows_idle_limit:
            settings["idle_session_timeout"] = IDLE_SECONDS * 1000
        if self._synchronous_commit is not None:
            settings["synchronous_commit"] = self._synchronous_commit
        return " ".join(f"-c {key}={value}" for key, value in settings.items())

    def _check(self, connection: Connection) -> None:
        """Check a new connection: whether the server can be written to, and the version of the tables."""
        (found,) = connection.execute(
            "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool,"  # noqa: S608  # it is quoted
            " coalesce(current_setting('dlock.session', true), ''), current_setting('synchronous_commit'),"
            f" (SELECT v FROM \"{self.schema}\".dlock_meta WHERE k = 'schema_version')"
        ).fetchall()
        read_only, session, synchronous_commit, version = found
        if read_only:
            raise errors.ReadOnlySqlTransaction("the server is read-only")
        if session != "ours":
            self.pooled, connection.prepare_threshold = True, None
        if self._synchronous_commit not in (None, synchronous_commit):
            raise StoreRefused(
                f"the lock store refused: dlock_url asks for synchronous_commit={self._synchronous_commit}, and a "
                f"pooler drops it, so it is {synchronous_commit}: set it for the user, with ALTER ROLE … SET"
            )
        check_version(version)
