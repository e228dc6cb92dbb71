"""The servers, users and options that Celery uses for messages and results, reused for locks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import InvalidLockOptions
from ..store.location import StoreLocation, provided, safe_error_text, scheme_of, shown, tls

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["location_from_broker", "location_from_result_backend"]

#: URL schemes of Celery that mean Redis.
_SCHEMES = ("redis", "rediss", "redis+socket", "sentinel")


def location_from_broker(app: Celery) -> StoreLocation | None:
    """Return the broker's server, as kombu would connect to it; None if it is not Redis.

    If the app has several brokers to fail over to, it is the first one.

    Raises:
        InvalidLockOptions: The URL cannot be read, or it names no primary for Sentinel.
    """
    url = _text(app.conf.broker_write_url)
    first = url.partition(";")[0]
    scheme = scheme_of(first)
    if not _is_redis(first):
        return None
    # kombu combines the URL with broker_user, broker_password, broker_use_ssl and the other settings.
    try:
        found = app.connection_for_write()
    # Python 3.11 reports a keyword given twice as KeyError, not TypeError, if another exception is being handled.
    except (ValueError, TypeError, KeyError) as error:
        raise _refusal("broker_url", first, safe_error_text(error)) from None
    default = found.transport.default_port or 0
    options: dict[str, Any] = {"username": found.userid, "password": found.password}
    more = {"credential_provider": getattr(found, "credential_provider", None)}
    if scheme == "redis+socket":
        return StoreLocation.of(first, setting="broker_url", more=more)
    try:
        options |= {"db": int(str(found.virtual_host or 0).strip("/") or 0), **_secured(found.ssl, scheme)}
    except ValueError:
        # The text in place of the number is not shown. It may be the end of a password that contains "/", "?" or "#".
        unreadable = "no number of a database, or its password is not percent-encoded"
        raise _refusal("broker_url", first, unreadable) from None
    options |= _provided("broker_url", first, more["credential_provider"])
    if scheme != "sentinel":
        host = found.hostname or "127.0.0.1"
        return StoreLocation("server", shown(first), "broker_url", ((host, found.port or default),), options)
    # kombu also takes the user, the password and the database of the first URL.
    try:
        parts = [urlsplit(part) for part in found.alt or [first] if scheme_of(part) == "sentinel"]
        addresses = tuple((part.hostname or "127.0.0.1", part.port or default) for part in parts)
    except ValueError as error:
        raise _refusal("broker_url", url, safe_error_text(error)) from None
    return _sentinels("broker", url, addresses, options, found.transport_options or {})


def location_from_result_backend(app: Celery) -> StoreLocation | None:
    """Return the result backend's server, as Celery would connect to it; None if it is not Redis.

    Raises:
        InvalidLockOptions: The URL cannot be read, or it names no primary for Sentinel.
    """
    url = _text(app.conf.result_backend)
    scheme = scheme_of(url)
    if not _is_redis(url):
        return None
    # The backend has combined the URL with redis_username, redis_backend_use_ssl and the other settings.
    try:
        found: dict[str, Any] = dict(app.backend.connparams)  # type: ignore[attr-defined]  # it is a Redis backend
    except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
        raise _refusal("result_backend", url, safe_error_text(error)) from None
    kept = ("username", "password", "credential_provider", "db", "path", "connection_class")
    options = {key: found[key] for key in kept if key in found} | tls(found)
    options |= _provided("result_backend", url, options.get("credential_provider"))
    if "connection_class" in options:
        options["connection_class"] = _own_class(options["connection_class"])
    if scheme == "sentinel":
        addresses = tuple((host.get("host") or "localhost", host.get("port") or 26379) for host in found["hosts"])
        transport = app.conf.result_backend_transport_options or {}
        return _sentinels("result_backend", url, addresses, options, transport)
    address = () if "path" in found else ((found["host"], found["port"]),)
    return StoreLocation("server", shown(url), "result_backend", address, options)


def _is_redis(url: str) -> bool:
    # To Celery, a name without "://" is a transport or a module.
    return url.partition("://")[0].lower() in _SCHEMES and "://" in url


def _text(urls: Any) -> str:
    """Return the URLs of a setting as one text. Celery takes several as a list, or joined by semicolons."""
    return ";".join(map(str, urls)) if isinstance(urls, list | tuple) else str(urls or "")


def _sentinels(
    service: str,
    url: str,
    addresses: tuple[tuple[str, int], ...],
    options: dict[str, Any],
    transport: Mapping[str, Any],
) -> StoreLocation:
    setting = "broker_url" if service == "broker" else service
    name = transport.get("master_name")
    if not name or not isinstance(name, str):
        required = f"{service}_transport_options={{'master_name': ...}} has to name the primary"
        raise _refusal(setting, url, required)
    return StoreLocation(
        "sentinel", shown(url), setting, addresses, options, name, dict(transport.get("sentinel_kwargs") or {})
    )


def _secured(ssl: Any, scheme: str) -> dict[str, Any]:
    if not isinstance(ssl, Mapping) and scheme != "rediss":
        return {}
    from redis.connection import SSLConnection  # noqa: PLC0415  # importing celery_dlock loads no driver

    return {**(tls(ssl) if isinstance(ssl, Mapping) else {}), "connection_class": SSLConnection}


def _own_class(celery_class: type[Any]) -> type[Any]:
    """Return the plain TLS class for a TLS class of Celery's: its classes for Sentinel ask the sentinels themselves."""
    from redis.connection import SSLConnection  # noqa: PLC0415  # importing celery_dlock loads no driver

    return SSLConnection if issubclass(celery_class, SSLConnection) else celery_class


def _provided(setting: str, url: str, provider: Any) -> dict[str, Any]:
    try:
        return provided(provider) if provider else {}
    except (ValueError, ImportError, AttributeError) as error:
        raise _refusal(setting, url, safe_error_text(error)) from None


def _refusal(setting: str, url: str, reason: str) -> InvalidLockOptions:
    return InvalidLockOptions(f"{setting}: cannot keep locks at {shown(url)!r}; {reason}")
