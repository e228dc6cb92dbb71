"""From a URL to the store behind it. A driver is imported only when its URL is used."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from ..errors import InvalidLockOptions

if TYPE_CHECKING:
    from ..store import LockStore

__all__ = ["SCHEMES", "from_url", "shown"]

SCHEMES = ("redis", "rediss", "unix", "redis+socket")


def shown(url: str) -> str:
    """The URL as it may be shown to people: without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def from_url(url: str, *, timeout: float) -> LockStore:
    """The store that ``url`` names.

    Args:
        url: One of ``redis://``, ``rediss://``, ``unix://`` and Celery's ``redis+socket://``.
        timeout: Seconds after which a command counts as unanswered.

    Raises:
        InvalidLockOptions: The URL's kind is not known; the message shows no password.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        allowed = ", ".join(f"{s}://" for s in SCHEMES)
        raise InvalidLockOptions(f"dlock_url: cannot keep locks at {shown(url)!r}; allowed: {allowed}")
    from .redis import RedisStore  # noqa: PLC0415  # importing celery_dlock loads no driver

    return RedisStore(_for_redis_py(url), timeout=timeout)


def _for_redis_py(url: str) -> str:
    """Celery writes ``redis+socket:///path?virtual_host=1`` where redis-py wants ``unix:///path?db=1``."""
    parts = urlsplit(url)
    if parts.scheme != "redis+socket":
        return url
    names = {"virtual_host": "db"}
    query = "&".join(f"{names.get(key, key)}={value}" for key, value in parse_qsl(parts.query))
    return f"unix://{parts.netloc}{parts.path}" + (f"?{query}" if query else "")
