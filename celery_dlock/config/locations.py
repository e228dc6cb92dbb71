"""``dlock_url`` and ``dlock_transport_options``, checked: one place, or for Redlock a list of independent servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import InvalidLockOptions
from ..store.location import SCHEMES, StoreLocation, scheme_of, shown

__all__ = ["locations_from_settings"]

#: What a URL's query leaves out.
_MORE: Final = ("credential_provider", "master_name", "sentinel_kwargs", "ssl")
#: Those that say nothing without sentinels.
_OF_SENTINELS: Final = ("master_name", "sentinel_kwargs")
#: Servers of which one may fail.
_LEAST: Final = 3


def locations_from_settings(urls: Any, more: Any) -> tuple[StoreLocation, ...]:
    """What the two settings say.

    No error shows a value that is not what it should be: it may hold a password.

    Raises:
        InvalidLockOptions: What they say is not allowed, or Redlock cannot be sound over these servers.
    """
    _check(more)
    if isinstance(urls, str):
        _check_use([urls], more)
        return (StoreLocation.of(urls, more=more),)
    if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
        given = f"<{type(urls).__name__}>"
        if isinstance(urls, list | tuple):
            given = str([shown(url) if isinstance(url, str) else f"<{type(url).__name__}>" for url in urls])
        allowed = ", ".join(f"{s}://" for s in SCHEMES)
        raise InvalidLockOptions(
            f"invalid dlock_url={given}: expected a URL that starts with one of {allowed}, or a list of them"
        )
    _check_use(urls, more)
    places = tuple(StoreLocation.of(url, more=more) for url in urls)
    if why := _unsound(places):
        seen = ", ".join(place.shown for place in places)
        raise InvalidLockOptions(f"dlock_url=[{seen}] is not allowed for Redlock: {why}")
    return places


def _check(more: Any) -> None:
    allowed = ", ".join(_MORE)
    if not isinstance(more, Mapping):
        raise _wrong(f"<{type(more).__name__}> is not allowed; allowed: a dict of {allowed}")
    if unknown := sorted({str(key) for key in more} - set(_MORE)):
        raise _wrong(f"{unknown[0]!r} is not allowed; allowed: {allowed}")
    name, kwargs, ssl = more.get("master_name"), more.get("sentinel_kwargs"), more.get("ssl")
    if name is not None and not isinstance(name, str):
        raise _wrong(f"'master_name'=<{type(name).__name__}> is not allowed; allowed: text")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _wrong(f"'sentinel_kwargs'=<{type(kwargs).__name__}> is not allowed; allowed: a dict")
    if kwargs and not isinstance(kwargs.get("ssl", False), bool):
        raise _wrong(
            "'ssl' in 'sentinel_kwargs' is not allowed so; allowed: True, and ssl_ca_certs and so on beside it"
        )
    if not (ssl is None or isinstance(ssl, bool | Mapping)):
        raise _wrong(
            f"'ssl'=<{type(ssl).__name__}> is not allowed; allowed: True, or a dict such as {{'ssl_ca_certs': ...}}"
        )
    strange = [str(key) for key in ssl if not str(key).startswith("ssl_")] if isinstance(ssl, Mapping) else []
    if strange:
        # It would be left out, and perhaps all of TLS with it.
        raise _wrong(f"{strange[0]!r} in 'ssl' is not allowed; allowed: options whose names begin with ssl_")


def _check_use(urls: list[str] | tuple[str, ...], more: Mapping[str, Any]) -> None:
    """Who forgets sentinel:// would keep locks on one fixed server, also after a failover."""
    plain = [url for url in urls if scheme_of(url) in SCHEMES and scheme_of(url) != "sentinel"]
    if plain and (idle := [key for key in _OF_SENTINELS if more.get(key)]):
        raise _wrong(f"{idle[0]!r} is for sentinel://, and dlock_url={shown(plain[0])!r} names no sentinels")


def _wrong(what: str) -> InvalidLockOptions:
    return InvalidLockOptions(f"dlock_transport_options: {what}")


def _unsound(places: tuple[StoreLocation, ...]) -> str:
    """Why Redlock cannot be kept on them; empty if it can."""
    if len(places) < _LEAST or len(places) % 2 == 0:
        return (
            f"{len(places)} of them; allowed: an odd number from {_LEAST}, because a majority of two or of an even "
            "number bears no more failures than that of one server less"
        )
    if strange := [place.shown for place in places if place.kind != "server"]:
        return f"{strange[0]} is more than one server"
    # Two databases of one server fail together. That one of them has two names shows when it is asked who it is.
    at = [(place.addresses, place.options.get("path")) for place in places]
    if twice := [place.shown for n, place in enumerate(places) if at[n] in at[:n]]:
        return f"{twice[0]} is named twice, and has to be a server of its own"
    return ""
