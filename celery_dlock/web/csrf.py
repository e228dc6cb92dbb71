"""Protection of changes against requests that another site makes a browser send.

A change needs three things. The browser must say that the request comes from this site. The request must carry the
cookie, which the browser keeps from requests of other sites (``SameSite=Strict``). Its form must carry the same token
as the cookie, which no other site can read.
"""

from __future__ import annotations

import re
import secrets
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["COOKIE", "FIELD", "forged", "send_token", "token_of"]

COOKIE: Final = "dlock_csrf"
FIELD: Final = "csrf"
_TOKEN: Final = re.compile(r"[\w-]{43}", re.ASCII)


def token_of(request: Request) -> str:
    """Return the token in the cookie of a request; a new one if there is none."""
    given = request.cookies.get(COOKIE, "")
    return given if _TOKEN.fullmatch(given) else secrets.token_urlsafe(32)


def send_token(request: Request, response: Response, token: str) -> None:
    """Set the cookie, if the request did not carry it."""
    if request.cookies.get(COOKIE) != token:
        response.set_cookie(
            COOKIE,
            token,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )


def forged(request: Request, token: str) -> str:
    """Return the reason to refuse a change; "" for none.

    Args:
        request: The request.
        token: The token in its form.
    """
    reason = _foreign(request)
    if reason:
        return reason
    cookie = request.cookies.get(COOKIE, "")
    if not _TOKEN.fullmatch(cookie) or not secrets.compare_digest(cookie.encode(), token.encode()):
        return "the form has expired: load the page again"
    return ""


def _foreign(request: Request) -> str:
    site = request.headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        return "the request comes from another site"
    # Only the host is compared: a proxy that ends TLS changes the scheme.
    origin = request.headers.get("origin") or request.headers.get("referer")
    if origin is None:
        return "" if site else "the request does not say from which site it comes (Origin)"
    try:
        host = urlsplit(origin).netloc.lower()
    except ValueError:
        return "the request comes from another site"
    if host != request.headers.get("host", "").lower():
        return "the request comes from another site, or a proxy changes the Host header"
    return ""
