"""Many messages over some names, workers and children killed meanwhile: what ran, and how.

python -m tests.worker.queue.queue_run --messages 20000 --kills 40
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import redis

from tests.support.broker_history import KEEPING, taken_and_never_noted
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.queue_e2e"
MEMORY = "/dev/shm"


class Figures(NamedTuple):
    messages: int
    ran: int
    #: Gone with a killed worker that had taken them from their list and not noted them yet, as the broker's history
    #: tells.
    never_noted: int
    twice: int
    #: ... in a process that was not killed.
    twice_alive: int
    overlaps: int
    #: Ran before an earlier one of its name had its first run.
    out_of_order: int
    children_killed: int
    workers_killed: int
    seconds: float
    accounts: frozenset[Any] = frozenset()


class Run:
    """One run; `killed` are the pids of all processes that were killed."""

    def __init__(self, folder: Path, urls: Urls, workers: int, seed: int, app: str = APP) -> None:
        self.folder, self.urls, self.app = folder, urls, app
        self.random = random.Random(seed)
        self.killed: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.stack = ExitStack()
        self.workers = [self.start() for _ in range(workers)]

    def start(self) -> Worker:
        return self.stack.enter_context(running_worker(self.app, folder=self.folder, urls=self.urls, concurrency=2))

    def kill_somebody(self) -> None:
        place = self.random.randrange(len(self.workers))
        worker = self.workers[place]
        children = worker.children()
        if self.random.random() < 0.3:
            self.killed.update(children)
            worker.kill()
            self.counts["workers"] += 1
            self.workers[place] = self.start()
        elif children:
            child = self.random.choice(children)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                self.killed.add(child)
                self.counts["children"] += 1


def figures(run: Run, ids: dict[int, str], noted: list[list[Any]], never_noted: set[str], seconds: float) -> Figures:
    outs = Counter(number for word, _, number, _ in noted if word == "out")
    pids: dict[int, list[int]] = {}
    inside: dict[int, int] = {}
    first: dict[int, list[int]] = {}
    overlaps = 0
    for word, account, number, pid in noted:
        if word == "in":
            overlaps += inside.get(account, pid) not in (pid, *run.killed)
            inside[account] = pid
            pids.setdefault(number, []).append(pid)
            if number not in first.setdefault(account, []):
                first[account].append(number)
        else:
            inside.pop(account, None)
    late = sum(
        number < max(order[:place], default=-1) for order in first.values() for place, number in enumerate(order)
    )
    twice = [number for number in outs if outs[number] > 1]
    alive = [number for number in twice if not set(pids[number]) & run.killed]
    lost = [number for number in ids if number not in outs]
    unseen = [number for number in lost if ids[number] in never_noted]
    return Figures(
        len(ids), len(outs), len(unseen), len(twice), len(alive), overlaps, late,
        run.counts["children"], run.counts["workers"], seconds, frozenset(first),
    )  # fmt: skip


def measure(
    messages: int,
    names: int,
    kills: int,
    workers: int,
    seed: int,
    quiet: float = 30.0,
    app: str = APP,
    task: str = "post",
) -> Figures:
    with (
        # In memory where there is room: a busy disk must not stop the server, which writes down all that it does.
        tempfile.TemporaryDirectory(prefix="dlock-run-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as name,
        Server(Path(name) / "server", options=KEEPING) as server,
    ):
        urls = Urls(server.url(0), server.url(1), server.lock_url(2))
        with loaded_app(app, urls) as module, redis.Redis.from_url(urls.result) as notes:
            ids = {number: getattr(module, task).delay(number % names, number).id for number in range(messages)}
            began = last = time.monotonic()
            run = Run(Path(name), urls, workers, seed, app)
            with run.stack:
                done, left = 0, kills
                while done < messages and time.monotonic() - last < quiet:
                    time.sleep(0.1)
                    if (now_done := notes.scard("e2e:done")) != done:
                        done, last = now_done, time.monotonic()
                    # Spread over the work, not over time: machines differ.
                    if left and done > messages * (kills - left + 1) / (kills + 2):
                        left -= 1
                        run.kill_somebody()
                noted = [json.loads(text) for text in notes.lrange("e2e", 0, -1)]
            # Its workers have ended, and the broker's history with them.
            return figures(run, ids, noted, taken_and_never_noted(server.folder), last - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--names", type=int, default=50)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    found = measure(**vars(parser.parse_args()))
    for field, value in found._asdict().items():
        sys.stdout.write(f"{field:16} {value:.1f}\n" if isinstance(value, float) else f"{field:16} {value}\n")
    kept = found.ran + found.never_noted == found.messages and not found.twice_alive and not found.overlaps
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
