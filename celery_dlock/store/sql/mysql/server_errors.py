"""The exceptions for errors of MySQL and MariaDB, each with its cause and its cure."""

from __future__ import annotations

from typing import Final

from pymysql import Error
from pymysql.constants import CR, ER

from ....errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable

__all__ = ["READ_ONLY", "READ_ONLY_NUMBERS", "RowLocked", "connection_error", "number_of", "statement_error"]

MIGRATE: Final = "run `celery -A <app> dlock migrate`"
READ_ONLY: Final = "it is read-only, perhaps a replica: let dlock_url name the primary, or all servers"
#: The server refuses writes: --read-only, --innodb-read-only, or a transaction of this kind.
READ_ONLY_NUMBERS: Final = (ER.OPTION_PREVENTS_STATEMENT, 1836, 1792)


class RowLocked(StoreNotReady):
    """Another transaction has locked the row: the server ended a deadlock, or waited too long. Nothing was written."""


#: The driver could not connect, lost the connection, or waited too long for a reply.
_LOST: Final = {
    0, CR.CR_CONNECTION_ERROR, CR.CR_CONN_HOST_ERROR, CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST,
    1053, 1927, 4031,  # the server ends this connection: at its own end, by KILL, or because it was idle
}  # fmt: skip
#: The server ended a statement that took too long: MariaDB, MySQL, and either because of KILL QUERY.
_LATE: Final = {1969, 3024, ER.QUERY_INTERRUPTED}
#: Causes that pass by themselves.
_TEMPORARY: Final = {
    ER.CON_COUNT_ERROR: "it has too many connections: raise its max_connections",
    1203: "the user has too many connections: raise max_user_connections",
    **dict.fromkeys(READ_ONLY_NUMBERS, READ_ONLY),
    1047: "this node of its cluster is not ready",
}
#: Causes that last until the operator changes something.
_PERMANENT: Final = {
    ER.ACCESS_DENIED_ERROR: "user or password is wrong, or it wants TLS: correct dlock_url",  # MariaDB for both
    1698: "user or password is wrong: correct dlock_url",
    ER.HOST_NOT_PRIVILEGED: "it does not let this host in: correct dlock_url, or the host of its user",
    ER.DBACCESS_DENIED_ERROR: "the database does not exist, or the user has no right to it: correct the end of "
    "dlock_url",
    ER.BAD_DB_ERROR: "the database does not exist: correct the end of dlock_url, or create it",
    CR.CR_SSL_CONNECTION_ERROR: "it does not use TLS: set ssl_cert and ssl_key on the server; only in a "
    "trusted network, set ssl_disabled=true in dlock_url",
    3159: "it wants TLS: set ssl_ca in dlock_url",
    ER.NO_SUCH_TABLE: f"the tables of celery-dlock are missing in this database: {MIGRATE}",
    ER.BAD_FIELD_ERROR: f"the tables are those of another version of celery-dlock: {MIGRATE}",
    **dict.fromkeys(
        (ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR, ER.SPECIFIC_ACCESS_DENIED_ERROR),
        "a right is missing: grant SELECT, INSERT, UPDATE and DELETE on the tables whose names begin with dlock_. To "
        "make them, grant CREATE on the database, or run the output of `dlock migrate --sql` as an administrator",
    ),
    ER.DISK_FULL: "its disk is full",
    ER.RECORD_FILE_FULL: "a table or its disk is full",
    ER.OUTOFMEMORY: "it has no memory left",
    ER.NET_PACKET_TOO_LARGE: "the message is too large for it: raise its max_allowed_packet",
    ER.DATA_TOO_LONG: "a name is too long: shorten dlock_prefix",
    1665: "its binlog_format is STATEMENT: set it to ROW or MIXED",
}
_UNTRUSTED: Final = "its certificate is not trusted, or for another host: let ssl_ca name its CA"
#: Their texts quote values.
_QUOTING: Final = {ER.PARSE_ERROR, ER.DUP_ENTRY, 1366}


def number_of(error: Error) -> int:
    """Return the number of an error; 0 if it has none."""
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def connection_error(error: Exception) -> StoreUnavailable:
    """Return the exception for a connection that could not be opened. No statement was sent."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):  # the driver has no number for it
        return StoreRefused(f"the lock store refused: {_UNTRUSTED}; server reply: {_text(error)}")
    known = _known(error) if isinstance(error, Error) else None
    return known or StoreUnavailable(f"the lock store did not answer: {_text(error)} (check dlock_url)")


def statement_error(error: Error) -> StoreUnavailable:
    """Return the exception for a statement that failed."""
    number = number_of(error)
    if number in (ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT):
        return RowLocked(
            "the lock store refused: another transaction has locked the lock's row; server reply: " + _text(error)
        )
    if number in _LATE or isinstance(error.__context__, TimeoutError):
        return ReplyTimeout("the lock store did not answer in time (see dlock_timeout)")
    if number in _LOST:
        return ReplyLost(f"the lock store did not answer: {_text(error)}")
    return _known(error) or StoreRefused(f"the lock store refused: {_text(error)}")


def _known(error: Error) -> StoreUnavailable | None:
    for kind, causes in ((StoreNotReady, _TEMPORARY), (StoreRefused, _PERMANENT)):
        cause = causes.get(number_of(error))
        if cause is not None:
            return kind(f"the lock store refused: {cause}; server reply: {_text(error)}")
    return None


def _text(error: Exception) -> str:
    """Return the server's text in one line, without values."""
    if isinstance(error, Error):
        number = number_of(error)
        words = "" if number in _QUOTING or len(error.args) < 2 else str(error.args[1])  # noqa: PLR2004
        return f"error {number} {' '.join(words.split())}".rstrip() if number else type(error).__name__
    return " ".join(str(error).split()) or type(error).__name__
