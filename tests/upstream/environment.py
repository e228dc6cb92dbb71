"""The server, the worker and the messages of the reproductions."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import kombu

from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.upstream.plain_app"
OTHERS = {"__init__", "__main__", "environment", "plain_app"}


def reproductions() -> list[str]:
    """Return the names of the modules that reproduce a fault."""
    names = {path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("test_")}
    return sorted(names - OTHERS)


@contextmanager
def running_server(*options: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), options=options) as server:
        yield server


class Running(NamedTuple):
    """A worker of `APP`, and the app in this process."""

    worker: Worker
    tasks: ModuleType

    def publish(self, body: Any, **headers: Any) -> None:
        """Publish a message as a client in another language could."""
        with self.tasks.app.connection_for_write() as connection:
            kombu.Producer(connection).publish(body, routing_key="celery", serializer="json", headers=headers)


@contextmanager
def running_app(pool: str = "solo") -> Iterator[Running]:
    with running_server() as server, tempfile.TemporaryDirectory() as folder:
        urls = Urls(server.url(), server.url(), server.url())
        with (
            running_worker(APP, folder=Path(folder), urls=urls, pool=pool) as worker,
            loaded_app(APP, urls) as tasks,
        ):
            yield Running(worker, tasks)


def ends(running: Running, within: float = 3.0) -> str:
    """Return "" if the worker still runs a later message."""
    later = running.tasks.echo.delay("later")
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not running.worker.running:
            return f"the worker has ended: {last_error(running.worker.log())}"
        if later.ready():
            return ""
        time.sleep(0.05)
    return "the worker runs no later message"


def last_error(log: str) -> str:
    """Return the last line of a log that names an exception."""
    raised = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception)\b.*", log, re.MULTILINE)
    return raised[-1] if raised else "its log names no exception"
