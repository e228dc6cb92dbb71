"""HTTP Basic authentication by an htpasswd file, for the dashboard's own server."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Final

from starlette.authentication import AuthCredentials, SimpleUser
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import InvalidLockOptions
from .peers import peer_of

__all__ = ["BasicAuth", "PasswordFile"]

#: Hashes that take an attacker long to guess. Those of `htpasswd` without -B do not.
_SCHEMES: Final = ("bcrypt", "sha512_crypt", "sha256_crypt")
#: Correct passwords that are remembered, because each check takes a tenth of a second.
_REMEMBERED: Final = 1000
#: Passwords that are checked at once. Others wait, so that guesses take no threads from pages.
_CHECKS_AT_ONCE: Final = 2
#: Checks that run or wait at a time: of one address, and of all. So a user waits for a few of them at most.
_CHECKS_OF_ONE: Final = 8
_CHECKS: Final = 16
#: The same of all, for an address without a check. So two addresses that guess keep no user of another one out.
_CHECKS_WITH_FIRST: Final = 32
#: Seconds after which those checks have ended.
_RETRY_AFTER: Final = 2


class PasswordFile:
    """An htpasswd file. It is read again when it changes.

    Args:
        path: The file, as ``htpasswd -B`` writes it.

    Raises:
        InvalidLockOptions: The file cannot be read, has no user, or has a hash of another kind.
    """

    def __init__(self, path: Path) -> None:
        from passlib.apache import HtpasswdFile  # noqa: PLC0415  # needed with --auth-file only
        from passlib.context import CryptContext  # noqa: PLC0415

        context = CryptContext(schemes=list(_SCHEMES))
        try:
            self._file: Any = HtpasswdFile(path, context=context)
        except (OSError, ValueError) as error:
            raise InvalidLockOptions(f"the file of users {path} cannot be read: {error}") from error
        users = self._file.users()
        if not users:
            raise InvalidLockOptions(f"the file of users {path} has no user: htpasswd -B -c {path} NAME")
        for user in users:
            if context.identify(self._file.get_hash(user)) is None:
                raise InvalidLockOptions(
                    f"the file of users {path}: the password of {user} is no bcrypt hash: htpasswd -B {path} {user}"
                )
        self._context = context
        self._lock = Lock()
        self._key = secrets.token_bytes(32)
        self._correct: set[bytes] = set()

    def remembers(self, user: str, password: str) -> bool:
        """Return whether this is the password of the user, and was checked since the file last changed."""
        with self._lock:
            return self._digest(user, password) in self._known()

    def check(self, user: str, password: str) -> bool:
        """Return whether this is the password of the user. A wrong one and an unknown user take the same time."""
        with self._lock:
            known = self._known()
            digest = self._digest(user, password)
            if digest in known:
                return True
            users = self._file.users()
            exists = user in users
            stored = self._file.get_hash(user if exists else users[0]) if users else None
        try:
            correct = stored is not None and self._context.verify(password, stored) and exists
        except ValueError:  # NUL in the password, or more bytes than bcrypt takes
            return False
        if correct:
            with self._lock:
                if len(known) >= _REMEMBERED:
                    known.clear()
                known.add(digest)
        return correct

    def _digest(self, user: str, password: str) -> bytes:
        return hmac.digest(self._key, f"{user}\0{password}".encode(), hashlib.sha256)

    def _known(self) -> set[bytes]:
        if self._file.load_if_changed():
            # A new set: a check that began before the change adds to the old one.
            self._correct = set()
        return self._correct


class BasicAuth:
    """An ASGI middleware that lets in only users of a file. Probes of ``/healthz`` need no password."""

    def __init__(self, app: ASGIApp, passwords: PasswordFile) -> None:
        self._app = app
        self._passwords = passwords
        self._threads = ThreadPoolExecutor(_CHECKS_AT_ONCE, "dlock-password")
        #: The checks that run or wait, by the address that asked.
        self._checks_of: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].removeprefix(scope.get("root_path", "")) != "/healthz":
            user, password = _credentials(Headers(scope=scope).get("authorization", ""))
            if refusal := await self._refusal(user, password, peer_of(scope)):
                await refusal(scope, receive, send)
                return
            scope["user"], scope["auth"] = SimpleUser(user), AuthCredentials(["authenticated"])
        await self._app(scope, receive, send)

    async def _refusal(self, user: str, password: str, peer: str) -> Response | None:
        """Return the answer to a request that is not let in; None if it is."""
        if user and self._passwords.remembers(user, password):
            return None
        if user:
            mine = self._checks_of[peer]
            if mine >= _CHECKS_OF_ONE or self._checks_of.total() >= (_CHECKS if mine else _CHECKS_WITH_FIRST):
                text = "too many passwords are being checked: try again in a moment\n"
                return PlainTextResponse(text, 429, {"Retry-After": str(_RETRY_AFTER)})
            if await self._check(user, password, peer):
                return None
        asked = {"WWW-Authenticate": 'Basic realm="celery-dlock", charset="UTF-8"'}
        return PlainTextResponse("a user name and a password are needed\n", 401, asked)

    async def _check(self, user: str, password: str, peer: str) -> bool:
        self._checks_of[peer] += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._passwords.check, user, password)
        finally:
            self._checks_of -= Counter((peer,))  # which also removes a count of 0


def _credentials(header: str) -> tuple[str, str]:
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        user, _, password = base64.b64decode(value, validate=True).decode("utf-8").partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return "", ""
    return user, password
