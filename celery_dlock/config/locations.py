"""The locations of the lock store, from ``dlock_url`` and ``dlock_transport_options``.

Redlock has a list of independent servers, every other store has one location.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import InvalidLockOptions
from ..store.location import SCHEMES, StoreLocation, scheme_of, shown

__all__ = ["locations_from_settings"]

#: The transport options: a URL cannot carry them.
_MORE: Final = ("credential_provider", "master_name", "sentinel_kwargs", "ssl")
#: The options that have no effect without sentinels.
_OF_SENTINELS: Final = ("master_name", "sentinel_kwargs")
#: The smallest number of servers of which one may fail.
_MIN_SERVERS: Final = 3


def locations_from_settings(urls: Any, more: Any) -> tuple[StoreLocation, ...]:
    """Return the locations that the two settings name.

    No error shows a value of another type than expected: it may contain a password.

    Args:
        urls: The value of ``dlock_url``.
        more: The value of ``dlock_transport_options``.

    Raises:
        InvalidLockOptions: A value is invalid, or Redlock is not safe over these servers.
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
    locations = tuple(StoreLocation.of(url, more=more) for url in urls)
    if expected := _expected_for_redlock(locations):
        seen = ", ".join(location.shown for location in locations)
        raise InvalidLockOptions(f"invalid dlock_url=[{seen}] for Redlock: expected {expected}")
    return locations


def _check(more: Any) -> None:
    allowed = ", ".join(_MORE)
    if not isinstance(more, Mapping):
        raise InvalidLockOptions(
            f"invalid dlock_transport_options=<{type(more).__name__}>: expected a dict with any of {allowed}"
        )
    if unknown := sorted({str(key) for key in more} - set(_MORE)):
        raise _invalid(f"unknown option {unknown[0]!r}; known are {allowed}")
    name, kwargs, ssl = more.get("master_name"), more.get("sentinel_kwargs"), more.get("ssl")
    if name is not None and not isinstance(name, str):
        raise _invalid(f"invalid master_name=<{type(name).__name__}>: expected text")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise _invalid(f"invalid sentinel_kwargs=<{type(kwargs).__name__}>: expected a dict")
    if kwargs and not isinstance(kwargs.get("ssl", False), bool):
        raise _invalid(
            f"invalid ssl=<{type(kwargs['ssl']).__name__}> in sentinel_kwargs: expected True, with ssl_ca_certs and "
            "the like as further entries of sentinel_kwargs"
        )
    if not (ssl is None or isinstance(ssl, bool | Mapping)):
        raise _invalid(f"invalid ssl=<{type(ssl).__name__}>: expected True, or a dict such as {{'ssl_ca_certs': ...}}")
    other = [str(key) for key in ssl if not str(key).startswith("ssl_")] if isinstance(ssl, Mapping) else []
    if other:
        # Without this check the option would be ignored, and the connection might not use TLS.
        raise _invalid(f"unknown option {other[0]!r} in ssl: expected options whose names begin with ssl_")


def _check_use(urls: list[str] | tuple[str, ...], more: Mapping[str, Any]) -> None:
    """Check that options for Sentinel come with URLs of sentinels.

    Without this check, a forgotten ``sentinel://`` would keep the locks on one fixed server, also after a failover.
    """
    plain = [url for url in urls if scheme_of(url) in SCHEMES and scheme_of(url) != "sentinel"]
    if plain and (idle := [key for key in _OF_SENTINELS if more.get(key)]):
        raise _invalid(f"{idle[0]} needs sentinel:// URLs, and dlock_url={shown(plain[0])!r} names no sentinels")


def _invalid(reason: str) -> InvalidLockOptions:
    return InvalidLockOptions(f"dlock_transport_options: {reason}")


def _expected_for_redlock(locations: tuple[StoreLocation, ...]) -> str:
    """Return what Redlock requires and these locations do not fulfil; "" if they fulfil everything."""
    if len(locations) < _MIN_SERVERS or len(locations) % 2 == 0:
        return (
            f"an odd number of servers, at least {_MIN_SERVERS}, and these are {len(locations)}; an even number "
            "tolerates no more failures than one server less"
        )
    if others := [location.shown for location in locations if location.kind != "server"]:
        return f"single servers, and {others[0]} is more than one server"
    # Two databases of one server fail together. One server with two names is found later, by its run id.
    at = [(location.addresses, location.options.get("path")) for location in locations]
    if twice := [location.shown for n, location in enumerate(locations) if at[n] in at[:n]]:
        return f"independent servers, and {twice[0]} is named twice"
    return ""
