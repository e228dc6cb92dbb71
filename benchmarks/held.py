"""The cost of locks that one process holds: `make bench-held`, about two minutes.

A program takes locks and sleeps. Its watchdog renews them. Measured are the CPU time of the program, of its watchdog's
rounds and of the store. So is the longest pause of another thread, or under gevent of another greenlet.

With ``--against FOLDER``, the package in another checkout is measured at the same moments, for a comparison.
Exits with status 1 if a target is missed. docs/explanation/benchmarks.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import table
from benchmarks.targets import Target

ROOT = Path(__file__).parent.parent
TTL = 9.0
#: CPU seconds per second of a program that holds so many locks.
LIMITS = {1_000: 0.005, 10_000: 0.04}
#: Longest CPU time of one round in milliseconds.
LONGEST_ROUND_MS = 20.0
#: Seconds between two wake-ups of the thread that looks for pauses.
PAUSE_STEP = 0.001


class Rounds:
    """Watches the watchdog's rounds from within the program."""

    def __init__(self) -> None:
        from celery_dlock.locking.watchdog import Watchdog  # noqa: PLC0415 (gevent patches first)

        self.cpu: list[float] = []
        self.idle: list[float] = []
        self.renewals = 0
        #: Whether the running round renews.
        self._renewed = False
        run_round = Watchdog.run_round

        def timed(watchdog: Watchdog) -> bool:
            began, self._renewed = time.thread_time(), False
            try:
                return run_round(watchdog)
            finally:
                (self.cpu if self._renewed else self.idle).append(time.thread_time() - began)

        Watchdog.run_round = timed  # type: ignore[method-assign,assignment]

    def count(self, stores: Any) -> None:
        """Count the renewals that are sent to these stores."""
        for store in stores:

            def renew(renewals: Any, within: float | None = None, send: Any = store.renew) -> Any:
                self._renewed = True
                self.renewals += len(renewals)
                return send(renewals, within)

            store.renew = renew


def hold(url: str, count: int, seconds: float) -> dict[str, Any]:
    """Hold locks for a while, and return what that took."""
    from celery import Celery  # noqa: PLC0415 (gevent patches first)

    from celery_dlock import Lock  # noqa: PLC0415
    from celery_dlock.runtime import Runtime  # noqa: PLC0415

    rounds = Rounds()
    app = Celery("held", set_as_current=False)
    app.conf.dlock_url = url
    locks = [Lock(f"held:{os.getpid()}:{number}", app=app, ttl=TTL) for number in range(count)]
    rounds.count(Runtime.of(app).watchdog._stores.values())  # noqa: SLF001  # it has no public name
    for lock in locks:
        lock.acquire()
    time.sleep(TTL / 3)  # the first renewals come in the order of the acquires
    for measured in (rounds.cpu, rounds.idle):
        measured.clear()
    renewed, began, used = rounds.renewals, time.monotonic(), time.process_time()
    time.sleep(seconds)
    took = time.monotonic() - began
    busy, idle = sorted(rounds.cpu), sorted(rounds.idle)
    found = {
        "cpu": (time.process_time() - used) / took,
        "renewals": (rounds.renewals - renewed) / took,
        "idle": statistics.median(idle) * 1000 if idle else 0.0,
        "round": statistics.median(busy) * 1000 if busy else 0.0,
        "longest": max(busy + idle, default=0.0) * 1000,
    }
    found["pause"] = longest_pause(seconds) * 1000
    found["alive"] = sum(lock.lease is not None and lock.lease.held and lock.locked() for lock in locks)
    return found


def longest_pause(seconds: float) -> float:
    """Return the longest delay of a thread, or greenlet, that wants to run each millisecond."""
    longest: list[float] = []

    def run() -> None:
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            time.sleep(PAUSE_STEP)
            longest.append(time.monotonic() - began - PAUSE_STEP)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return sorted(longest)[-5]  # the scheduler of a busy machine adds a few


def holder(tree: Path, url: str, count: int, seconds: float, *, green: bool) -> subprocess.Popen[bytes]:
    """Start a program that holds locks, with the package in ``tree``."""
    arguments = ["--hold", url, str(count), str(seconds), "gevent" if green else "threads"]
    script = [sys.executable, str(ROOT / "benchmarks/held.py"), *arguments]
    environ = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    return subprocess.Popen(script, stdout=subprocess.PIPE, env=environ)


def main() -> int:
    from tests.support.servers import Server  # noqa: PLC0415 (the programs do not need it)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured at the same moments")
    parser.add_argument("--seconds", type=float, default=2 * TTL, help="how long each measurement takes (default 18)")
    asked = parser.parse_args()
    trees = {"": ROOT} | ({"other": asked.against.absolute()} if asked.against else {})
    rows, targets = [], []
    for green in (False, True):
        for count, limit in LIMITS.items():
            with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, Server(Path(name) / "server") as server:
                running = {
                    kind: holder(tree, server.url(), count, asked.seconds, green=green) for kind, tree in trees.items()
                }
                outputs = {kind: process.communicate()[0] for kind, process in running.items()}
                cpu = server.client().info("cpu")
                calls = server.client().info("commandstats")["cmdstat_evalsha"]["calls"]
                per_call = (cpu["used_cpu_user"] + cpu["used_cpu_sys"]) / calls * 1e6
            for kind, output in outputs.items():
                found = json.loads(output)
                threads = "gevent" if green else "threads"
                shown = [f"{found[key]:.3f}" for key in ("cpu",)]
                shown += [f"{per_call:.0f}", f"{found['renewals']:.0f}"]
                shown += [f"{found[key]:.1f}" for key in ("idle", "round", "longest", "pause")]
                rows.append([f"{count} {threads} {kind}", *shown, f"{found['alive']}"])
                if kind == "":
                    targets += [
                        Target(f"CPU s/s of {count} locks, {threads}", found["cpu"], limit),
                        Target(f"longest round at {count}, {threads}, ms", found["longest"], LONGEST_ROUND_MS),
                        Target(f"locks alive of {count}, {threads}", found["alive"], count - 1, floor=True),
                    ]
    head = ["held", "CPU s/s", "store us/script", "renewals/s", "idle ms", "round ms", "max ms", "pause ms", "alive"]
    print("\n" + table(head, rows) + "\n")
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hold"]:
        if sys.argv[5] == "gevent":
            from gevent import monkey  # type: ignore[import-untyped]

            monkey.patch_all()
        print(json.dumps(hold(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
    else:
        sys.exit(main())
