"""Two workers of `tests.support.apps.faults_network`.

One reaches store and broker through proxies, the other directly.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from celery.result import AsyncResult

from tests.support.environ import environment_variables
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.faults_network"
#: As the app has them.
TTL, LONG_TTL, TIMEOUT, COMEBACK = 3.0, 8.0, 1.0, 0.2
#: The queues of the worker behind the proxies, and of the one beside them.
BEHIND, BESIDE = "behind", "beside"


class Cuts:
    """All connections are reset, so many seconds after one another."""

    def __init__(self, every: float) -> None:
        self._every, self._last = every, 0.0

    def __call__(self, proxy: Proxy, age: float) -> None:
        if age < self._last or age - self._last >= self._every:
            self._last = age
            proxy.set_mode("refuse")
            proxy.set_mode("pass")


def half_open_in_between(proxy: Proxy, age: float) -> None:
    # After the first renewal, so that the watchdog has a connection, and before the second.
    if TTL / 3 + 0.3 < age < TTL / 3 + 0.6:
        proxy.half_open()


def silent(since: float, until: float) -> Callable[[Proxy, float], None]:
    return lambda proxy, age: proxy.set_mode("blackhole" if since < age < until else "pass")


class Disturbance(NamedTuple):
    """A disturbance of the network's connections.

    Args:
        strike: called again and again with the age of the body.
        lasts: seconds of the body; longer than a lease that is not renewed over a new connection.
        freed_within: seconds from the body's end within which the lock has to be free.
    """

    strike: Callable[[Proxy, float], None]
    lasts: float = TTL + 0.8
    freed_within: float = 1.0


TO_STORE = {
    # A handshake with a listener that closes may get no answer at all, so what is under way then costs its timeout.
    "cut again and again": Disturbance(Cuts(0.2), freed_within=TIMEOUT + 1.0),
    "half-open": Disturbance(half_open_in_between, 4 / 3 * TTL + 0.7, TIMEOUT + 1.0),
    "silent for less than the ttl": Disturbance(silent(0.5, 1.3)),
}
TO_BROKER = {
    # Not as often: if the connection of a Celery worker is cut while it is being made, the worker is silent for up to
    # 26 s. Tasks of this library change nothing about it.
    "cut again and again": Disturbance(Cuts(1.2)),
    "silent for more than the ttl": Disturbance(silent(0.2, TTL + 0.5)),
}


class Notes:
    """The marks of the bodies."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()

    def all(self, row: str, word: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self._file.read_text().splitlines())
        return [line for line in lines if (line["row"], line["word"]) == (row, word)]

    def first(self, row: str, word: str, within: float = 20.0) -> dict[str, Any]:
        """The first such note, as soon as it is there."""
        return eventually(lambda: self.all(row, word), within, message=f"nobody noted {word!r} of {row}")[0]


class NetworkEnvironment:
    def __init__(
        self, locks: Server, store: Proxy, broker: Proxy, tasks: ModuleType, notes: Notes, stack: ExitStack
    ) -> None:
        self.store, self.broker, self.tasks, self.notes = store, broker, tasks, notes
        self.locks = stack.enter_context(locks.client())
        self.behind: Worker
        self.beside: Worker
        self._rows = 0

    def row(self) -> str:
        self._rows += 1
        return f"row-{self._rows}"

    def send(self, task: str, *args: Any, queue: str = BEHIND) -> "AsyncResult[Any]":
        sent: AsyncResult[Any] = getattr(self.tasks, task).apply_async(args, queue=queue)
        return sent

    def begin(self, task: str, row: str, *args: Any) -> "tuple[AsyncResult[Any], dict[str, Any]]":
        """Send a call to the worker behind the proxies; gives its result and the note of its start."""
        result = self.send(task, row, *args)
        return result, self.notes.first(row, "start")

    def consumer(self, verb: str, worker: Worker) -> None:
        """Let a worker read, or not read any more, the queue of the one behind the proxies ("add" or "cancel")."""
        command = getattr(self.tasks.app.control, f"{verb}_consumer")
        assert command(BEHIND, destination=[worker.node], reply=True, timeout=10), f"{worker.node} does not hear"

    def lost(self, start: dict[str, Any]) -> list[dict[str, Any]]:
        """Return when and why the lease of that body was reported as lost."""
        return self.notes.all(start["key"].partition(":lock:")[2], "lost")

    def watch(self, start: dict[str, Any], during: Callable[[float], None]) -> dict[str, Any]:
        """Look at the lock, again and again, until its body ends; gives the note of that.

        Args:
            during: called between two looks with the age of the body.
        """
        while True:
            acq = self.locks.hget(start["key"], "acq")
            if ended := self.notes.all(start["row"], "end"):
                return ended[0]
            age = time.monotonic() - start["at"]
            assert acq == start["acq"], f"{age:.1f} s after the start of its body the lock is {acq}'s"
            during(age)
            time.sleep(0.05)

    def free(self, start: dict[str, Any], within: float = 15.0) -> float:
        """Return the time when the lock of that body was seen free."""
        eventually(lambda: not self.locks.exists(start["key"]), within, message=f"{start['key']} is stuck")
        return time.monotonic()

    def mend(self) -> None:
        """An undisturbed network, and no process that still finds a broken connection."""
        for proxy in (self.store, self.broker):
            proxy.set_mode("pass")
            proxy.set_delay(0, 0)
        for _ in range(2):
            for result in [self.send("works", self.row(), 0.2) for _ in range(3)]:
                assert result.get(timeout=60)


@contextmanager
def network_environment(folder: Path) -> Iterator[NetworkEnvironment]:
    notes = Notes(folder / "notes")
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(Server(folder / name)) for name in ("broker", "locks"))
        assert broker.port is not None
        assert locks.port is not None
        environ = {"DLOCK_TEST_NOTES": str(folder / "notes"), "DLOCK_TEST_DIRECT_URL": locks.url()}
        stack.enter_context(environment_variables(environ))
        to_store, to_broker = (stack.enter_context(Proxy(port)) for port in (locks.port, broker.port))
        direct = Urls(broker.url(), broker.url(1), locks.lock_url())
        store_url = to_store.url().replace("//", f"//{LOCK_USER}:{LOCK_PASSWORD}@")
        through = Urls(to_broker.url(), broker.url(1), store_url)
        tasks = stack.enter_context(loaded_app(APP, direct))
        environment = NetworkEnvironment(locks, to_store, to_broker, tasks, notes, stack)
        behind = running_worker(APP, "-Q", BEHIND, folder=folder, urls=through, concurrency=3)
        beside = running_worker(APP, "-Q", BESIDE, folder=folder, urls=direct, concurrency=2)
        environment.behind, environment.beside = (stack.enter_context(worker) for worker in (behind, beside))
        yield environment
