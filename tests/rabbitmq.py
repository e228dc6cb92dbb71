"""A RabbitMQ broker of the distribution's package, in a folder and on ports of its own."""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.processes import HOST, free_port, kill_session, spawn, tail
from tests.waiting import eventually

# Not the one in PATH: that changes folder and user.
BINARY = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
USER = "rabbitmq"
GREETING = b"AMQP\x00\x00\x09\x01"


@contextmanager
def running_rabbitmq() -> Iterator[str]:
    """The URL of a fresh broker, which is gone afterwards together with its port mapper."""
    # Not pytest's folder: that is closed to other users, and the broker refuses to run as root's guest there.
    folder = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
    shutil.chown(folder, USER, USER)
    amqp, environ = free_port(), _environ(folder)
    environ["RABBITMQ_NODE_PORT"] = str(amqp)
    log = folder / "output.log"
    # Started here, else the broker starts one as a daemon that outlives it.
    mapper = spawn(["epmd"], folder / "epmd.log", environ=environ)
    broker: subprocess.Popen[bytes] | None = None
    try:
        eventually(lambda: _connects(int(environ["ERL_EPMD_PORT"])), message="epmd does not answer")
        # TERM: the start script stops the broker then; a KILL would take the script only.
        broker = spawn([BINARY], log, environ=environ, user=USER, death_signal="TERM")
        eventually(_answer(broker, amqp), within=60, every=0.1, message=f"RabbitMQ, see {log}")
        assert broker.poll() is None, f"RabbitMQ does not start:\n{tail(log)}"
        yield f"amqp://guest:guest@{HOST}:{amqp}//"
    finally:
        if broker is not None:
            kill_session(broker)
        kill_session(mapper)
        shutil.rmtree(folder)


def _environ(folder: Path) -> dict[str, str]:
    places: Mapping[str, Path] = {
        "HOME": folder,
        "RABBITMQ_MNESIA_BASE": folder / "mnesia",
        "RABBITMQ_LOG_BASE": folder / "log",
        "RABBITMQ_PID_FILE": folder / "pid",
        "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "plugins",
        "RABBITMQ_CONFIG_FILE": folder / "rabbitmq",
    }
    return {name: str(path) for name, path in places.items()} | {
        "RABBITMQ_NODENAME": "test@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": HOST,
        "ERL_EPMD_PORT": str(free_port()),
        # Without it the distribution port listens on every address.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }


def _connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _answer(broker: subprocess.Popen[bytes], port: int) -> Callable[[], bool]:
    """True once the broker speaks AMQP, or has ended."""

    def answered() -> bool:
        if broker.poll() is not None:
            return True
        try:
            with socket.create_connection((HOST, port), timeout=1) as probe:
                probe.sendall(GREETING)
                return probe.recv(1) == b"\x01"
        except OSError:
            return False

    return answered
