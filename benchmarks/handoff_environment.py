"""The environment of the hand-off benchmark: a worker whose bodies record their starts and ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.store.model import AcquireRequest, Identity, QueueRequest, Requester
from celery_dlock.store.redis.keys import LockKeys
from tests.support.polling import eventually
from tests.support.processes import kill_session, spawn, tail
from tests.support.servers import Server
from tests.support.stores import name_in, store_at

if TYPE_CHECKING:
    from celery_dlock.task.base import SingletonTask

NODE = "handoff@localhost"
#: Pool children: one body blocked at its gate, one that ends, and one free to start.
CHILDREN = 3
#: Lease of the locks that the benchmark itself holds, in milliseconds. They are not renewed.
TTL_MS = 3600_000
BY = Requester.of("bench", "bench", "bench", os.getpid())


class Event(NamedTuple):
    """A line of the diary."""

    at: float
    what: str
    name: str
    number: int


class Environment:
    """The app, its server and the diary of its bodies."""

    def __init__(self, server: Server, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        os.environ["DLOCK_BENCH_SERVER"] = server.url().rpartition("/")[0]
        os.environ["DLOCK_BENCH_FOLDER"] = str(folder)
        from benchmarks import handoff_tasks  # noqa: PLC0415 (it reads the environment when it is imported)

        self.tasks: Any = handoff_tasks
        self.folder = folder
        self.broker, self.locks = server.client(db=0), server.client(db=2)
        self.store = store_at(server.url(2), timeout=5)
        self._diary = (folder / "diary").open("rb")
        self._unread = b""

    # -- bodies

    def gather(self, done: Callable[[list[Event]], object], within: float = 120.0) -> list[Event]:
        """Return the events since the last call, in order of time, once ``done`` is true for them."""
        events: list[Event] = []

        def looked() -> bool:
            *lines, self._unread = (self._unread + self._diary.read()).split(b"\n")
            for line in lines:
                at, what, name, number = line.decode().split()
                events.append(Event(float(at), what, name, int(number)))
            return bool(done(events))

        eventually(looked, within, every=0.005, message="the bodies are not done")
        return sorted(events)

    def ended(self, name: str, count: int) -> list[Event]:
        """Gather events until ``count`` bodies of that name have ended."""
        return self.gather(lambda events: count <= sum(event[1:3] == ("end", name) for event in events))

    def close_gate(self, name: str) -> None:
        (self.folder / f"closed-{name}").touch()

    def open_gate(self, name: str) -> None:
        (self.folder / f"closed-{name}").unlink()

    # -- queues

    def keys(self, name: str) -> LockKeys:
        task: SingletonTask = self.tasks.queued
        return LockKeys.of(task.dlock.settings.prefix, task.lock_spec.name_of((name, 0), {}))

    def waiting(self, name: str) -> int:
        count: int = self.locks.zcard(self.keys(name).queue()[0])
        return count

    def park(self, name: str, numbers: range) -> None:
        """Park calls as a worker would. The lock has to be held."""
        keys = self.keys(name)
        for identity, entry in self.parked_entries(name, numbers):
            self.store.acquire(
                name_in(keys), f"{identity.task_id}.1", TTL_MS, AcquireRequest(BY, identity, queue=QueueRequest(entry))
            )

    def hold(self, name: str) -> str:
        """Acquire the lock and return the acquisition."""
        self.store.acquire(name_in(self.keys(name)), "bench.1", TTL_MS, AcquireRequest(BY))
        return "bench.1"

    def parked_entries(self, name: str, numbers: range) -> Iterator[tuple[Identity, str]]:
        """Yield parked entries of calls, made from one real message that no worker received."""
        task, away = self.tasks.queued, "unconsumed"
        task.apply_async((name, 0), queue=away)
        with task.app.connection_for_read() as connection, connection.SimpleQueue(away) as queue:
            message = queue.get(timeout=5)
            message.ack()
        headers, properties, now_us = message.headers, message.properties, round(time.time() * 1e6)
        broker = task.dlock.grant_publisher.broker
        model, beside = headers["id"], message.body.partition(b"]")[2]
        for number in numbers:
            task_id = f"{number:08x}{model[8:]}"
            body = f'[["{name}", {number}]'.encode() + beside
            its = {**headers, "id": task_id, "root_id": task_id}, {**properties, "correlation_id": task_id}
            raw = (body, message.content_type, message.content_encoding, *its, "celery")
            yield Identity(task_id), ParkedMessage.of(raw, broker, now_us + number, 0).text()


@contextmanager
def working(environment: Environment) -> Iterator[None]:
    """Run a worker until it is ready, with logging off."""
    log = environment.folder / "worker.log"
    options = [
        "-P",
        "prefork",
        "-c",
        str(CHILDREN),
        "-l",
        "WARNING",
        "-n",
        NODE,
        "--without-mingle",
        "--without-gossip",
    ]
    process = spawn([sys.executable, "-m", "celery", "-A", "benchmarks.handoff_app", "worker", *options], log)
    ping = environment.tasks.app.control.ping
    try:
        eventually(lambda: ping([NODE], timeout=0.5), within=60, message="the worker does not answer")
        yield
    except AssertionError:
        print(tail(log), file=sys.stderr)
        raise
    finally:
        kill_session(process)


def gaps(events: list[Event], name: str) -> list[float]:
    """Return the seconds from each end to the next start of that name.

    Raises:
        AssertionError: Two bodies overlapped, so the figures would be meaningless.
    """
    its = [event for event in events if event.name == name]
    its = its[1:] if its[0].what == "start" else its
    ends, starts = its[0::2], its[1::2]
    if {event.what for event in ends} != {"end"} or {event.what for event in starts} - {"start"}:
        raise AssertionError(f"bodies of {name} overlapped: {its}")
    return [start.at - end.at for end, start in zip(ends, starts, strict=False)]
