"""One run: servers, workers, messages and failovers; afterwards all messages have time to end."""

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery_dlock.keys.lock_name import LockName
from chaos import resource
from chaos.ends import Ends, waiting
from chaos.failovers.recovery_time import Resumed
from chaos.failovers.topologies import Stand, stand
from chaos.history import VARIABLE, Event, History, Tail
from chaos.publisher import SteadySender
from chaos.stores import parked_in
from tests.support.environ import environment_variables
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.failovers"
LONGEST = 8.0
#: Seconds inside: most are short, some longer than a failover takes.
SECONDS = ((0.02, 0.2), (0.2, 1.0), (3.0, LONGEST))
WEIGHTS = (8, 2, 2)
#: Messages without an end, at most: a backlog would only make the run longer.
MOST = 120
#: Seconds for which a message may be in no list at the end before it counts as lost.
SEEN = 15.0


@dataclass(frozen=True)
class Plan:
    """The settings of a run.

    Attributes:
        store: One of `STANDS`.
        declared: Settings of the app, such as its durability.
        forgets: Whether a failover may cost a lease before its holder is notified.
        failovers: How many, SIGKILL and SIGSTOP in turn; every second pair hits a server that was cut off before.
        settle: Seconds between two.
        cut: Seconds for which it was cut off.
        drain: Seconds that all messages then have to end.
        longest: Seconds that a body takes at most.
    """

    store: str
    declared: dict[str, Any]
    forgets: bool
    failovers: int = 20
    settle: float = 2.0
    cut: float = 1.0
    drain: float = 180.0
    persistent: bool = False
    seed: int = 1
    names: int = 12
    rate: float = 8.0
    workers: int = 2
    longest: float = LONGEST


@dataclass(frozen=True)
class Failover:
    """Times in seconds of the monotonic clock; `until` when all was as it should be again."""

    how: str
    cut: bool
    at: float
    until: float
    #: Until the first grant of a lock that was kept where it struck.
    resumed: float


@dataclass
class Record:
    """The results of a run."""

    plan: Plan
    events: list[Event] = field(default_factory=list)
    landed: list[tuple[str, int, str]] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    failovers: list[Failover] = field(default_factory=list)
    seconds: float = 0.0


def run(plan: Plan, folder: Path, say: Callable[[str], None] = lambda line: None) -> Record:
    """Do one run in `folder`, which is its own; `say` gets a line for each failover."""
    folder.mkdir(parents=True, exist_ok=True)
    history, written = History(folder / "history.jsonl"), folder / "resource.sqlite"
    names = [f"n{number}" for number in range(plan.names)]
    resource.create(written, names)
    with ExitStack() as stack:
        store = stack.enter_context(stand(plan.store, folder, persistent=plan.persistent))
        broker, results = (stack.enter_context(Server(folder / name)) for name in ("broker", "results"))
        urls = Urls(broker.url(), results.url(), "")
        ours = {
            VARIABLE: str(history.path),
            "DLOCK_CHAOS_RESOURCE": str(written),
            "DLOCK_FAILOVERS_CONF": json.dumps(store.conf | plan.declared),
            "DLOCK_FAILOVERS_QUEUE": "yes" if store.queues else "no",
        }
        stack.enter_context(environment_variables(ours))
        module = stack.enter_context(loaded_app(APP, urls))
        for _ in range(plan.workers):
            stack.enter_context(running_worker(APP, folder=folder, urls=urls, concurrency=6, environ=ours))
        sender = _Sender(module, history, names, plan)
        return _Run(plan, store, history, sender, Ends(results), broker, say).whole(written)


class _Sender(SteadySender):
    """Sends to the tasks of `tests.support.apps.failovers`."""

    def __init__(self, module: Any, history: History, names: list[str], plan: Plan) -> None:
        super().__init__(plan.rate, random.Random(plan.seed), MOST)
        self.module, self._history, self._names = module, history, names
        self._longest = plan.longest
        kinds = [module.retries, module.waits, module.skips]
        self._tasks = [*kinds, *([module.queues] if hasattr(module, "queues") else [])]
        self._thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        super().stop()
        self._thread.join(30)

    def names(self) -> dict[str, LockName]:
        """Of each name in the messages, the lock's."""
        return {name: self.module.retries.lock_spec.name_of((name, 0.0), {}) for name in self._names}

    def _send(self) -> None:
        task, name = self._chance.choice(self._tasks), self._chance.choice(self._names)
        seconds = self._chance.uniform(*self._chance.choices(SECONDS, WEIGHTS)[0])
        message = task.s(name, round(min(seconds, self._longest), 3))
        task_id = message.freeze().id
        # Before: a body must not be in before its message is known.
        self._history.note("sent", id=task_id, task=message.task, name=name)
        message.apply_async()
        self.sent.append(task_id)


