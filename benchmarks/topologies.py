"""Cost of a lock on each topology, durability and quarantine: `python benchmarks/topologies.py`.

All servers run at once and are measured in turns. Each round has another order, so that none always follows another.
docs/explanation/topologies.md quotes one run.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks import figures
from benchmarks.tables import percentile, table
from celery_dlock import Lock
from celery_dlock.errors import StoreNotReady
from tests.support.clusters import ClusterSet
from tests.support.replicas import ReplicaSet
from tests.support.sentinels import MASTER_NAME, SentinelSet
from tests.support.servers import Server
from tests.support.topologies import RedlockSet

REPLICAS_1: dict[str, Any] = {"dlock_durability": {"replicas": 1}}
REPLICAS_2: dict[str, Any] = {"dlock_durability": {"replicas": 2}}
FSYNC_LOCAL: dict[str, Any] = {"dlock_durability": {"fsync": "local"}}
FSYNC_1: dict[str, Any] = {"dlock_durability": {"fsync": 1, "timeout": 10}}
QUARANTINE: dict[str, Any] = {"dlock_quarantine": 1}
#: The baseline of the comparison.
PLAIN = ("one server", "primary")
#: A replica reports its disk writes once a second, so this case has one cycle in each tenth round.
SLOW = ("… and 2 replicas with it", "fsync 1")

ONE_DEAD = "Redlock of 5, one dead"

#: Topology and durability, and the settings that declare them.
Way = tuple[str, str]
Settings = dict[Way, dict[str, Any]]
Call = Callable[[], None]


def started(folder: Path, stack: ExitStack) -> Settings:
    """Start all servers."""
    single = stack.enter_context(Server(folder / "single"))
    synced = stack.enter_context(Server(folder / "synced", persistent=True))
    copied = stack.enter_context(ReplicaSet(folder / "copied", replicas=2))
    copied_synced = stack.enter_context(ReplicaSet(folder / "copied-synced", replicas=2, persistent=True))
    sentinels = stack.enter_context(SentinelSet(folder / "sentinels"))
    cluster = stack.enter_context(ClusterSet(folder / "cluster"))
    redlock = {
        name: stack.enter_context(RedlockSet(folder / f"redlock{number}", nodes=nodes))
        for number, (name, nodes) in enumerate({"Redlock of 3": 3, "Redlock of 5": 5, ONE_DEAD: 5}.items())
    }
    redlock[ONE_DEAD].node(0).kill()
    watched = {"dlock_url": sentinels.url(), "dlock_transport_options": {"master_name": MASTER_NAME}}
    return {
        PLAIN: {"dlock_url": single.url()},
        ("one server", "quarantine"): {"dlock_url": single.url(), **QUARANTINE},
        ("… with 2 replicas", "replicas 1"): {"dlock_url": copied.primary.url(), **REPLICAS_1},
        ("… with 2 replicas", "replicas 2"): {"dlock_url": copied.primary.url(), **REPLICAS_2},
        ("… with appendfsync always", "primary"): {"dlock_url": synced.url()},
        ("… with appendfsync always", "fsync local"): {"dlock_url": synced.url(), **FSYNC_LOCAL},
        SLOW: {"dlock_url": copied_synced.primary.url(), **FSYNC_1},
        ("Sentinel", "primary"): watched,
        ("Sentinel", "replicas 1"): watched | REPLICAS_1,
        ("Sentinel", "quarantine"): watched | QUARANTINE,
        ("Cluster", "primary"): {"dlock_url": cluster.url()},
        ("Cluster", "replicas 1"): {"dlock_url": cluster.url(), **REPLICAS_1},
        ("Cluster", "quarantine"): {"dlock_url": cluster.url(), **QUARANTINE},
        **{
            (name, "restart delay"): {"dlock_url": nodes.urls(), "dlock_quarantine": 1}
            for name, nodes in redlock.items()
        },
    }  # fmt: skip


def cycle(conf: dict[str, Any]) -> Call:
    """Return a call that acquires a lock and releases it."""
    app = Celery("bench", broker="memory://", set_as_current=False)
    app.conf.update(dlock_timeout=20, **conf)
    lock = Lock("bench", app=app)

    def call() -> None:
        lock.acquire()
        lock.release()

    return call


def ready(call: Call) -> None:
    """Wait until the server's quarantine is over."""
    while True:
        try:
            return call()
        except StoreNotReady:
            time.sleep(0.05)


def measure(settings: Settings, rounds: int, block: int) -> dict[Way, list[float]]:
    """Return the milliseconds of each cycle."""
    calls = {way: cycle(conf) for way, conf in settings.items()}
    for call in calls.values():
        ready(call)
    took: dict[Way, list[float]] = {way: [] for way in calls}
    order, chance = list(calls), random.Random(1)
    for number in range(rounds):
        chance.shuffle(order)
        for way in order:
            for _ in range(block if way != SLOW else number % 10 == 0):
                began = time.perf_counter()
                calls[way]()
                took[way].append((time.perf_counter() - began) * 1e3)
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="how many, at least 20 (default 200)")
    parser.add_argument("--block", type=int, default=10, help="how many cycles of one before the next (default 10)")
    parser.add_argument("--record", action="store_true", help="write the figures to docs/images/benchmarks")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, ExitStack() as stack:
        took = measure(started(Path(name), stack), max(asked.rounds, 20), asked.block)
    plain = percentile(took[PLAIN], 50)
    rows = []
    for (topology, declared), of in took.items():
        p50, p99 = percentile(of, 50), percentile(of, 99)
        rows.append([topology, declared, f"{p50:.2f}", f"{p99:.2f}", f"{p50 / plain:.2f}", str(len(of))])
    print(f"an acquire and its release, {max(asked.rounds, 20)} rounds, {asked.block} of each in a row\n")
    print(table(["servers", "declared", "p50 ms", "p99 ms", "x one server", "cycles"], rows))
    if asked.record:
        bars = {", ".join(way): percentile(took[way], 50) for way in took if way != SLOW}
        title = "An acquire and its release, median in ms"
        figures.record("stores", title, bars, command="benchmarks/topologies.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
