"""One node of a Cluster: its ports, and what it says of the others."""

import random
import socket
from collections.abc import Mapping
from typing import Any

import redis

from tests.support.processes import HOST
from tests.support.servers import Server

BUS = 10_000  # the nodes talk to one another on this much higher a port

#: What CLUSTER NODES says, by the port of the node.
View = Mapping[int, dict[str, Any]]


def cluster_port() -> int:
    """A port that is free together with its bus port; neither is one that the kernel gives to clients."""
    while True:
        port = random.SystemRandom().randrange(10_000, 22_000)
        if _free(port) and _free(port + BUS):
            return port


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def ask(node: Server, *words: Any) -> Any:
    with node.client() as client:
        return client.execute_command(*words)


def done(node: Server, *words: Any) -> bool:
    """True if the node did so; False if it cannot yet."""
    try:
        return bool(ask(node, *words))
    except redis.ResponseError:
        return False


def view_of(node: Server) -> View:
    return {int(place.split("@")[0].rpartition(":")[2]): told for place, told in ask(node, "CLUSTER NODES").items()}


def myself(node: Server) -> dict[str, Any]:
    return next(told for told in view_of(node).values() if has_flag(told, "myself"))


def has_flag(told: Mapping[str, Any], name: str) -> bool:
    return name in told["flags"].split(",")


def slots_of(told: Mapping[str, Any]) -> list[range]:
    return [range(int(first), int(last) + 1) for first, last in ((s[0], s[-1]) for s in told["slots"])]


def owner_of(view: View, slot: int) -> int | None:
    return next((port for port, told in view.items() if any(slot in owned for owned in slots_of(told))), None)


def serving(node: Server) -> bool:
    return str(ask(node, "CLUSTER INFO").get("cluster_state")) == "ok"


def linked(node: Server) -> bool:
    with node.client() as client:
        told = client.info("replication")
    return bool(told["role"] == "master" or told["master_link_status"] == "up")
