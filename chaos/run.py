"""One run: servers, workers, messages and faults; afterwards everything is left to come to its end."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from chaos import resource
from chaos.broker_log import KEEP_ALL, never_recorded
from chaos.ends import Ends, Trail, trails, waiting
from chaos.faults import Strikes, Targets
from chaos.history import VARIABLE, Event, History
from chaos.publisher import Publisher
from chaos.release_latency import Freeing
from chaos.schedule import TTL, Fault, schedule
from chaos.stores import kinds_of, running_store
from chaos.workers import APP, POOLS, Fleet
from tests.support.environ import environment_variables
from tests.support.processes import ROOT
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app

#: Seconds between two looks at the processes, and at the results.
LOOK, LOOK_AT_ENDS = 0.02, 0.5
#: Seconds without any event after which no body runs: longer than the longest.
QUIET = 6.0


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        seconds: How long faults strike.
        every: Seconds between two of them on average.
        drain: Seconds that all messages then have to end.
        kinds: Kinds of faults; None: all, empty: none.
        renewal: With False no lease is renewed, and the checker has to find the overlaps.
        store: One of `chaos.stores.STORES`.
    """

    seed: int
    seconds: float
    every: float = 1.0
    names: int = 12
    rate: float = 6.0
    drain: float = 60.0
    kinds: list[str] | None = None
    renewal: bool = True
    pools: tuple[tuple[str, int], ...] = POOLS
    store: str = "redis"

    def plan(self) -> list[Fault]:
        """The schedule of its faults."""
        kinds = kinds_of(self.store) if self.kinds is None else self.kinds
        return schedule(self.seed, self.seconds, self.every, [pool for pool, _ in self.pools], kinds) if kinds else []


@dataclass
class Record:
    """The results of a run, for the checker."""

    events: list[Event]
    landed: list[tuple[str, int, str]]
    #: Of each message that was sent: the state of its result, and of a failure what failed it.
    ends: dict[str, str]
    #: Where a message without an end still waits.
    waiting: dict[str, str]
    #: What the workers' logs say of a message, in order: (what, monotonic ns of the line).
    trails: dict[str, Trail]
    #: Seconds from each kind of death to a free key; of those that met another fault meanwhile, none.
    freed: dict[str, list[float]] = field(default_factory=dict)
    not_measured: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    workers_ended: int = 0
    stuck: int = 0
    seconds: float = 0.0
    #: Locks that were never released.
    locks_left: list[str] = field(default_factory=list)
    #: Of a message whose end was replaced by another one: that other one.
    overwritten: dict[str, str] = field(default_factory=dict)
    #: Messages that a worker took from the broker and did not record there.
    never_recorded: set[str] = field(default_factory=set)


def run(settings: Settings, folder: Path, say: Callable[[str], None] = lambda line: None) -> Record:
    """Do one run in `folder`, which is its own; `say` gets a line for each fault as it strikes."""
    history, written = History(folder / "history.jsonl"), folder / "resource.sqlite"
    names = [f"n{number}" for number in range(settings.names)]
    resource.create(written, names)
    ours = {VARIABLE: str(history.path), "DLOCK_CHAOS_RESOURCE": str(written)}
    if not settings.renewal:
        ours["DLOCK_CHAOS_RENEWAL"] = "off"
    with ExitStack() as stack:
        broker, results = (
            stack.enter_context(Server(folder / name, persistent=name != "results", options=KEEP_ALL))
            for name in ("broker", "results")
        )
        store = stack.enter_context(running_store(settings.store, folder / "store"))
        proxy = stack.enter_context(Proxy(store.port))
        urls = Urls(broker.url(), results.url(), store.url(proxy.port))
        stack.enter_context(environment_variables(ours))
        module = stack.enter_context(loaded_app(APP, urls))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = {**urls.environ(), **ours, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "C_FORCE_ROOT": "1"}
        fleet = Fleet(folder, environ, history, list(settings.pools))
        stack.callback(fleet.stop)
        publisher = Publisher(module, history, names, settings.rate, random.Random(settings.seed + 1))
        freeing = Freeing(history, store, module.skips)
        targets = Targets(fleet, store, broker, proxy, publisher.send_exit, freeing.inside)
        return _Run(settings, history, written, fleet, publisher, freeing, targets, Ends(results), say).whole()


@dataclass
class _Run:
    settings: Settings
    history: History
    written: Path
    fleet: Fleet
    publisher: Publisher
    freeing: Freeing
    targets: Targets
    ends: Ends
    say: Callable[[str], None]

    def whole(self) -> Record:
        settings, sent = self.settings, self.publisher.sent
        self._loop(lambda: not all(member.ready for member in self.fleet.members), 60)
        began = time.monotonic()
        end = began + settings.seconds
        strikes = Strikes(settings.plan(), self.targets, self.history, self.say)
        sending = threading.Thread(target=self.publisher.run, daemon=True)
        sending.start()
        self._loop(lambda: strikes.look() or time.monotonic() < end, settings.seconds + 60)
        self.publisher.stop()
        sending.join(30)
        self.say(f"faults are over; {len(sent)} messages were sent, {self.ends.look(sent)} have no end yet")
        self._loop(self._something_goes_on, settings.drain)
        still = self._still()
        unrecorded = never_recorded(self.targets.broker)
        stuck = self._stuck()
        seconds = time.monotonic() - began
        self.freeing.stop()
        self.fleet.stop()
        return Record(
            self.history.events(), resource.landed(self.written), self.ends.of, still, trails(self.fleet.logs()),
            self.freeing.seconds, self.freeing.dropped, strikes.done, strikes.missed, self.fleet.ended,
            self.fleet.stuck, seconds, sorted(stuck), self.ends.overwritten(), unrecorded,
        )  # fmt: skip

    def _still(self) -> dict[str, str]:
        unended = [task_id for task_id in self.publisher.sent if task_id not in self.ends.of]
        return waiting(unended, self.targets.broker, self.targets.store.parked())

    def _stuck(self) -> set[str]:
        """Return the locks that are still held although every body and every lease of a dead process is long over."""
        stuck = self.targets.store.held()

        def some() -> bool:
            stuck.intersection_update(self.targets.store.held())
            return bool(stuck)

        self._loop(some, QUIET + TTL)
        return stuck

    def _something_goes_on(self) -> bool:
        """Return False once no message waits and no body can run: a message without an end is then lost."""
        if not self.publisher.unended:
            return False
        quiet = time.time() - self.history.path.stat().st_mtime > QUIET
        return not quiet or bool(self._still())

    def _loop(self, goes_on: Callable[[], bool], within: float) -> None:
        deadline = looked = time.monotonic()
        deadline += within
        while goes_on() and time.monotonic() < deadline:
            self.fleet.look()
            if time.monotonic() - looked > LOOK_AT_ENDS:
                looked = time.monotonic()
                self.publisher.unended = self.ends.look(list(self.publisher.sent))
            time.sleep(LOOK)
