"""The rights of a request, and the name of its user."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from ..errors import InvalidLockOptions
from ..reports.actions import RIGHTS

__all__ = ["Access", "User", "read_only", "rights_of", "user_of"]

#: Characters of a user name that are stored.
USER_LENGTH: Final = 100

#: ``"none"``, ``"read"``, ``"act"`` (everything), or the actions that are permitted beside reading.
Rights = str | Iterable[str]
#: Returns the rights of a request. It may be a coroutine function. A plain function runs in a thread.
Access = Callable[[Request], Rights | Awaitable[Rights]]
#: Returns the name of the user of a request, for the audit. It may be a coroutine function too.
User = Callable[[Request], str | Awaitable[str]]


def read_only(_request: Request) -> str:
    """Permit every request to read, and none to act."""
    return "read"


async def rights_of(access: Access, request: Request) -> frozenset[str] | None:
    """Return the actions that a request may do; None if it may not even read.

    Raises:
        InvalidLockOptions: The function returned something else.
    """
    given = await _ask(access, request)
    named = {"none": None, "read": frozenset[str](), "act": RIGHTS}
    if isinstance(given, str):
        if given in named:
            return named[given]
    elif isinstance(given, Iterable):
        found = frozenset(given)
        if found <= RIGHTS:
            return found
    raise InvalidLockOptions(
        f"access() returned {given!r}: expected 'none', 'read', 'act', or a set of {', '.join(sorted(RIGHTS))}"
    )


async def user_of(user: User | None, request: Request) -> str:
    """Return the name of the user of a request, in one line."""
    given = await _ask(user, request) if user else getattr(request.scope.get("user"), "display_name", "")
    return " ".join(str(given).split())[:USER_LENGTH] or "dashboard"


async def _ask(function: Callable[[Request], Any], request: Request) -> Any:
    # A plain function may read a database, so it does not run in the event loop.
    found = await run_in_threadpool(function, request)
    return await found if inspect.isawaitable(found) else found
