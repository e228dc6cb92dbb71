"""From a URL to the store behind it. A driver is imported only when its URL is used."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit

from ..errors import InvalidLockOptions

if TYPE_CHECKING:
    from ..store import QueueStore

__all__ = ["SCHEMES", "from_url", "shown"]

_NAMES = {"virtual_host": "db"}
_OF_POOLS = ("max_connections", "timeout")

_WITH_HOST = ("redis", "rediss")

SCHEMES = ("redis", "rediss", "unix", "redis+socket")


def shown(url: str) -> str:
    """The URL as it may be shown to people: without user and password."""
    # Not by urlsplit: a password may hold what ends a URL's host.
    scheme, colon, rest = url.partition(":")
    place = rest.lstrip("/")
    slashes = rest[: len(rest) - len(place)]
    return f"{scheme}{colon}{slashes}{re.split('[?#]', place.rpartition('@')[2])[0]}"


def from_url(url: str, *, timeout: float) -> QueueStore:
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
    parts = urlsplit(url)
    if not url.startswith(f"{scheme}://") or (scheme in _WITH_HOST and not re.fullmatch(r"/?\d*/?", parts.path)):
        # redis-py reads the first as localhost, and the second as database 0.
        form = "host:port/number of the database" if scheme in _WITH_HOST else "/path of the socket"
        raise InvalidLockOptions(f"dlock_url: cannot keep locks at {shown(url)!r}; allowed: {scheme}://{form}")
    from .redis import RedisStore  # noqa: PLC0415  # importing celery_dlock loads no driver

    try:
        return RedisStore(_for_redis_py(url), timeout=timeout)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidLockOptions(f"dlock_url: cannot keep locks at {shown(url)!r}: {error}") from None


def _for_redis_py(url: str) -> str:
    """Celery's spelling of a URL as redis-py's.

    Celery writes ``redis+socket:///path?virtual_host=1`` for ``unix:///path?db=1``, and ``ssl_cert_reqs=CERT_NONE``
    for ``none``. What a URL says of pools is left out: this store has none.
    """
    parts = urlsplit(url)
    scheme = "unix" if parts.scheme == "redis+socket" else parts.scheme
    options = {
        _NAMES.get(key, key): value.removeprefix("CERT_").lower() if key == "ssl_cert_reqs" else value
        for key, value in parse_qsl(parts.query)
        if key not in _OF_POOLS
    }
    # By hand, because urlunsplit drops the slashes of a URL without a host.
    return f"{scheme}://{parts.netloc}{parts.path}" + (f"?{urlencode(options)}" if options else "")
