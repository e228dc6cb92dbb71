"""python -m chaos.failovers --store sentinel --failovers 20 --json FILE."""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from chaos.failovers.checker import TTL, Findings, judge
from chaos.failovers.run import Plan, Record, run
from chaos.failovers.table import figures, table
from chaos.failovers.topologies import STANDS
from chaos.output import say

Way = tuple[dict[str, object], bool]

#: Settings, and whether a failover may then lose a lease before its holder is notified.
PRIMARY: Way = {}, True
REPLICAS: Way = {"dlock_durability": {"replicas": 1, "timeout": 0.5}}, False
QUARANTINE: Way = {"dlock_quarantine": TTL + 1}, False
FSYNC: Way = {"dlock_durability": {"fsync": "local", "timeout": 0.5}}, False
DEFAULT: Way = {}, False
AT_ONCE: Way = {"dlock_quarantine": 0}, True

WAYS = {
    "standalone": {"primary": PRIMARY, "quarantine": QUARANTINE, "fsync": FSYNC},
    "sentinel": {"primary": PRIMARY, "replicas": REPLICAS, "quarantine": QUARANTINE},
    "cluster": {"primary": PRIMARY, "replicas": REPLICAS, "quarantine": QUARANTINE},
    "redlock3": {"restart delay": DEFAULT, "no delay": AT_ONCE},
    "redlock5": {"restart delay": DEFAULT, "no delay": AT_ONCE},
}


def plan(store: str, way: str, **others: object) -> Plan:
    """Return the plan of a run on one store with one of its settings."""
    declared, forgets = WAYS[store][way]
    made = Plan(store, dict(declared), forgets, persistent=way == "fsync")
    return dataclasses.replace(made, **others)  # type: ignore[arg-type]  # fields of a Plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.failovers", description=__doc__)
    parser.add_argument("--store", choices=list(STANDS), required=True)
    parser.add_argument("--ways", nargs="*", help="only these of the store's declarations")
    parser.add_argument("--failovers", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--keep", type=Path, help="where to leave histories and logs")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="dlock-failovers-"))
    say(f"histories and logs in {folder}")
    done: list[tuple[str, Record, Findings]] = []
    for way in given.ways or WAYS[given.store]:
        say(f"{given.store}, {way}")
        record = run(plan(given.store, way, failovers=given.failovers, seed=given.seed), folder / way, say)
        done.append((way, record, judge(record)))
    sys.stdout.write("\n" + table(done))
    if given.json:
        given.json.write_text(json.dumps([figures(*one) for one in done], indent=1) + "\n")
    broken = [f"{way}: {line}" for way, _, found in done for line in found.broken]
    sys.stdout.write(f"\npromises broken: {len(broken)}\n" + "".join(f"  {line}\n" for line in broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
