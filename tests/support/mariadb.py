"""A MariaDB server of the distribution's package."""

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pymysql

from tests.support.polling import eventually
from tests.support.processes import HOST, free_port, kill_session, spawn, tail

__all__ = ["ADMINISTRATOR", "MariaDB", "running_mariadb"]

USER = "mysql"
ADMINISTRATOR = "root"


class MariaDB:
    """A server on one port, which it keeps over kill and restart, with its data.

    Args:
        folder: A folder of the server's user.
        options: Further options, such as ``"--max-connections=20"``.
    """

    def __init__(self, folder: Path, options: tuple[str, ...] = ()) -> None:
        self.port, self._folder, self._options = free_port(), folder, options
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the administrator, without a database."""
        return f"mysql://{ADMINISTRATOR}@{HOST}:{self.port}"

    def install(self) -> None:
        (self._folder / "init.sql").write_text(
            f"CREATE USER IF NOT EXISTS {ADMINISTRATOR}@'{HOST}';\n"
            f"GRANT ALL ON *.* TO {ADMINISTRATOR}@'{HOST}' WITH GRANT OPTION;\n"
        )
        command = [
            "mariadb-install-db", "--no-defaults", f"--datadir={self._folder / 'data'}",
            "--auth-root-authentication-method=normal", "--skip-test-db", f"--tmpdir={self._folder}",
        ]  # fmt: skip
        subprocess.run(
            command, user=USER, group=USER, extra_groups=[], cwd=self._folder, check=True, capture_output=True
        )

    def start(self) -> None:
        folder, log = self._folder, self._folder / "log"
        command = [
            "mariadbd", "--no-defaults", f"--datadir={folder / 'data'}", f"--socket={folder / 'socket'}",
            f"--pid-file={folder / 'pid'}", f"--init-file={folder / 'init.sql'}", f"--port={self.port}",
            f"--bind-address={HOST}", "--skip-name-resolve", "--innodb-buffer-pool-size=64M",
            # The files survive a killed server, so tests need no flush to the disk.
            "--innodb-flush-method=nosync",
            # Each server removes the temporary tables that it finds there when it starts.
            f"--tmpdir={folder}", *self._options,
        ]  # fmt: skip
        self._server = server = spawn(command, log, user=USER)
        eventually(
            lambda: self._answers() or server.poll() is not None, within=30, message=f"MariaDB does not answer: {log}"
        )
        assert server.poll() is None, f"MariaDB does not start:\n{tail(log)}"

    def kill(self) -> None:
        if self._server is not None:
            kill_session(self._server)
            self._server = None

    def stop(self) -> None:
        """End it orderly (SIGTERM)."""
        assert self._server is not None, "the server is not running"
        self._server.terminate()
        self._server.wait(30)
        self._server = None

    def pause(self) -> None:
        """SIGSTOP: the kernel accepts connections, nothing is answered."""
        assert self._server is not None, "the server is not running"
        self._server.send_signal(signal.SIGSTOP)
        # The signal may be a moment on its way.
        eventually(lambda: not self.answering, message="the server does not stop")

    def resume(self) -> None:
        assert self._server is not None, "the server is not running"
        self._server.send_signal(signal.SIGCONT)

    @property
    def answering(self) -> bool:
        """It runs and is not paused."""
        return self._server is not None and psutil.Process(self._server.pid).status() != psutil.STATUS_STOPPED

    def _answers(self) -> bool:
        try:
            pymysql.connect(host=HOST, port=self.port, user=ADMINISTRATOR).close()
        except pymysql.Error:
            return False
        return True


@contextmanager
def running_mariadb(*options: str) -> Iterator[MariaDB]:
    """Return a context with a fresh server, which is gone afterwards."""
    # Not pytest's folder: that is closed to other users, and the server refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="mariadb-"))
    shutil.chown(folder, USER, USER)
    made = MariaDB(folder, options)
    try:
        made.install()
        made.start()
        yield made
    finally:
        made.kill()
        shutil.rmtree(folder)
