"""The user's own transaction, as ``lease.guard(connection)`` gets it: of Django, SQLAlchemy or a DB-API driver."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from ...errors import GuardRefused

__all__ = ["BEGAN_BEFORE", "NO_TRANSACTION", "UserTransaction"]

NO_TRANSACTION = (
    "no transaction is open, so the guard would end at once: call guard() inside of one, such as "
    "`with transaction.atomic():` of Django, `with connection.transaction():` of psycopg, or `connection.begin()` of "
    "PyMySQL"
)
BEGAN_BEFORE = (
    "this transaction began before its guard: under REPEATABLE READ or SERIALIZABLE, call guard() or settle() before "
    "any other statement of the transaction"
)


class UserTransaction:
    """An open transaction of a connection that the user gave.

    Args:
        connection: A connection of Django, a ``Session`` or ``Connection`` of SQLAlchemy, or a connection of a driver.

    Raises:
        GuardRefused: It is none of these, or no transaction is open.
    """

    def __init__(self, connection: Any) -> None:
        driver, is_open = _opened(connection)
        if not is_open:
            raise GuardRefused(NO_TRANSACTION)
        self._driver = driver

    def ask(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of a statement as a tuple; None if it has none. An error of the driver is raised."""
        with closing(self._driver.cursor()) as cursor:
            cursor.execute(statement, values)
            row = cursor.fetchone()
            return tuple(row.values()) if isinstance(row, dict) else row  # as the user's row factory makes it


def _opened(connection: Any) -> tuple[Any, bool]:
    """Return what makes cursors, and whether a transaction is open."""
    if hasattr(connection, "in_atomic_block"):  # Django
        return connection, bool(connection.in_atomic_block)
    if hasattr(connection, "get_bind"):  # a Session of SQLAlchemy
        is_open = bool(connection.in_transaction())
        return (connection.connection().connection, True) if is_open else (None, False)
    if hasattr(connection, "exec_driver_sql"):  # a Connection of SQLAlchemy
        return connection.connection, bool(connection.in_transaction())
    if hasattr(connection, "info") and hasattr(connection.info, "transaction_status"):  # psycopg
        # Without autocommit, its next statement begins a transaction.
        return connection, int(connection.info.transaction_status) == _IN_TRANSACTION or not connection.autocommit
    if hasattr(connection, "get_autocommit"):  # PyMySQL or mysqlclient
        return connection, True  # the backend asks the server
    raise GuardRefused(
        f"{type(connection).__qualname__} is no connection that can be guarded: expected Django's `connection`, a "
        "Session or Connection of SQLAlchemy, or a connection of psycopg or PyMySQL"
    )


#: libpq's PQTRANS_INTRANS.
_IN_TRANSACTION = 2
