"""Scale of the queue policy: memory per waiter, and the cost of each step by the number of waiters."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

from benchmarks.handoff_environment import BY, TTL_MS, Environment
from benchmarks.tables import table
from benchmarks.targets import Target
from celery_dlock.keys.key_spec import BUCKETS
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Grant, Identity, QueueRequest
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.queue_sweeper import SWEEP_INTERVAL, QueueSweeper
from tests.support.stores import name_in

#: Repetitions of each step on each queue, in turns.
TIMES = 300
#: Waiters of each lock in the part with many locks.
EACH = 10
#: Most growth of a step's cost from one waiter to many: the logarithm of a sorted set, and noise.
GROWTH = 1.5
LISTING = "list the first 100"

T = TypeVar("T")


class Clocks:
    """Times of a call: seen by the client, and spent by the server in scripts."""

    def __init__(self, environment: Environment) -> None:
        self._locks = environment.locks
        self.micros: defaultdict[str, list[float]] = defaultdict(list)
        self.server: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, step: str, call: Callable[[], T]) -> T:
        before = self._in_scripts()
        began = time.perf_counter()
        answer = call()
        self.micros[step].append((time.perf_counter() - began) * 1e6)
        self.server[step].append(self._in_scripts() - before)
        return answer

    def _in_scripts(self) -> int:
        micros: int = self._locks.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"]
        return micros


class Queue:
    """A held lock and its waiters, whose number is the same after each cycle.

    Args:
        environment: The environment, without a worker.
        size: Number of waiters.
    """

    def __init__(self, environment: Environment, size: int) -> None:
        self._environment = environment
        self._store = environment.store
        self.size = size
        name = f"queue-{size}"
        self._keys = environment.keys(name)
        self._acquisition = environment.hold(name)
        self._entries = environment.parked_entries(name, range(1, 1 << 32))
        self.clocks = Clocks(environment)

    def fill(self) -> None:
        for _ in range(self.size):
            self._park()

    def cycle(self) -> None:
        """Run each step once."""
        time_, store, keys = self.clocks.time, self._store, self._keys
        identity, entry = next(self._entries)
        time_("park", lambda: self._park(identity, entry))
        time_("take one out", lambda: store.remove_waiter(name_in(keys), identity.digest, "bench"))
        time_("sweep of a held lock", lambda: store.sweep(name_in(keys), "bench", 60_000, 5))
        time_(LISTING, lambda: store.list_waiters(name_in(keys), 100))
        self._park()
        released = time_(
            "release, which grants", lambda: store.release(name_in(keys), self._acquisition, ReleaseRequest(queue=True))
        )
        granted = _some(released.granted)
        time_("record as published", lambda: store.confirm_publish(name_in(keys), granted.identity, 60_000))
        time_("take when granted", lambda: self._take(granted))
        self._park()
        # Simulate an expired lease of a dead host.
        self._environment.locks.delete(keys.lock)
        swept = time_("sweep, which grants", lambda: store.sweep(name_in(keys), "bench", 60_000, 5))
        self._take(_some(swept.granted))

    def _park(self, *given: Any) -> None:
        park(self._environment, self._keys, *(given or next(self._entries)))

    def _take(self, granted: Grant) -> None:
        task_id = json.loads(granted.entry.partition("\n")[0])[1]
        self._acquisition = f"{task_id}.2"
        request = AcquireRequest(BY, Identity(task_id), queue=QueueRequest(grant_id=granted.grant_id))
        self._store.acquire(name_in(self._keys), self._acquisition, TTL_MS, request)


def park(environment: Environment, keys: LockKeys, identity: Identity, entry: str) -> None:
    environment.store.acquire(
        name_in(keys), f"{identity.task_id}.1", TTL_MS, AcquireRequest(BY, identity, queue=QueueRequest(entry))
    )


def measure(environment: Environment, crowd: int) -> list[Target]:
    """Print the memory per waiter and the time per step, and return the targets."""
    return [*_one_lock(environment, crowd), *_many_locks(environment, crowd // EACH)]


def _one_lock(environment: Environment, crowd: int) -> list[Target]:
    queues = [Queue(environment, size) for size in (1, 1000, crowd)]
    for queue in queues[:2]:
        queue.fill()
    used, began = _used(environment), time.monotonic()
    queues[2].fill()
    print(f"{crowd:,} waiters of one lock: {_weight(environment, used, crowd)} in {time.monotonic() - began:.0f} s\n")
    for turn in range(TIMES):
        for queue in queues[turn % 3 :] + queues[: turn % 3]:
            queue.cycle()
    # Synchronously: memory that is freed in the background would falsify the next measurement.
    environment.locks.execute_command("FLUSHDB", "SYNC")  # type: ignore[no-untyped-call]  # redis-py has no types here
    rows, targets = [], []
    for step in queues[0].clocks.micros:
        calls, server = ([median(of(queue)) for queue in queues] for of in (_micros(step), _server(step)))
        rows.append([step, *(f"{took:.0f}" for took in (*calls, *server)), f"{server[2] / server[0]:.2f}"])
        if step != LISTING:
            targets.append(Target(f"{step}, server's time, {crowd:,} waiting / 1", server[2] / server[0], GROWTH))
    sizes = [f"{queue.size:,}" for queue in queues]
    head = [
        "one step by number waiting",
        *(f"µs: {sizes[0]}", *sizes[1:]),
        *(f"server: {sizes[0]}", *sizes[1:]),
        "growth",
    ]
    print(f"p50 of {TIMES} calls each in turn, and how much of it the server spends in the script\n")
    print(f"{table(head, rows)}\n")
    return targets


def _micros(step: str) -> Callable[[Queue], list[float]]:
    return lambda queue: queue.clocks.micros[step]


def _server(step: str) -> Callable[[Queue], list[float]]:
    return lambda queue: queue.clocks.server[step]


def _many_locks(environment: Environment, count: int) -> list[Target]:
    """Measure the sweeper's rounds over many locks with waiters."""
    runtime = environment.tasks.queued.dlock
    sweeper = QueueSweeper(DeliveryRegistry(runtime), lambda call: call(), lambda: False)
    entries = environment.parked_entries("many", range(1, 1 << 32))
    _round(environment, sweeper, "loads the scripts", 0)
    rows = [_round(environment, sweeper, "no queues at all", 0)]
    used, began = _used(environment), time.monotonic()
    locks = [environment.keys(f"many-{number}") for number in range(count)]
    for keys in locks:
        environment.store.acquire(name_in(keys), "bench.1", TTL_MS, AcquireRequest(BY))
        for _ in range(EACH):
            park(environment, keys, *next(entries))
    took = time.monotonic() - began
    print(f"{EACH} waiters of each of {count:,} locks: {_weight(environment, used, EACH * count)} in {took:.0f} s\n")
    rows.append(_round(environment, sweeper, "none due", 0))
    few = max(1, count // 100)
    for shown, due in ((f"{few:,} due", locks[:few]), (f"{count - few:,} due", locks[few:])):
        with environment.locks.pipeline(transaction=False) as pipeline:
            for keys in due:
                # Simulate expired leases of dead hosts.
                pipeline.delete(keys.lock)
                pipeline.zadd(keys.queue()[3], {keys.name: 0})
            pipeline.execute()
        rows.append(_round(environment, sweeper, shown, len(due)))
        granted = environment.broker.llen("celery")
        if granted != len(due):
            raise AssertionError(f"{shown}: {granted} messages were published")
        environment.broker.delete("celery")
    growth = rows[3][1] / len(locks[few:]) * few / rows[2][1]
    shown_rows = [[row[0], f"{row[1] * 1e3:.1f}", *row[2:]] for row in rows]
    head = ["one round of the sweeper", "ms in all", "µs per lock due", "server's µs per lock due, or per round"]
    print(f"{BUCKETS} buckets, a round every {SWEEP_INTERVAL} s by one of all workers; each grant is published\n")
    print(f"{table(head, shown_rows)}\n")
    return [Target(f"sweep and publish one lock, {count - few:,} due by {few:,} due", growth, GROWTH)]


def _round(environment: Environment, sweeper: QueueSweeper, shown: str, due: int) -> list[Any]:
    clocks = Clocks(environment)
    sweeper._next_sweep = 0.0  # noqa: SLF001  # do not wait for the next round
    clocks.time("round", sweeper._sweep_due)  # noqa: SLF001  # the sweeper thread calls it
    micros, server = clocks.micros["round"][0], clocks.server["round"][0]
    each = [f"{micros / due:.0f}" if due else "-", f"{(server if not due else server / due):.0f}"]
    return [shown, micros / 1e6, *each]


def _some(granted: Grant | None) -> Grant:
    if granted is None:
        raise AssertionError("no waiter was granted the lock")
    return granted


def _used(environment: Environment) -> int:
    used: int = environment.locks.info("memory")["used_memory"]
    return used


def _weight(environment: Environment, before: int, waiters: int) -> str:
    entry = next(environment.parked_entries("weight", range(1)))[1]
    return f"{(_used(environment) - before) / waiters:.0f} bytes each, of which {len(entry)} are the message"
