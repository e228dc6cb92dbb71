"""Part 2: CPU cost of a singleton task in a worker, beside a plain task and redis-py's lock in the body."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from celery import Celery, Task

from benchmarks import figures
from benchmarks.tables import spread, table
from benchmarks.targets import Target
from tests.support.polling import eventually
from tests.support.processes import kill_session, spawn, tail
from tests.support.servers import Server

NODE = "bench@localhost"
#: The kinds of task, named as in benchmarks/app.py.
PLAIN, OURS, THEIRS = KINDS = ("plain", "singleton", "locked")
Costs = dict[str, list["Cost"]]
#: Tasks that a worker of each pool runs at a time.
CONCURRENCY = {"prefork": 2, "gevent": 10}
SHOWN = {PLAIN: "plain task", OURS: "singleton task", THEIRS: "redis-py's Lock in the body"}


@dataclass(frozen=True)
class Cost:
    """CPU seconds of one task by the process that spent them, and tasks in a second on the clock."""

    main: float
    children: float
    server: float
    rate: float

    @property
    def cpu(self) -> float:
        return self.main + self.children + self.server


class Worker:
    """A running worker and the server it talks to."""

    def __init__(self, app: Celery, server: Server, pid: int) -> None:
        self.app = app
        self._server = server
        self._pid = pid
        self._children = [child.pid for child in psutil.Process(pid).children(recursive=True)]

    def drain(self, kind: str, count: int, queue: str) -> Cost:
        """Publish all tasks first, then time their consumption."""
        task: Task[..., None] = self.app.tasks[f"benchmarks.app.{kind}"]
        with self._server.client(db=1) as results:
            results.flushdb()
            with self.app.producer_or_acquire() as producer:
                for number in range(count):
                    task.apply_async((number,), queue=queue, producer=producer)
            before = self._cpu()
            self.app.control.add_consumer(queue, destination=[NODE])
            # Each end stores one result. Counting keys costs the server almost nothing.
            first = eventually(results.dbsize, within=60, message=f"{queue} is not begun")
            # Start the clock here: a worker may wait for a whole second before it reads a new queue.
            began = time.monotonic()
            eventually(lambda: results.dbsize() >= count, within=300, message=f"{queue} is not drained")
            rate = (count - first) / (time.monotonic() - began)
            main, children, server = ((after - then) / count for after, then in zip(self._cpu(), before, strict=True))
            if not all('"SUCCESS"' in result for result in results.mget(results.keys())):
                raise AssertionError(f"{queue}: not every task succeeded")
            self.app.control.cancel_consumer(queue, destination=[NODE], reply=True, timeout=10)
        return Cost(main, children, server, rate)

    def _cpu(self) -> tuple[float, float, float]:
        return _cpu(self._pid), sum(map(_cpu, self._children)), _cpu(self._server.pid)


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process, with all its threads, ended ones included."""
    # What clock_getcpuclockid(3) makes of a pid; /proc counts in steps of 10 ms, which are 1 % of a round.
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def running(server: Server, folder: Path, pool: str) -> Iterator[Worker]:
    """Run a worker with logging off, and wait until it is ready."""
    from benchmarks.app import app  # noqa: PLC0415 (it reads the server's address when it is imported)

    log = folder / "worker.log"
    options = ["-P", pool, "-c", str(CONCURRENCY[pool]), "-l", "WARNING", "-n", NODE]
    options += ["--without-mingle", "--without-gossip"]
    process = spawn([sys.executable, "-m", "celery", "-A", "benchmarks.app", "worker", *options], log)
    try:
        eventually(lambda: app.control.ping([NODE], timeout=0.5), within=60, message="the worker does not answer")
        yield Worker(app, server, process.pid)
    except AssertionError:
        print(tail(log), file=sys.stderr)
        raise
    finally:
        kill_session(process)


def measure(server: Server, folder: Path, rounds: int, tasks: int, pool: str) -> Costs:
    """Print the cost of a task of each kind, and return it by round."""
    costs: Costs = {kind: [] for kind in KINDS}
    with running(server, folder, pool) as worker:
        for kind in KINDS:
            worker.drain(kind, max(100, tasks // 5), f"warm-{kind}")
        for turn in range(rounds):
            for kind in KINDS if turn % 2 else reversed(KINDS):
                costs[kind].append(worker.drain(kind, tasks, f"round-{turn}-{kind}"))
    _print(costs, tasks, pool)
    return costs


def targets(costs: Costs, pool: str) -> list[Target]:
    """Return the targets."""
    rate = median(_ratios(costs, OURS, THEIRS, "rate"))
    by_rate = "rate of singleton tasks by that of redis-py's Lock in the body"
    if pool == "gevent":
        return [Target(by_rate, rate, 1.0, floor=True)]
    return [
        Target("CPU of a singleton task by that of a plain one", median(_ratios(costs, OURS, PLAIN, "cpu")), 1.20),
        Target("... by that of redis-py's Lock in the body", median(_ratios(costs, OURS, THEIRS, "cpu")), 1.0),
        Target(by_rate, rate, 0.95, floor=True),
    ]


def record(costs: Costs) -> None:
    """Record the CPU of a task by process, for the plots."""
    parts = {"pool child": "children", "main process": "main", "lock store, broker and results": "server"}
    bars = {SHOWN[kind]: {shown: _micros(costs, kind, part) for shown, part in parts.items()} for kind in KINDS}
    figures.record("task", "CPU of one task without a body, µs", bars, command="benchmarks/cycle.py --only drain")


def _micros(costs: Costs, kind: str, part: str) -> float:
    values: list[float] = [getattr(cost, part) for cost in costs[kind]]
    return median(values) * 1e6


def _print(costs: Costs, tasks: int, pool: str) -> None:
    rows = [
        [
            SHOWN[kind],
            *(f"{_micros(costs, kind, part):.0f}" for part in ("cpu", "main", "children", "server")),
            spread(_ratios(costs, kind, PLAIN, "cpu")),
            f"{median(cost.rate for cost in costs[kind]):.0f}",
            spread(_ratios(costs, kind, PLAIN, "rate")),
        ]
        for kind in KINDS
    ]
    head = ["task", "CPU µs", "main", "children", "server", "CPU / plain", "tasks/s", "rate / plain"]
    print(f"One task, pool {pool}, {len(costs[PLAIN])} rounds of {tasks} of each in turn\n\n{table(head, rows)}\n")


def _ratios(costs: Costs, kind: str, other: str, part: str) -> list[float]:
    """Compare round by round, because the load of the machine changes between rounds."""
    pairs = zip(costs[kind], costs[other], strict=True)
    return [getattr(cost, part) / getattr(base, part) for cost, base in pairs]
