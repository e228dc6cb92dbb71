"""The identity of the broker that an app publishes to."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ..store.location import shown

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["broker_of"]

#: Options of kombu's transports for Sentinel, Redis and SQS that lead to other queues on the same server.
_NAMESPACE_OPTIONS = ("master_name", "global_keyprefix", "queue_name_prefix")


def broker_of(app: Celery) -> str:
    """Return the identity of the broker that the app publishes to: its URL without user, password and options.

    The options that lead to other queues at the same URL are appended.
    """
    connection = app.connection_for_write()
    transport = connection.transport
    defaults, host = transport.default_connection_params, connection.hostname or ""
    kind, database = transport.driver_type, str(connection.virtual_host or "")
    if kind == "redis":
        database = database.strip("/") or "0"
    options = connection.transport_options or {}
    namespaces = [str(options[name]) for name in _NAMESPACE_OPTIONS if options.get(name)]
    if transport.can_parse_url or "://" in host:
        return "/".join([shown(host), *map(quote, namespaces)])  # a whole URL
    host, port = host or defaults.get("hostname", ""), connection.port or defaults.get("port")
    server = f"[{host}]" if ":" in host else host
    # Quote each part, so that the password mask finds nothing in it to hide.
    path = "/".join(quote(part, safe="/:") for part in [database, *namespaces])
    return f"{kind}://{server}{f':{port}' if port else ''}/{path}"
