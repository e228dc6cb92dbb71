"""Benchmark of the queue policy's hand-off: `make bench`, or `python benchmarks/handoff.py --quick` for a short look.

Exits with status 1 if a target is missed. docs/explanation/benchmarks.md says how to read the figures.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import handoff_profile, handoff_rounds, queue_scale
from benchmarks.handoff_environment import Environment, working
from benchmarks.targets import Target
from tests.support.servers import Server

PARTS = ("rounds", "compare", "scale", "profile")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: the figures are rough")
    parser.add_argument("--turns", type=int, help="rounds of each kind of hand-off (default 60)")
    parser.add_argument("--crowd", type=int, help="how many wait for one lock (default 100000)")
    parser.add_argument("--only", choices=PARTS, help="one part; the profile is made only so")
    parser.add_argument("--record", action="store_true", help="write the figures to docs/images/benchmarks")
    asked = parser.parse_args()
    if asked.only == "profile":
        # The worker reads this variable. Stamps cost time, so no other figure is taken with them.
        os.environ["DLOCK_BENCH_PROFILE"] = "1"
    turns, crowd = (10, 2000) if asked.quick else (60, 100_000)
    parts = (asked.only,) if asked.only else PARTS[:3]
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, Server(Path(name) / "server") as server:
        environment = Environment(server, Path(name) / "stage")
        targets = _measure(environment, parts, asked.turns or turns, asked.crowd or crowd, record=asked.record)
    print(f"load of this machine, 1 and 5 minutes: {' '.join(f'{load:.1f}' for load in os.getloadavg()[:2])}\n")
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


def _measure(environment: Environment, parts: Sequence[str], turns: int, crowd: int, *, record: bool) -> list[Target]:
    targets = []
    if set(parts) - {"scale"}:
        with working(environment):
            rounds = handoff_rounds.Rounds(environment, crowd)
            if "profile" in parts:
                print(handoff_profile.measure(rounds, 5 * turns), end="\n\n")
            if "compare" in parts:
                print(rounds.compare(), rounds.behind_backlog(max(5, turns // 4)), sep="\n\n", end="\n\n")
            if "rounds" in parts:
                rounds.gather_crowd(crowd)
                samples = handoff_rounds.measure(rounds, turns)
                targets += handoff_rounds.targets(rounds, samples)
                if record:
                    handoff_rounds.record(samples)
    if "scale" in parts:
        environment.locks.flushall()
        targets += queue_scale.measure(environment, crowd)
    return targets


if __name__ == "__main__":
    sys.exit(main())
