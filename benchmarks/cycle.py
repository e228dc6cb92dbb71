"""The cost of one lock: `make bench`, or `python benchmarks/cycle.py --quick` for a short look.

Exits with status 1 if a target is missed. docs/explanation/benchmarks.md says how to read the figures.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import calls, drain
from tests.support.servers import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: the figures are rough")
    parser.add_argument("--cycles", type=int, help="how many of each call (default 5000)")
    parser.add_argument("--block", type=int, default=1, help="how many of one call before the next (default 1)")
    parser.add_argument("--rounds", type=int, help="how many rounds of each kind of task (default 30)")
    parser.add_argument("--tasks", type=int, help="tasks in a round (default 500)")
    parser.add_argument("--only", choices=("calls", "drain"), help="one of the two parts")
    parser.add_argument("--pool", choices=sorted(drain.CONCURRENCY), default="prefork", help="that runs the tasks")
    parser.add_argument("--record", action="store_true", help="write the figures to docs/images/benchmarks")
    asked = parser.parse_args()
    cycles, rounds, tasks = (1000, 8, 400) if asked.quick else (5000, 30, 500)
    targets = []
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, Server(Path(name) / "server") as server:
        # Read by the app, in the worker and in this process.
        os.environ["DLOCK_BENCH_SERVER"] = server.url().rpartition("/")[0]
        if asked.only != "drain":
            targets += calls.measure(server, asked.cycles or cycles, asked.block)
        if asked.only != "calls":
            costs = drain.measure(server, Path(name), asked.rounds or rounds, asked.tasks or tasks, asked.pool)
            targets += drain.targets(costs, asked.pool)
            if asked.record and asked.pool == "prefork":
                drain.record(costs)
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
