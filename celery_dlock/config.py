"""The app's settings, read once and checked."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kombu.transport import get_transport_cls

from .errors import InvalidLockOptions
from .options import DEFAULT_TTL, ttl_seconds
from .stores import SCHEMES, shown

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Settings"]

_KNOWN = ("dlock_prefix", "dlock_ttl", "dlock_turn", "dlock_turn_tries", "dlock_url")


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``app.conf`` says of locks.

    Args:
        url: ``dlock_url``; default: the broker's URL where that is Redis, else the result backend's.
        prefix: ``dlock_prefix``: the start of every key, ``"dlock"`` by default.
        ttl: ``dlock_ttl``: the ttl, in seconds, of tasks and locks that name none; 30 by default.
        turn: ``dlock_turn``: seconds that a waiter whose message was published has to start before the next gets its
            turn, doubled with each turn that it loses; 60 by default.
        turn_tries: ``dlock_turn_tries``: lost turns after which a message goes to the dead letters; 5 by default.
        doubtful_after: Seconds after a delivery from which a Redis broker may have delivered an unacknowledged message
            again (its ``visibility_timeout``); None for brokers that do not.
    """

    url: str
    prefix: str
    ttl: float
    turn: float
    turn_tries: int
    doubtful_after: float | None
    node: str

    @classmethod
    def of(cls, app: Celery) -> Settings:
        """Read and check the settings of ``app``.

        Raises:
            InvalidLockOptions: A ``dlock_`` setting is unknown or has a value that is not allowed, or there is no
                Redis to keep locks in.
        """
        conf = app.conf
        unknown = sorted(key for key in _keys(conf) if key.lower().startswith("dlock_") and key not in _KNOWN)
        if unknown:
            raise InvalidLockOptions(f"unknown setting {unknown[0]!r}; known: {', '.join(_KNOWN)}")
        prefix = conf.get("dlock_prefix", "dlock")
        if not isinstance(prefix, str) or not prefix or any(c in "{}" or c.isspace() for c in prefix):
            raise InvalidLockOptions(f"dlock_prefix={prefix!r} is not allowed; allowed: text without braces or spaces")
        ttl = conf.get("dlock_ttl")
        seconds = DEFAULT_TTL if ttl is None else ttl_seconds("dlock_ttl", ttl)
        turn = ttl_seconds("dlock_turn", conf.get("dlock_turn", 60.0))
        tries = conf.get("dlock_turn_tries", 5)
        if not isinstance(tries, int) or isinstance(tries, bool) or tries < 1:
            raise InvalidLockOptions(
                f"dlock_turn_tries={tries!r} is not allowed; allowed: a whole number of at least 1"
            )
        return cls(_url(app), prefix, seconds, turn, tries, _doubtful_after(app), socket.gethostname())


def _keys(conf: Any) -> set[str]:
    """Every key somebody set, as the app spells it: Celery keeps unknown ones under the user's own spelling."""
    # First the keys: until somebody reads them, the configuration is not loaded and knows no prefix.
    keys = {str(key) for layer in conf.maps for key in layer}
    prefix = getattr(conf, "prefix", None) or ""
    if not prefix:
        return keys
    ours = {key.removeprefix(prefix).lower() for key in keys if key.startswith(prefix)}
    # In a namespace, an upper-case key without its prefix belongs to somebody else.
    return ours | {key for key in keys if not key.isupper()}


def _url(app: Celery) -> str:
    own = app.conf.get("dlock_url")
    if own is not None:
        if not isinstance(own, str) or urlsplit(own).scheme not in SCHEMES:
            seen = shown(own) if isinstance(own, str) else own
            allowed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise InvalidLockOptions(
                f"dlock_url={seen!r} is not allowed; allowed: a URL that starts with one of {allowed}"
            )
        return own
    # The settings themselves: a Connection's own URL has lost its query, and with it the TLS options.
    candidates = (_first(app.conf.broker_write_url), _first(app.conf.result_backend))
    for url in candidates:
        if urlsplit(url).scheme in SCHEMES:
            return url
    seen = " and ".join(repr(shown(url)) for url in candidates if url) or "nothing"
    raise InvalidLockOptions(
        f"dlock_url is not set, and neither the broker nor the result backend is a Redis ({seen}): set dlock_url"
    )


def _first(urls: Any) -> str:
    """Celery takes several URLs to fail over to, as a list or joined by semicolons."""
    if isinstance(urls, list | tuple):
        urls = urls[0] if urls else ""
    return str(urls or "").partition(";")[0]


def _doubtful_after(app: Celery) -> float | None:
    from kombu.transport.redis import Transport  # noqa: PLC0415  # importing celery_dlock loads no driver

    # Sentinel's transport, and others, derive from Redis'.
    if not issubclass(get_transport_cls(app.connection_for_write().transport_cls), Transport):  # type: ignore[arg-type]  # it is a class
        return None
    visibility = float((app.conf.broker_transport_options or {}).get("visibility_timeout", 3600))
    # Early: that time is counted from before our receipt, by another worker's wall clock. To doubt costs one done mark.
    return max(0.0, visibility - max(2.0, visibility / 10))
