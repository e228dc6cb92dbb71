"""The store that DLOCK_TEST_STORE names, in which the locks of every worker test then are: `make worker-tests`."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from tests.support.sql_stores import Database, LockTables

__all__ = ["CHOSEN", "new_proxy", "new_tables", "tables_at"]

#: "postgresql" or "mysql"; "": the locks are in the Redis of each test.
CHOSEN: Final = os.environ.get("DLOCK_TEST_STORE", "")


def new_tables() -> LockTables:
    """Return the empty tables of a new store on this process's server, which lives as long as the process."""
    from tests.support.sql_stores import lock_tables  # noqa: PLC0415  # drivers are in the main lane only

    return _stack().enter_context(lock_tables(_database()))


def tables_at(url: str) -> LockTables | None:
    """Return the tables at this `dlock_url`; None if locks are in Redis. It may be the URL of a proxy."""
    if not CHOSEN:
        return None
    from tests.support.sql_stores import LockTables  # noqa: PLC0415  # drivers are in the main lane only

    parts = urlsplit(url)
    return LockTables(_database(), parse_qs(parts.query).get("schema", [parts.path[1:]])[0])


def new_proxy() -> Proxy:
    """Return a new proxy before the server."""
    return _stack().enter_context(Proxy(_database().port))


@cache
def _database() -> Database:
    from tests.support.sql_stores import running_database  # noqa: PLC0415  # drivers are in the main lane only

    return _stack().enter_context(running_database(CHOSEN))


@cache
def _stack() -> ExitStack:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack
