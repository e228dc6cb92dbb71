"""Many callers wait for one lock: `make bench-contention`, about 4 minutes.

32 threads of two processes take turns on one lock, with a blocking `Lock` and with redis-py's. Then 10 and 300 calls
with `wait=600` wait in the slots of two workers. All kinds of a comparison alternate in one run.

Exits with status 1 if a target is missed. docs/explanation/benchmarks.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import redis

from benchmarks.contention_member import KINDS
from benchmarks.tables import table
from benchmarks.targets import Target
from tests.support.polling import eventually
from tests.support.processes import ROOT, Process, kill_session, spawn, tail
from tests.support.servers import Server

PROCESSES, THREADS = 2, 16
BODIES = (0.001, 0.01)
OURS = next(iter(KINDS))
CALLS = (10, 300)
#: Greenlets of each of the two workers.
SLOTS = 160


class Found(NamedTuple):
    """The figures of one kind in one round."""

    sections: float
    handoff_ms: float
    handoff_median_ms: float
    retaken: float
    jain: float
    longest_s: float
    scripts: float
    blocked: float
    cpu_us: float
    overlaps: float


class Cost:
    """The scripts, BLPOPs and CPU seconds of the server since this object was made."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._before = self._now()

    def _now(self) -> tuple[float, float, float]:
        stats: Any = self._client.info("commandstats")
        cpu: Any = self._client.info("cpu")
        calls = {name.removeprefix("cmdstat_"): facts["calls"] for name, facts in stats.items()}
        # redis-py takes its lock by SET, and releases it by a script.
        scripts = calls.get("evalsha", 0) + calls.get("eval", 0) + self._sets(calls)
        return scripts, calls.get("blpop", 0), cpu["used_cpu_user"] + cpu["used_cpu_sys"]

    def _sets(self, calls: dict[str, int]) -> int:
        return 0

    def since(self) -> tuple[float, float, float]:
        scripts, blocked, cpu = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return scripts, blocked, cpu


class PlainCost(Cost):
    """The same for redis-py's lock: its SET is sent by the client, and no script of it calls SET."""

    def _sets(self, calls: dict[str, int]) -> int:
        return calls.get("set", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: the figures are rough")
    parser.add_argument("--rounds", type=int, default=2, help="how often the kinds alternate (default 2)")
    parser.add_argument("--seconds", type=float, default=7.0, help="how long each kind takes turns (default 7)")
    parser.add_argument("--only", choices=("threads", "calls"), help="run one half")
    asked = parser.parse_args()
    rounds, seconds = (1, 2.0) if asked.quick else (asked.rounds, asked.seconds)
    targets: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, Server(Path(name) / "server") as server:
        if asked.only != "calls":
            for body in BODIES:
                targets += threads(server, body, rounds, seconds)
        if asked.only != "threads":
            targets += calls(server, Path(name), rounds)
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


# Threads


def threads(server: Server, body: float, rounds: int, seconds: float) -> list[Target]:
    found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, rows in found.items():
            rows.append(taken_in_turns(server, kind, body, seconds))
    print(f"\n  {PROCESSES * THREADS} threads, bodies of {body * 1000:g} ms, {rounds} rounds of {seconds:g} s\n")
    head = ("kind", "sections", "hand-off ms", "median", "taken again", "Jain", "longest wait s", "scripts", "BLPOP",
            "CPU us", "overlaps")  # fmt: skip
    shown = [(kind, *_shown([mean(column) for column in zip(*kinds, strict=True)])) for kind, kinds in found.items()]
    print(table(head, shown) + "\n", flush=True)
    sums = Found(*(mean(column) for column in zip(*found[OURS], strict=True)))
    what = f"32 threads, {body * 1000:g} ms"
    if body > BODIES[0]:
        return [Target(f"{what}: Jain's index", sums.jain, 0.95, floor=True)]
    return [
        Target(f"{what}: hand-off in the mean, ms", sums.handoff_ms, 1.0),
        Target(f"{what}: scripts a section", sums.scripts, 4.0),
        Target(f"{what}: Jain's index", sums.jain, 0.99, floor=True),
        Target(f"{what}: longest wait of all rounds, s", max(row.longest_s for row in found[OURS]), 1.0),
    ]


def taken_in_turns(server: Server, kind: str, body: float, seconds: float) -> Found:
    command = [sys.executable, "-m", "benchmarks.contention_member", kind, server.url(1), str(THREADS), str(body),
               str(seconds)]  # fmt: skip
    with ExitStack() as stack, server.client() as client:
        members = [
            stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for _ in range(PROCESSES)
        ]
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n"
        cost = Cost(client) if kind == OURS else PlainCost(client)
        for member in members:
            assert member.stdin is not None
            member.stdin.write("go\n")
            member.stdin.flush()
        reports = [json.loads(member.communicate(timeout=seconds + 60)[0]) for member in members]
        scripts, blocked, cpu = cost.since()
    by_thread = [turns for report in reports for turns in report["turns"]]
    unserved = [waited for report in reports for waited in report["unserved"]]
    count = sum(map(len, by_thread))
    waits = [got - asked for turns in by_thread for asked, got, _ in turns]
    cpu += sum(report["cpu"] for report in reports)
    between, retaken, overlaps = handoffs(
        [(got, done, number) for number, turns in enumerate(by_thread) for _, got, done in turns]
    )
    fair = jain([len(turns) for turns in by_thread])
    return Found(
        count, mean(between) * 1e3, median(between) * 1e3, retaken / count, fair, max(waits + unserved),
        scripts / count, blocked / count, cpu / count * 1e6, overlaps,
    )  # fmt: skip


def handoffs(sections: Sequence[tuple[float, float, int]]) -> tuple[list[float], int, int]:
    """Return the times from the end of one body to the start of the next one of another caller, and two counts.

    The counts: how often a caller took the lock again itself, and how many bodies overlapped.
    """
    ordered = sorted(sections)
    pairs = list(itertools.pairwise(ordered))
    handoffs = [later[0] - earlier[1] for earlier, later in pairs if earlier[2] != later[2]]
    return handoffs, len(pairs) - len(handoffs), sum(later[0] < earlier[1] for earlier, later in pairs)


def jain(counts: Sequence[int]) -> float:
    """Return Jain's index of fairness: 1 if all got the same number of sections, 1/n if one got all."""
    return sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))


