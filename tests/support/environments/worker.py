"""A store, a broker, workers and an app, and a record of all that happened to the locks."""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import redis

from celery_dlock.locking.watchdog import FREED_WITHIN
from tests.support import lock_records
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

if TYPE_CHECKING:
    from tests.support.sql_stores import HeldLock, LockTables

#: Keyspace events, sent to every subscriber. An expiry is sent when the server looks, so let it look often.
TELLING = ("--notify-keyspace-events", "KEA", "--hz", "100")
FREED = {"del", "expired"}
#: Seconds between two looks at the tables of a store without such events.
LOOK = 0.01


class LockLog(ABC):
    """The times when each lock's key was written, renewed and freed, in the store's own order."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, str]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @abstractmethod
    def _listen(self) -> None:
        """Append to `events` until `_over`."""

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)

    def freed(self, key: str, after: float = 0.0) -> float:
        """Return the time when the key first went after that moment; 0 if it has not yet."""
        return next((at for at, event, seen in self.events if seen == key and event in FREED and at >= after), 0.0)

    def taken(self, key: str) -> float:
        """Return the time when the key was first written; 0 if it has not yet been."""
        return next((at for at, event, seen in self.events if seen == key and event == "hset"), 0.0)

    def renewed(self, key: str, after: float) -> bool:
        """Was it renewed after that moment?"""
        return any(seen == key and event == "expire" and at >= after for at, event, seen in self.events)


class RedisLog(LockLog):
    """By Redis' keyspace events."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._pubsub: Any = self._client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        self._pubsub.psubscribe("__keyevent@0__:*")
        super().__init__()

    def _listen(self) -> None:
        while not self._over.is_set():
            message: Any = self._pubsub.get_message(timeout=0.1)
            if message and ":lock:" in message["data"]:
                self.events.append((time.monotonic(), message["channel"].rpartition(":")[2], message["data"]))

    def close(self) -> None:
        super().close()
        self._pubsub.close()
        self._client.close()


class TableLog(LockLog):
    """By a look at the tables, again and again."""

    def __init__(self, tables: LockTables) -> None:
        self._tables, self._looked = tables, 0.0
        super().__init__()

    def _listen(self) -> None:
        before: dict[str, HeldLock] = {}
        while not self._over.wait(LOOK):
            held = {lock.name: lock for lock in self._tables.held()}
            now = time.monotonic()
            for key, lock in before.items():
                if key not in held or held[key].token != lock.token:
                    # One that has not expired by what the store said last was released.
                    late = lock.left_ms - (now - self._looked) * 1000 <= 0
                    self.events.append((now, "expired" if late else "del", key))
            for key, lock in held.items():
                was = before.get(key)
                if was is None or was.token != lock.token:
                    self.events.append((now, "hset", key))
                elif was.until_us != lock.until_us:
                    self.events.append((now, "expire", key))
            before, self._looked = held, now


@dataclass(frozen=True)
class Mark:
    word: str
    at: float
    pid: int


@dataclass(frozen=True)
class Row:
    """One run of one task, and how its body ends.

    Args:
        end: The mark of the end; "" for a body that beats and dies unmarked.
        options: For `apply_async`.
        within: Seconds from the end until the lock has to be free.
    """

    name: str
    task: str
    way: str
    end: str
    options: Mapping[str, Any] = field(default_factory=dict)
    within: float = FREED_WITHIN

    @property
    def args(self) -> tuple[str, ...]:
        return (self.name, self.way)


