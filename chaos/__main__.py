"""python -m chaos --seed 1 --minutes 10."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from chaos.checker import judge
from chaos.output import say
from chaos.report import report
from chaos.run import Settings, run
from chaos.schedule import KINDS
from chaos.stores import STORES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Workers under random faults.")
    parser.add_argument("--seed", type=int, default=1, help="the same seed strikes the same faults")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults strike")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two faults, on average")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), metavar="KIND", help="only these faults; none: none")
    parser.add_argument(
        "--no-renewal", action="store_true", help="no lease is renewed: the checker has to find overlaps"
    )
    parser.add_argument("--store", choices=STORES, default="redis", help="where the locks are")
    parser.add_argument("--schedule", action="store_true", help="print the schedule and end")
    parser.add_argument("--keep", type=Path, help="where to leave history, logs and resource")
    given = parser.parse_args()
    settings = Settings(
        given.seed, given.minutes * 60, given.every, kinds=given.kinds, renewal=not given.no_renewal, store=given.store
    )  # fmt: skip
    if given.schedule:
        sys.stdout.writelines(f"{fault}\n" for fault in settings.plan())
        return 0
    folder = given.keep or Path(tempfile.mkdtemp(prefix="dlock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"seed {given.seed}; history and logs in {folder}\n")
    record = run(settings, folder, say)
    found = judge(record)
    sys.stdout.write("\n" + report(record, found))
    if not found.broken and given.keep is None:
        shutil.rmtree(folder)
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
