"""The identity of the broker that an app publishes to."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from ..store.location import shown

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["broker_of"]

#: Options of kombu's transports that lead to other queues on the same server: Sentinel's, Redis' and SQS'.
_APART = ("master_name", "global_keyprefix", "queue_name_prefix")


def broker_of(app: Celery) -> str:
    """What identifies the broker that the app publishes to: its URL without user, password and options.

    Behind it stand the options that lead to other queues at the same URL.
    """
    connection = app.connection_for_write()
    transport = connection.transport
    defaults, host = transport.default_connection_params, connection.hostname or ""
    kind, place = transport.driver_type, str(connection.virtual_host or "")
    if kind == "redis":
        place = place.strip("/") or "0"
    options = connection.transport_options or {}
    apart = [str(options[name]) for name in _APART if options.get(name)]
    if transport.can_parse_url or "://" in host:
        return "/".join([shown(host), *map(quote, apart)])  # a whole URL
    host, port = host or defaults.get("hostname", ""), connection.port or defaults.get("port")
    server = f"[{host}]" if ":" in host else host
    # Quoted, so that the mask of passwords has nothing to hide.
    path = "/".join(quote(part, safe="/:") for part in [place, *apart])
    return f"{kind}://{server}{f':{port}' if port else ''}/{path}"
