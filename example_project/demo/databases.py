"""The demo's database for locks: a server of the distribution's package, with its data in a folder of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from example_project.demo.server import free_port

#: Seconds for a server to answer.
PATIENCE = 15.0
#: The database and the user of the shop in MariaDB: one statement in each line.
SHOP = """CREATE DATABASE shop;
CREATE USER shop@'127.0.0.1';
GRANT ALL ON shop.* TO shop@'127.0.0.1';
"""


class Database(NamedTuple):
    """A server that keeps locks. Each `{}` of its words stands for its folder or its port.

    Args:
        name: Its name.
        user: The user that runs it if the demo runs as root. The server refuses to run as root.
        install: The command that makes its files.
        serve: The command that runs it.
        url: The `dlock_url`.
        end: The signal that ends it.
    """

    name: str
    user: str
    install: str
    serve: str
    url: str
    end: signal.Signals


DATABASES = {
    "postgresql": Database(
        "PostgreSQL",
        "postgres",
        "initdb -D {folder}/data -U postgres -A trust -E UTF8 --no-locale",
        "postgres -D {folder}/data -c listen_addresses=127.0.0.1 -p {port} -k {folder}",
        "postgresql://postgres@127.0.0.1:{port}/postgres",
        signal.SIGINT,
    ),
    "mysql": Database(
        "MariaDB",
        "mysql",
        "mariadb-install-db --no-defaults --datadir={folder}/data --skip-test-db",
        "mariadbd --no-defaults --datadir={folder}/data --socket={folder}/socket --pid-file={folder}/pid "
        "--init-file={folder}/init.sql --bind-address=127.0.0.1 --skip-name-resolve --port={port}",
        "mysql://shop@127.0.0.1:{port}/shop",
        signal.SIGTERM,
    ),
}


@contextmanager
def migrated(store: str) -> Iterator[str]:
    """Start the server of this store and make its tables; return a context with its URL."""
    database = DATABASES[store]
    folder = Path(tempfile.mkdtemp(prefix=f"celery-dlock-demo-{store}-"))
    (folder / "init.sql").write_text(SHOP)
    options: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    if os.geteuid() == 0:
        shutil.chown(folder, database.user, database.user)
        options |= {"user": database.user, "group": database.user, "extra_groups": []}
    port = free_port()
    install, serve = (_words(text, folder, port) for text in (database.install, database.serve))
    with (folder / "log").open("wb") as log:
        subprocess.run(install, check=True, stdout=log, **options)
        # A killed demo takes the server along.
        tied = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
        server = subprocess.Popen([*tied, *serve], stdout=log, start_new_session=True, **options)
    try:
        url = database.url.format(port=port)
        _migrate(url)
        yield url
    finally:
        server.send_signal(database.end)
        server.wait(10)
        shutil.rmtree(folder)


def _migrate(url: str) -> None:
    """Make the tables, as a deployment does, as soon as the server answers."""
    command = [sys.executable, "-m", "celery", "-A", "example_project.shop", "dlock", "migrate"]
    deadline = time.monotonic() + PATIENCE
    while (done := _run(command, url)).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the tables cannot be made:\n{done.stdout}{done.stderr}")
        time.sleep(0.2)


def _run(command: list[str], url: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"DLOCK_URL": url}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _words(text: str, folder: Path, port: int) -> list[str]:
    """Return the words of a command. Debian puts PostgreSQL's programs beside no others, by version."""
    program, *rest = text.format(folder=folder, port=port).split()
    others = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    path = os.pathsep.join(map(str, [*others, os.environ.get("PATH", os.defpath), "/usr/sbin"]))
    found = shutil.which(program, path=path)
    if found is None:
        raise RuntimeError(f"{program} is missing: as root on Debian, `make demo STORE=...` installs it")
    return [found, *rest]