@dataclass
class WorkerEnvironment:
    """Servers, a publisher's app, and what the tasks have marked. Results and marks are in the store's database 1."""

    folder: Path
    module: str
    broker: Server
    store: Server
    log: LockLog
    app: ModuleType
    store_client: redis.Redis
    marks_client: redis.Redis
    _stack: ExitStack

    @property
    def urls(self) -> Urls:
        return Urls(self.broker.url(), self.store.url(1), self.store.lock_url())

    def start(
        self,
        *args: str,
        pool: str = "prefork",
        concurrency: int = 2,
        environ: Mapping[str, str] | None = None,
        node: str | None = None,
    ) -> Worker:
        """A ready worker, which is killed at the end."""
        context = running_worker(
            self.module,
            *args,
            folder=self.folder,
            urls=self.urls,
            pool=pool,
            concurrency=concurrency,
            environ=environ,
            node=node,
        )
        return self._stack.enter_context(context)

    def key(self, task: str, *args: Any) -> str:
        """The store's key of the lock that this call takes."""
        return lock_records.key(self.store, getattr(self.app, task).lock_spec.name_of(args, {}))

    def send(self, row: Row, **options: Any) -> Any:
        return getattr(self.app, row.task).apply_async(row.args, **{**row.options, **options})

    def marks(self, name: str) -> list[Mark]:
        texts: Any = self.marks_client.lrange(f"marks:{name}", 0, -1)
        return [Mark(*json.loads(text)) for text in texts]

    def words(self, name: str) -> list[str]:
        return [mark.word for mark in self.marks(name)]

    def mark(self, name: str, word: str, within: float = 30.0) -> Mark:
        """The first mark of that word, as soon as it is there."""
        found = eventually(
            lambda: next((mark for mark in self.marks(name) if mark.word == word), None),
            within,
            message=f"{name!r} has no mark {word!r}",
        )
        assert found is not None  # for mypy: `eventually` returns what is truthy
        return found

    def beat(self, name: str) -> float:
        """Return the time when the body of that name last showed that it lives."""
        return float(self.marks_client.get(f"beat:{name}") or 0)

    def wait_for_body(self, row: Row) -> None:
        """Wait until the row's body runs, and can be dated if it dies now."""
        self.mark(row.name, "start")
        if not row.end:
            eventually(lambda: self.beat(row.name), message=f"{row.name} does not beat")

    def wait_for_renewal(self, key: str, after: float) -> None:
        """Wait until the lock is renewed after that moment. Renewing never creates, so it was held all the while."""
        eventually(lambda: self.log.renewed(key, after), within=30, message=f"{key}: not renewed any more")

    def seconds_to_freedom(self, row: Row, within: float = 40.0) -> float:
        """From the end or death of the row's body until its lock is free; negative if the body outlived its lock."""
        key, start = self.key(row.task, *row.args), self.mark(row.name, "start").at
        if row.end:
            end = self.mark(row.name, row.end, within).at
            freed = eventually(lambda: self.log.freed(key, start), within=10, message=f"{row.name}: still locked")
        else:
            freed = eventually(lambda: self.log.freed(key, start), within, message=f"{row.name}: still locked")
            time.sleep(0.1)  # a body that outlived its lock beats on
            end = self.beat(row.name)
        return freed - end

    def lives(self, rows: Iterable[Row], dead: Worker) -> dict[str, int]:
        """Return how many milliseconds the store keeps each row's lock after the death of their worker."""
        dead.process.wait(10)
        return {row.name: lock_records.life_ms(self.store, self.key(row.task, *row.args)) for row in rows}

    def seconds_to_expiry(self, row: Row, lives: Mapping[str, int], ttl: float) -> float:
        """As `seconds_to_freedom`, of a row whose worker died.

        Whether that is no more than the ttl is the store's to say: its news may be late.
        """
        seconds = self.seconds_to_freedom(row)
        key = self.key(row.task, *row.args)
        assert 0 < lives[row.name] <= ttl * 1000
        assert [event for _, event, seen in self.log.events if seen == key and event in FREED] == ["expired"]
        assert seconds >= 0, self.words(row.name)
        return seconds


@contextmanager
def running_environment(folder: Path, module: str) -> Iterator[WorkerEnvironment]:
    """Broker and store are servers of their own, so that the one can be away while the other stays."""
    with ExitStack() as stack:
        broker = stack.enter_context(Server(folder / "broker"))
        store = stack.enter_context(Server(folder / "store", options=TELLING))
        tables = store.lock_tables()
        log = TableLog(tables) if tables else RedisLog(store)
        stack.callback(log.close)
        urls = Urls(broker.url(), store.url(1), store.lock_url())
        app = stack.enter_context(loaded_app(module, urls))
        locks, marks = stack.enter_context(store.client()), stack.enter_context(store.client(1))
        yield WorkerEnvironment(folder, module, broker, store, log, app, locks, marks, stack)


def tell(table: str, row: str, seconds: float) -> None:
    """Print one measured row. With DLOCK_ENDINGS_TABLE, also write it into that file, for a table that quotes it."""
    line = f"{table:10} {row:50} {seconds:7.3f} s"
    print(line)  # noqa: T201  # shown by `pytest -rP`
    if path := os.environ.get("DLOCK_ENDINGS_TABLE"):
        with Path(path).open("a") as file:
            file.write(line + "\n")