def _shown(figures: Sequence[float]) -> list[str]:
    found = Found(*figures)
    return [f"{found.sections:.0f}", f"{found.handoff_ms:.2f}", f"{found.handoff_median_ms:.2f}",
            f"{found.retaken:.0%}", f"{found.jain:.3f}", f"{found.longest_s:.2f}", f"{found.scripts:.1f}",
            f"{found.blocked:.1f}", f"{found.cpu_us:.0f}", f"{found.overlaps:.0f}"]  # fmt: skip


# Calls in worker slots


def calls(server: Server, folder: Path, rounds: int) -> list[Target]:
    os.environ["DLOCK_BENCH_SERVER"] = server.url().rpartition("/")[0]
    os.environ["DLOCK_BENCH_FOLDER"] = str(folder)
    from benchmarks import contention_tasks  # noqa: PLC0415 (it reads the environment when it is imported)

    figures: dict[int, list[tuple[float, float, float]]] = {number: [] for number in CALLS}
    with working(folder, 2), server.client() as client:
        for _ in range(rounds):
            for number, rows in figures.items():
                rows.append(waited(contention_tasks.waits, client, folder, number))
    print("\n  calls with wait=600 in the slots of two workers, bodies of 10 ms\n")
    by_number = {number: [mean(column) for column in zip(*rows, strict=True)] for number, rows in figures.items()}
    head = ("calls", "hand-off ms", "scripts a body", "BLPOP a body")
    shown = [(str(number), *(f"{value:.2f}" for value in values)) for number, values in by_number.items()]
    print(table(head, shown) + "\n", flush=True)
    few, many = (by_number[number] for number in CALLS)
    return [
        Target("300 calls: scripts a body", many[1], 4.0),
        Target("300 calls: hand-off by that of 10", many[0] / few[0], 3.0),
    ]


def waited(task: Any, client: redis.Redis, folder: Path, number: int) -> tuple[float, float, float]:
    """Hold the lock until all calls wait, and let them run. Return the mean hand-off in ms, and scripts and BLPOPs."""
    diary = folder / "diary"
    diary.unlink(missing_ok=True)
    cost = Cost(client)
    with task.lock_for(0):
        for call in range(number):
            task.delay(call)
        eventually(lambda: cost.since()[0] >= number + 1, 60, message="the calls do not wait")
        time.sleep(0.2)
    eventually(lambda: diary.exists() and diary.read_text().count("\n") >= number, 120, message="the calls do not end")
    scripts, blocked, _ = cost.since()
    lines = [line.split() for line in diary.read_text().splitlines()]
    between, _, overlaps = handoffs([(float(got), float(done), int(call)) for got, done, call in lines])
    assert not overlaps
    return mean(between) * 1e3, scripts / number, blocked / number


@contextmanager
def working(folder: Path, count: int) -> Iterator[None]:
    def start(number: int) -> Process:
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.contention_tasks", "worker", "--pool", "gevent",
                   "-c", str(SLOTS), "-n", f"contention{number}@localhost", "--without-mingle", "--without-gossip",
                   "-l", "INFO"]  # fmt: skip
        return spawn(command, folder / f"worker{number}.log")

    workers = [start(number) for number in range(count)]
    try:
        for number in range(count):
            log = folder / f"worker{number}.log"
            eventually(lambda log=log: "ready" in tail(log), 60, message="a worker does not start")  # type: ignore[misc]
        yield
    finally:
        for worker in workers:
            kill_session(worker)


if __name__ == "__main__":
    sys.exit(main())
