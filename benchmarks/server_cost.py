"""User instructions of the server for one acquire and release: `python benchmarks/server_cost.py`, about one minute.

The server runs under `valgrind --tool=callgrind`, which counts its instructions. The kernel's are not counted. The
figures of one server binary and one machine repeat within 0.3 %, whatever else the machine does.

The kinds take turns, so that each meets the same keyspace and the same state of the server. With ``--baseline
COMMIT``, the library of that commit takes part: it is read from the repository, and driven through its public names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.tables import table
from benchmarks.targets import Target
from tests.support.servers import Server

ROOT = Path(__file__).parents[1]
#: What each kind does in one cycle, see `server_cost_client`.
KINDS = {
    "ping": "2 PING",
    "redis-py": "redis-py's Lock",
    "lock": "our Lock",
    "task": "a singleton task",
}
OURS = ("lock", "task")
ROUNDS, CYCLES = 5, 200
#: Cycles before the first count: the scripts are loaded, and the server's tables have their size.
WARM = 30
#: The most that a task's acquire and release may take of the baseline's.
LIMIT = 0.85
NEEDED = ("valgrind", "vgdb")


class CountedServer(Server):
    """A server whose instructions callgrind counts."""

    @property
    def _pipes(self) -> str:
        return str(self.folder / "vgdb")

    def _command(self) -> list[str | Path]:
        counted: list[str | Path] = ["valgrind", "--tool=callgrind", f"--vgdb-prefix={self._pipes}"]
        counted.append(f"--callgrind-out-file={self.folder / 'callgrind.out'}")
        # Once a second instead of ten times: the server's own clock is no part of a cycle.
        return [*counted, *super()._command(), "--hz", "1"]

    def instructions(self) -> int:
        """Return the instructions since the last call."""
        for old in self.folder.glob("callgrind.out*"):
            old.unlink()
        self._ask("dump")
        (written,) = self.folder.glob("callgrind.out*")
        found = re.search(r"^(?:totals|summary): (\d+)", written.read_text(), re.MULTILINE)
        assert found is not None, f"no count in {written}"
        return int(found.group(1))

    def _ask(self, command: str) -> None:
        subprocess.run(
            ["vgdb", f"--vgdb-prefix={self._pipes}", f"--pid={self.pid}", command], check=True, capture_output=True
        )


class Client:
    """A process that runs cycles of one kind, with the library of one tree.

    Args:
        tree: Directory that holds the package.
        kind: One of `KINDS`.
        url: The server's URL.
    """

    def __init__(self, tree: Path, kind: str, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("server_cost_client.py"), kind, url],
            env=os.environ | {"PYTHONPATH": str(tree)}, cwd=tree, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, cycles: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(cycles, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n", "the client has failed"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _library_of(commit: str) -> Iterator[Path]:
    """Yield a directory with the package of a commit."""
    with tempfile.TemporaryDirectory(prefix="dlock-baseline-") as folder:
        command = ["git", "-C", str(ROOT), "archive", commit, "celery_dlock"]
        packed = subprocess.run(command, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=packed, check=True)
        yield Path(folder)


def count(trees: dict[str, Path], kinds: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Return the instructions of a cycle in each round, by tree and kind. Kinds that are not ours have one tree."""
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as folder, ExitStack() as opened:
        server = opened.enter_context(CountedServer(Path(folder) / "server"))
        clients: dict[tuple[str, str], Client] = {}
        for kind in kinds:
            for tree in trees if kind in OURS else [next(iter(trees))]:
                clients[tree, kind] = client = Client(trees[tree], kind, server.url())
                opened.callback(client.close)
                client.run(WARM)
        for _ in range(ROUNDS):
            for case, client in clients.items():
                server.instructions()
                client.run(CYCLES)
                found.setdefault(case, []).append(server.instructions() / CYCLES)
    return found


def main() -> int:
    """Print the table; with a baseline, return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--baseline", metavar="COMMIT", help="also count the library of this commit")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of %(default)s")
    given = parser.parse_args()
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        print(f"NOT RUN: benchmarks/server_cost.py needs {' and '.join(missing)} (Debian: apt-get install valgrind)")
        return 0
    with ExitStack() as opened:
        trees = {"": ROOT}
        if given.baseline:
            trees[given.baseline] = opened.enter_context(_library_of(given.baseline))
        found = count(trees, given.kinds.split(","))
    middle = {case: statistics.median(values) for case, values in found.items()}
    rows = []
    for (tree, kind), value in middle.items():
        apart = max(found[tree, kind]) / min(found[tree, kind]) - 1
        base = middle.get((given.baseline, kind))
        shown = f"{value / base:.3f}" if base and not tree else ""
        rows.append([KINDS[kind] + (f", {tree}" if tree else ""), f"{value:,.0f}", f"{apart:.1%}", shown])
    head = ["acquire and release", "instructions", "spread", f"by {given.baseline}" if given.baseline else ""]
    print(table(head, rows))
    if not given.baseline:
        return 0
    ratio = middle["", "task"] / middle[given.baseline, "task"]
    target = Target(f"a singleton task's instructions by those of {given.baseline}", ratio, LIMIT)
    print(f"\n{target}")
    return 0 if target.reached else 1


if __name__ == "__main__":
    sys.exit(main())
