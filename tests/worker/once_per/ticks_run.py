"""Three beats send the same ticks; one is restarted, one is paused.

`python -m tests.worker.once_per.ticks_run` prints the figures.

One beat is killed and restarted, another one is stopped and continued, the third goes on: so no tick is without a beat.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.support.beats import running_beat
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, running_worker

APP = "tests.support.apps.ticking"


@dataclass(frozen=True)
class Figures:
    """The runs and messages of three beats in some seconds.

    Args:
        sent: Messages that each beat sent.
        runs: How often each tick ran, by its due time.
        missed: Ticks between the first and the last one that did not run.
    """

    sent: dict[str, int]
    runs: Counter[float]
    missed: list[float]

    @property
    def twice(self) -> list[float]:
        return [due for due, times in self.runs.items() if times > 1]

    def __str__(self) -> str:
        return (
            f"{len(self.runs)} ticks; messages sent: {self.sent}, {sum(self.sent.values())} in all; "
            f"ran: {sum(self.runs.values())}; ran twice: {len(self.twice)}; missed: {len(self.missed)}"
        )


def play(folder: Path, seconds: float, every: int = 1) -> Figures:
    """A third of the time all beats work, a third one is dead and one is paused, a third all work again.

    Args:
        every: Seconds between two ticks. A beat sends only the latest of those that it overslept: for so long the one
            that goes on may stand still.
    """
    third = max(1, round(seconds / 3 / every))
    environ = {"TICKING_EVERY": str(every)}
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        client = stack.enter_context(server.client())
        urls = Urls(server.url(), server.url(), server.lock_url())
        stack.enter_context(running_worker(APP, folder=folder, urls=urls))

        def beat(name: str, log: str | None = None) -> AbstractContextManager[Worker]:
            return running_beat(APP, name, folder=folder, urls=urls, log=log, environ=environ)

        def ticks_run(*sending: Worker) -> None:
            until = int(client.llen("runs")) + third
            eventually(lambda: client.llen("runs") >= until, 3 * third * every + 30, message="ticks do not run")
            eventually(lambda: all(map(_sent, sending)), 10 * every, message="not all of the beats send")

        with ExitStack() as beats:
            steady, paused = (beats.enter_context(beat(name)) for name in ("steady", "paused"))
            with beat("killed") as killed:
                ticks_run(steady, paused, killed)
            paused.signal(signal.SIGSTOP)
            ticks_run()
            paused.signal(signal.SIGCONT)
            with beat("killed", "killed-again") as restarted:
                ticks_run(restarted)
            sent = {each.node: _sent(each) for each in (steady, paused, killed, restarted)}
        eventually(lambda: client.llen("celery") + client.hlen("unacked") == 0, 30, message="messages wait")
        facts = [json.loads(text) for text in client.lrange("runs", 0, -1)]
    runs = Counter(float(fact["tick"]["due"]) for fact in facts)
    missed = [due for due in map(float, range(int(min(runs)), int(max(runs)) + 1, every)) if due not in runs]
    return Figures(sent, runs, missed)


def _sent(beat: Worker) -> int:
    return len(re.findall("Sending due task", beat.log()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.worker.once_per.ticks_run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="celery-dlock-ticks-") as folder:
        began = time.monotonic()
        figures = play(Path(folder), seconds)
    sys.stdout.write(f"{time.monotonic() - began:.0f} s: {figures}\n")
    return 1 if figures.twice or figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
