"""Load of idle workers on the lock store, and delay until a dead holder's waiter runs: `make bench-idle`.

Exits with status 1 if a target is missed. docs/explanation/benchmarks.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.handoff_environment import BY, Environment
from benchmarks.tables import table
from benchmarks.targets import Target
from celery_dlock.store.model import AcquireRequest, QueueRequest
from celery_dlock.store.redis.scripts import SCRIPTS
from tests.support.polling import eventually
from tests.support.processes import Process, kill_session, spawn, tail
from tests.support.scripts import shas
from tests.support.servers import Server
from tests.support.stores import name_in

#: Most scripts a second that ten idle workers may send together.
MOST_SCRIPTS = 30.0
#: Most seconds from the end of a dead holder's lease to the start of the next waiter's body.
HAND_OFF = 2.0
#: Lease of a holder that dies at once, in milliseconds.
TTL_MS = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: the figures are rough")
    parser.add_argument("--workers", type=int, default=10, help="how many are idle (default 10)")
    parser.add_argument("--seconds", type=float, help="how long the store's calls are counted (default 20)")
    parser.add_argument("--deaths", type=int, help="how many holders die (default 20)")
    asked = parser.parse_args()
    seconds, deaths = (5.0, 3) if asked.quick else (20.0, 20)
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, Server(Path(name) / "server") as server:
        targets = measure(server, Path(name), asked.workers, asked.seconds or seconds, asked.deaths or deaths)
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


def measure(server: Server, folder: Path, workers: int, seconds: float, deaths: int) -> list[Target]:
    """Print the scripts that workers send and the duration of hand-offs, and return the targets."""
    environment = Environment(server, folder / "stage")
    rows, rate = [], 0.0
    with working(environment, 1):
        rows.append(_row(environment, 1, seconds)[0])
    with working(environment, workers) as processes:
        row, rate = _row(environment, workers, seconds)
        rows.append(row)
        print("\n" + table(("idle workers", "scripts/s", "of which", "store's CPU, %"), rows) + "\n")
        calm = [_handoff_delay(environment, f"calm-{number}") for number in range(deaths)]
        print(f"from the end of a dead holder's lease to the next body, s: {_shown(calm)}")
        killed = [_handoff_delay(environment, f"killed-{number}", processes.pop()) for number in range(workers - 1)]
        print(f"... while a worker is killed, one after another, s:        {_shown(killed)}\n")
    return [
        Target(f"scripts a second of {workers} idle workers", rate, MOST_SCRIPTS),
        Target("slowest hand-off after a death, s", max(calm), HAND_OFF),
        Target("slowest hand-off after a death, while a worker is killed, s", max(killed), HAND_OFF),
    ]


def _row(environment: Environment, workers: int, seconds: float) -> tuple[list[str], float]:
    before, began = _script_load(environment), time.monotonic()
    time.sleep(seconds)
    after, took = _script_load(environment), time.monotonic() - began
    calls, cpu = ((after[place] - before[place]) / took for place in (0, 1))
    kinds = ", ".join(f"{name} {count / 2:.1f}" for name, count in _kinds(environment, 2.0).most_common())
    return [str(workers), f"{calls:.1f}", kinds or "-", f"{cpu * 100:.1f}"], calls


def _script_load(environment: Environment) -> tuple[float, float]:
    """Return the scripts sent and the server's CPU seconds, both since its start."""
    calls = environment.locks.info("commandstats")
    sent = sum(facts["calls"] for name, facts in calls.items() if name in {"cmdstat_evalsha", "cmdstat_eval"})
    used = environment.locks.info("cpu")
    return sent, used["used_cpu_user"] + used["used_cpu_sys"]


def _kinds(environment: Environment, seconds: float) -> Counter[str]:
    """Count the scripts that are sent, by name."""
    names = {sha: script.name for script in SCRIPTS.values() for sha in shas(script)}
    found: Counter[str] = Counter()
    with environment.locks.monitor() as monitor:  # type: ignore[no-untyped-call]  # redis-py has no types here
        until = time.monotonic() + seconds
        for command in monitor.listen():
            if time.monotonic() > until:
                break
            words = command["command"].split()
            if words[0] == "EVALSHA" and command["client_type"] != "lua":
                found[names.get(words[1], "foreign")] += 1
            environment.broker.get("tick")  # so that the monitor has a command to yield
    return found


def _handoff_delay(environment: Environment, name: str, victim: Process | None = None) -> float:
    """Let a holder die, and return the seconds from the end of its lease to its waiter's start."""
    keys = environment.keys(name)
    environment.store.acquire(name_in(keys), "bench.1", TTL_MS, AcquireRequest(BY))
    identity, entry = next(environment.parked_entries(name, range(1, 2)))
    time.sleep(random.uniform(0, 0.5))  # at any moment of the workers' rounds
    environment.store.acquire(
        name_in(keys), f"{identity.task_id}.1", TTL_MS, AcquireRequest(BY, identity, queue=QueueRequest(entry))
    )
    ends = time.monotonic() + environment.locks.pttl(keys.lock) / 1000
    if victim is not None:
        time.sleep(max(0.0, ends - time.monotonic() - random.uniform(0, 0.2)))  # at any moment before the lease ends
        kill_session(victim)
    started = next(event.at for event in environment.ended(name, 1) if event[1:3] == ("start", name))
    return started - ends


def _shown(values: list[float]) -> str:
    middle = sorted(values)[len(values) // 2]
    return f"median {middle:.2f}, slowest {max(values):.2f} of {len(values)}"


@contextmanager
def working(environment: Environment, count: int) -> Iterator[list[Any]]:
    """Run ``count`` workers of one process each, with logging off, in their order of start."""
    names = [f"idle{number}@localhost" for number in range(count)]
    log = environment.folder / "workers.log"
    options = ["-P", "threads", "-c", "1", "-l", "WARNING", "--without-mingle", "--without-gossip"]
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.handoff_app", "worker", *options]
    with ExitStack() as stack:
        processes = []
        for name in names:
            processes.append(spawn([*command, "-n", name], log))
            stack.callback(kill_session, processes[-1])
        ping = environment.tasks.app.control.ping
        try:
            eventually(lambda: len(ping(names, timeout=1.0)) == count, within=120, message="a worker does not answer")
            yield processes
        except AssertionError:
            print(tail(log), file=sys.stderr)
            raise


if __name__ == "__main__":
    sys.exit(main())
