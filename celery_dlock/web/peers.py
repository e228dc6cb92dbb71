"""From where a request comes, for limits per address."""

from __future__ import annotations

import ipaddress
from typing import Final

from starlette.types import Scope

__all__ = ["PEER", "network_of", "peer_of"]

#: The key in ``scope["state"]`` of the peer's network, which the dashboard's own server sets.
PEER: Final = "celery_dlock.peer"


def network_of(host: str) -> str:
    """Return what one client may own: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def peer_of(scope: Scope) -> str:
    """Return the network at the other end of the connection.

    If the server has named the peer, ``scope["client"]`` does not count: uvicorn puts the text of ``X-Forwarded-For``
    there. A client writes that text itself, unless a proxy replaces it.
    """
    named = scope.get("state", {}).get(PEER)
    client = scope.get("client")
    return str(named) if named is not None else network_of(client[0]) if client else ""
