"""Servers and workers of `tests.support.apps.losing`, and what its bodies noted."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import redis

from celery_dlock.store.redis.keys import LockKeys
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.losing"


class Body(NamedTuple):
    row: str
    result: Any
    began: float
    key: str


class LosingEnvironment:
    """The locks live on a server of their own, which can stop while broker, results and marks go on."""

    def __init__(self, folder: Path, broker: Server, store: Server, app: ModuleType, stack: ExitStack) -> None:
        self.folder, self.broker, self.store, self.app = folder, broker, store, app
        self.locks = stack.enter_context(store.client())
        self._marks: redis.Redis = stack.enter_context(broker.client(1))
        self._stack = stack
        self.workers: dict[str, Worker] = {}
        self._rows = 0

    def worker(self, pool: str) -> Worker:
        if pool not in self.workers:
            urls = Urls(self.broker.url(), self.broker.url(1), self.store.url())
            context = running_worker(APP, "-Q", pool, folder=self.folder, urls=urls, pool=pool, concurrency=8)
            self.workers[pool] = self._stack.enter_context(context)
        return self.workers[pool]

    def row(self) -> str:
        self._rows += 1
        return f"row-{self._rows}"

    def begin(self, pool: str, task: str, *args: Any) -> "Body":
        """Send a call to that pool's worker, and wait until its body runs."""
        self.worker(pool)
        row = self.row()
        lock_name = getattr(self.app, task).lock_spec.name_of((row, *args), {})
        result = getattr(self.app, task).apply_async((row, *args), queue=pool)
        return Body(row, result, self.at(row, "start"), LockKeys.of("dlock", lock_name).lock)

    def words(self, row: str) -> list[tuple[str, float]]:
        texts: Any = self._marks.lrange(f"marks:{row}", 0, -1)
        return [(word, at) for word, at, _ in map(json.loads, texts)]

    def at(self, row: str, word: str, within: float = 20.0) -> float:
        """Return the time when that word was first marked."""

        def found() -> float | None:
            return next((at for seen, at in self.words(row) if seen == word), None)

        return eventually(found, within, message=f"{row} has no mark {word}: {self.words(row)}")  # type: ignore[return-value]

    def lost(self, body: Body) -> list[str]:
        """The reasons for which its lease was called lost."""
        name = body.key.partition(":lock:")[2]
        return [word for word, _ in self.words(f"lost {name}")]


@contextmanager
def losing_environment(folder: Path) -> Iterator[LosingEnvironment]:
    with ExitStack() as stack:
        broker, store = (stack.enter_context(Server(folder / name)) for name in ("broker", "store"))
        app = stack.enter_context(loaded_app(APP, Urls(broker.url(), broker.url(1), store.url())))
        yield LosingEnvironment(folder, broker, store, app, stack)


def ended(body: Body) -> Any:
    """Return the body's result; an exception as a value."""
    return body.result.get(timeout=30, propagate=False)
