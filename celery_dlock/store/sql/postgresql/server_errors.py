"""The exceptions for errors of PostgreSQL, each with its cause and its cure."""

from __future__ import annotations

import re
from typing import Final

from psycopg import Error, errors

from ....errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable

__all__ = ["connection_error", "statement_error"]

MIGRATE: Final = "run `celery -A <app> dlock migrate`"

#: Causes that pass by themselves, by class of psycopg.
_TEMPORARY: Final = {
    errors.CannotConnectNow: "it starts, stops or recovers",
    errors.ReadOnlySqlTransaction: "it is read-only, perhaps a replica: let dlock_url name the primary, or several "
    "hosts with target_session_attrs=read-write",
    errors.LockNotAvailable: "another transaction has locked the lock's row for longer than dlock_timeout",
    errors.DeadlockDetected: "it ended a deadlock",
    errors.SerializationFailure: "another transaction changed the row",
    errors.IdleInTransactionSessionTimeout: "it ended an idle transaction",
}
#: Causes that last until the operator changes something.
_PERMANENT: Final = {
    errors.UndefinedTable: f"the tables of celery-dlock are missing in this schema: {MIGRATE}",
    errors.UndefinedColumn: f"the tables are those of another version of celery-dlock: {MIGRATE}",
    errors.InvalidSchemaName: f"the schema does not exist: correct `schema` in dlock_url, or {MIGRATE}",
    errors.InsufficientPrivilege: "a right is missing: grant SELECT, INSERT, UPDATE and DELETE on the tables whose "
    "names begin with dlock_, and USAGE on their schema. To make the tables, grant CREATE on the schema (on the "
    "database, if the schema does not exist), or run the output of `dlock migrate --sql` as an administrator",
    errors.DiskFull: "its disk is full",
    errors.OutOfMemory: "it has no memory left",
}
_NO_TLS: Final = (
    "it does not use TLS: set ssl=on on the server; only in a trusted network, set sslmode=disable in dlock_url"
)
#: The errors of a connection attempt have no class of their own, but texts of libpq and of the server.
_TEXTS: Final = (
    ("no password supplied", StoreRefused, "it wants a password: put it into dlock_url"),
    ("password authentication failed", StoreRefused, "user or password is wrong: correct dlock_url"),
    (r'role ".*" does not exist', StoreRefused, "user or password is wrong: correct dlock_url"),
    (r'database ".*" does not exist', StoreRefused, "the database does not exist: correct the end of dlock_url"),
    ("no pg_hba.conf entry", StoreRefused, "it does not let this user in: correct dlock_url, or its pg_hba.conf"),
    ("does not support SSL", StoreRefused, _NO_TLS),
    ("certificate verify failed", StoreRefused, "its certificate is not trusted: let sslrootcert name its CA"),
    ("root certificate file", StoreRefused, "sslrootcert names no file: let it name the CA of the server"),
    ("session is read-only|in hot standby", StoreNotReady, _TEMPORARY[errors.ReadOnlySqlTransaction]),
    (
        "too many clients|remaining connection slots",
        StoreNotReady,
        "it has too many connections: raise its max_connections, or use a connection pooler",
    ),
    ("starting up|shutting down|in recovery mode", StoreNotReady, _TEMPORARY[errors.CannotConnectNow]),
)  # fmt: skip


def connection_error(error: Error) -> StoreUnavailable:
    """Return the exception for a connection that could not be opened. No statement was sent."""
    text = _text(error)
    for part, kind, cause in _TEXTS:
        if re.search(part, text):
            return kind(f"the lock store refused: {cause}; server reply: {text}")
    return StoreUnavailable(f"the lock store did not answer: {text} (check dlock_url)")


def statement_error(error: Error, *, late: bool = False, lost: bool = False) -> StoreUnavailable:
    """Return the exception for a statement that failed.

    Args:
        error: The error.
        late: The server did not answer within the timeout.
        lost: The connection was lost, so the server may have carried the statement out.
    """
    text = _text(error)
    if late or isinstance(error, errors.QueryCanceled):
        return ReplyTimeout("the lock store did not answer in time (see dlock_timeout)")
    if lost:
        return ReplyLost(f"the lock store did not answer: {text}")
    return _refused(error, text) or StoreRefused(f"the lock store refused: {text}")


def _refused(error: Error, text: str) -> StoreUnavailable | None:
    for kind, causes in ((StoreNotReady, _TEMPORARY), (StoreRefused, _PERMANENT)):
        for cls, cause in causes.items():
            if isinstance(error, cls):
                return kind(f"the lock store refused: {cause}; server reply: {text}")
    return None


def _text(error: Error) -> str:
    """Return the server's text in one line. Without its DETAIL, which quotes the values of a row."""
    return " ".join((error.diag.message_primary or str(error) or type(error).__name__).split())