@dataclass
class _Run:
    plan: Plan
    store: Stand
    history: History
    sender: _Sender
    ends: Ends
    broker: Server
    say: Callable[[str], None]

    def whole(self, written: Path) -> Record:
        record, began = Record(self.plan), time.monotonic()
        self.sender.start()
        watch = threading.Event()
        looking = threading.Thread(target=self._look, args=(watch,), daemon=True)
        looking.start()
        try:
            # Servers that know of no office grant nothing at first, where a quarantine or a restart delay is on.
            eventually(lambda: self._granted() >= self.plan.names, within=90, every=0.2, message="no lock is granted")
            for number in range(self.plan.failovers):
                record.failovers.append(self._fail_over(number))
            self._sleep(self.plan.settle)
        finally:
            self.sender.stop()
            watch.set()
            looking.join(30)
        self._drain()
        record.events, record.landed = self.history.events(), resource.landed(written)
        record.waiting = self._waiting()
        until = time.monotonic() + SEEN
        while time.monotonic() < until and not self._seen(record.waiting):
            # One in a worker's hands is in no queue, nor is one that a worker whose prefetch is full has not read yet.
            self._sleep(0.2)
            record.waiting |= self._waiting()
        self.ends.look(self.sender.sent)
        record.ends = self.ends.of
        record.seconds = time.monotonic() - began
        return record

    def _fail_over(self, number: int) -> Failover:
        how = self.store.hows[number % len(self.store.hows)]
        cut = self.store.copies and self.plan.cut > 0 and number // 2 % 2 == 1
        self._sleep(self.plan.settle)
        names = self.sender.names()
        hit = self.store.aim(number, list(names.values()))
        struck = {name for name, lock in names.items() if lock in hit}
        tail = Tail(self.history)
        if cut:
            self.store.cut_off(self.plan.cut)
        for _ in tail.new():
            pass  # what was before does not count
        self.history.note("fault", kind="failover", target="store", number=number)
        at = self.store.strike(how)
        resumed = Resumed(tail, struck, at)
        self.store.replaced()
        # After the last failover the old server is not needed any more.
        self.store.heal(wait=number + 1 < self.plan.failovers)
        eventually(resumed.look, within=90, every=0.05, message="no lock is granted any more")
        until = self.history.note("over", number=number) / 1e9
        self.say(f"  {how}{', cut off before' if cut else ''}: grants go on after {resumed.at - at:.2f} s")
        return Failover(how, cut, at, until, resumed.at - at)

    def _granted(self) -> int:
        return sum(event["what"] == "in" for event in self.history.events())

    def _look(self, stop: threading.Event) -> None:
        while not stop.wait(0.5):
            self.sender.unended = self.ends.look(list(self.sender.sent))

    def _sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def _drain(self) -> None:
        deadline = time.monotonic() + self.plan.drain
        while self.ends.look(self.sender.sent) and time.monotonic() < deadline and self._goes_on():
            self._sleep(0.2)

    def _goes_on(self) -> bool:
        quiet = time.time() - self.history.path.stat().st_mtime > self.plan.longest + 1
        return not quiet or bool(self._waiting())

    def _seen(self, waiting: dict[str, str]) -> bool:
        self.ends.look(self.sender.sent)
        return all(task_id in self.ends.of or task_id in waiting for task_id in self.sender.sent)

    def _waiting(self) -> dict[str, str]:
        unended = [task_id for task_id in self.sender.sent if task_id not in self.ends.of]
        found: dict[str, str] = {}
        for node in self.store.lock_servers() if unended else ():
            found |= waiting(unended, self.broker, parked_in(node))
        return found
