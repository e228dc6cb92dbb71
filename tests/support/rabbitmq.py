"""A RabbitMQ broker of the distribution's package, in a folder and on ports of its own."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import Self

from tests.support.polling import eventually
from tests.support.processes import HOST, free_port, kill_session, spawn, tail

# Not the one in PATH: that changes folder and user.
BINARY = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
CONTROL = Path("/usr/lib/rabbitmq/bin/rabbitmqctl")
USER = "rabbitmq"
GREETING = b"AMQP\x00\x00\x09\x01"


class RabbitMQ:
    """One broker on one port, which it keeps over kill and restart, with its data; use as a context manager.

    Args:
        settings: further ones of the broker, such as `{"consumer_timeout": "3000"}`.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        # Not pytest's folder: that is closed to other users, and the broker refuses to run as root's guest there.
        self._folder = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
        shutil.chown(self._folder, USER, USER)
        self.port, self._environ = free_port(), _environ(self._folder)
        self._environ["RABBITMQ_NODE_PORT"] = str(self.port)
        more = [f"-rabbit {name} {value}" for name, value in (settings or {}).items()]
        self._environ["RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"] += " ".join(["", *more])
        self._mapper: subprocess.Popen[bytes] | None = None
        self._broker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            # Started here, else the broker starts one as a daemon that outlives it.
            self._mapper = spawn(["epmd"], self._folder / "epmd.log", environ=self._environ)
            mapper = int(self._environ["ERL_EPMD_PORT"])
            eventually(lambda: _connects(mapper), message="epmd does not answer")
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._mapper is not None:
            kill_session(self._mapper)
        shutil.rmtree(self._folder)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def start(self) -> None:
        """Start and wait until it answers."""
        assert self._broker is None, "the broker already runs"
        log = self._folder / "output.log"
        # TERM: the start script stops the broker then; a KILL would take the script only.
        self._broker = spawn([BINARY], log, environ=self._environ, user=USER, death_signal="TERM")
        eventually(_answer(self._broker, self.port), within=60, every=0.1, message=f"RabbitMQ, see {log}")
        assert self._broker.poll() is None, f"RabbitMQ does not start:\n{tail(log)}"

    def url_of(self, user: str, *, writes: str) -> str:
        """The URL of a new user who may configure and read everything, and write to what the pattern matches."""
        self._control("add_user", user, user)
        self.grant(user, writes=writes)
        return f"amqp://{user}:{user}@{HOST}:{self.port}//"

    def grant(self, user: str, *, writes: str) -> None:
        """Change what a user may write to; a running connection may learn of it some seconds later."""
        self._control("set_permissions", user, ".*", writes, ".*")

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """The broker is short of memory: it reads nothing more from connections that publish."""
        self._control("set_vm_memory_high_watermark", "absolute", "1")
        try:
            yield
        finally:
            self._control("set_vm_memory_high_watermark", "0.4")

    def _control(self, *words: str) -> None:
        command = [str(CONTROL), "--node", self._environ["RABBITMQ_NODENAME"], *words]
        subprocess.run(
            command, env={**os.environ, **self._environ}, user=USER, check=True, capture_output=True, timeout=60
        )

    def kill(self) -> None:
        """SIGKILL; what it has on its disk stays."""
        if self._broker is not None:
            kill_session(self._broker)
            self._broker = None


@contextmanager
def running_rabbitmq() -> Iterator[str]:
    """The URL of a fresh broker, which is gone afterwards together with its port mapper."""
    with RabbitMQ() as broker:
        yield broker.url


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
