"""The servers' replies to ``INFO``, and the :class:`~celery_dlock.store.server_model.StoreInfo` made from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from ..server_model import StoreInfo
from .connection import ErrorReply, RespConnection
from .server_errors import error_from_reply

__all__ = ["read_info", "store_info"]

#: First version with WAITAOF. Valkey reports the version of Redis that it is compatible with.
_WAITAOF: Final = 7, 2


def read_info(connection: RespConnection) -> str:
    """Return the text of ``INFO``."""
    # All sections: before Redis 7, the command accepts only one section.
    reply = connection.ask(b"*1\r\n$4\r\nINFO\r\n")
    if type(reply) is ErrorReply:
        raise error_from_reply(reply)
    return bytes(reply).decode("utf-8", "replace")


def store_info(texts: Sequence[str], *, clustered: bool) -> StoreInfo:
    """Return how a store is set up.

    Raises:
        StoreUnavailable: A server cannot serve locks: it is part of a Cluster, a Sentinel, or a replica.

    Args:
        texts: Each server's reply to ``INFO``.
        clustered: The store's servers form a Cluster.
    """
    servers = [dict(line.split(":", 1) for line in text.splitlines() if ":" in line) for text in texts]
    if not clustered and servers[0].get("cluster_enabled") == "1":
        raise error_from_reply("MOVED: cluster_enabled is 1")
    if "sentinel" in (servers[0].get("redis_mode"), servers[0].get("server_mode")):
        raise error_from_reply("SENTINEL redis_mode is sentinel")
    if replica := next((facts for facts in servers if facts.get("role") == "slave"), None):
        raise error_from_reply(f"READONLY it is a replica of {replica.get('master_host')}:{replica.get('master_port')}")
    policies = [facts.get("maxmemory_policy", "") for facts in servers]
    evicting = (policy for policy in policies if policy != "noeviction")
    durable = all(facts.get("aof_enabled") == "1" for facts in servers)
    fsyncs = durable and all(_version(facts.get("redis_version", "")) >= _WAITAOF for facts in servers)
    cure = "" if durable else "set appendonly yes on each server"
    return StoreInfo(cure, next(evicting, "noeviction"), can_confirm_fsync=fsyncs, replicas=_replicas(servers))


def _replicas(servers: Sequence[Mapping[str, str]]) -> int | None:
    counts = [facts.get("connected_slaves", "") for facts in servers]
    return min(map(int, counts)) if all(count.isdigit() for count in counts) else None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
