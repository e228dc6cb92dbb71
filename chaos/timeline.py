"""The history as runs of bodies, faults and messages, with their times."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from chaos.history import Event

NEVER = math.inf
#: Seconds between what the store or the broker did and what a body could write down of it.
STEP = 0.3


@dataclass
class Run:
    """One execution of one body; times in seconds. `end` of one that died: when its process was last known to live."""

    id: str
    task: str
    name: str
    token: int
    pid: int
    main: int
    start: float
    end: float = NEVER
    #: "return", the name of an exception, "killed" by its worker (`stop` with seconds), "died", or "open": unknown.
    how: str = "open"
    #: When it saw that its lease was over.
    told: float = NEVER
    #: When it asked `ensure()`, and got a yes.
    ensured: list[float] = field(default_factory=list)
    refused: int = 0

    @property
    def lost_from(self) -> float:
        """From when on a fault may have cost it its lease, or its message the acknowledgement."""
        return self.start if self.told < NEVER or self.refused else self.end


@dataclass(frozen=True)
class Window:
    """One fault, or a moment at which a process was not scheduled ("gap"); times in seconds.

    `log` names the worker: its place and how often it was started.
    """

    kind: str
    target: str
    start: float
    end: float
    pids: tuple[int, ...] = ()
    main: int = 0
    log: str = ""
    deadly: bool = False

    def touches(self, start: float, end: float) -> bool:
        return self.start <= end and self.end >= start

    def shared(self, start: float, end: float) -> float:
        """Seconds of it within these."""
        return max(0.0, min(self.end, end) - max(self.start, start))


class Sent(NamedTuple):
    """A message that was surely sent. `began`: when its publisher began to send it."""

    task: str
    at: float
    began: float = 0.0
    name: str = ""


@dataclass
class Story:
    runs: list[Run]
    windows: list[Window]
    #: By id.
    sent: dict[str, Sent]
    unsure: set[str]
    #: When a worker acknowledged a message, by the message's id and the pid of the worker's main process.
    acks: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def acked(self, run: Run, again: float) -> float:
        """Return when the message of a body that ended was acknowledged; ``again`` if it was not until then."""
        found = self.acks.get((run.id, run.main), [])
        return min((at for at in found if run.end - STEP <= at < again), default=again)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Story":
        """Return the story of these events, which are in the order of their time."""
        teller = _Teller()
        for event in events:
            getattr(teller, f"on_{event['what']}")(event, event["at"] / 1e9)
        return teller.story()


class _Teller:
    """Reads event by event; one method for each kind of them."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        #: By pid: between when and when it died.
        self._deaths: dict[int, list[tuple[float, float]]] = {}
        #: By pid of a pool child: when its worker killed it.
        self._kills: dict[int, float] = {}
        #: Faults that have begun and are not over.
        self._lasting: dict[int, tuple[Event, float]] = {}
        self._story = Story([], [], {}, set())

    def story(self) -> Story:
        for event, at in self._lasting.values():
            self._story.windows.append(_window(event, at, at if event.get("deadly") else NEVER))
        for run in self._runs.values():
            if run.how == "open":
                deaths = self._deaths.get(run.pid, []) + self._deaths.get(run.main, [])
                # Who is killed goes on for a moment, and may begin a run in it.
                run.end = min((max(run.start, first) for first, last in deaths if last >= run.start), default=NEVER)
                run.how = "open" if run.end == NEVER else "died"
                if self._kills.get(run.pid, 0) >= run.start:
                    run.how = "killed"
        self._story.runs = sorted(self._runs.values(), key=lambda run: run.start)
        return self._story

    def on_in(self, event: Event, at: float) -> None:
        facts = {name: event[name] for name in ("id", "task", "name", "token", "pid", "main")}
        self._runs[event["run"]] = Run(**facts, start=at)

    def on_out(self, event: Event, at: float) -> None:
        run = self._runs[event["run"]]
        run.end, run.how = at, event["how"]

    def on_told(self, event: Event, at: float) -> None:
        self._runs[event["run"]].told = at

    def on_ensure(self, event: Event, at: float) -> None:
        run, asked = self._runs[event["run"]], event["asked"] / 1e9
        if event["ok"]:
            run.ensured.append(asked)
        else:
            # It does nothing else while it asks, however long that takes.
            run.told = min(run.told, asked)

    def on_write(self, event: Event, at: float) -> None:
        self._runs[event["run"]].refused += not event["ok"]

    def on_exit(self, event: Event, at: float) -> None:
        run = self._runs[event["run"]]
        self._died(run.pid, at, at)
        # In a pool of threads or greenlets the body takes the whole worker along.
        main = run.main if run.main == run.pid else 0
        self._story.windows.append(Window("exit", "worker", at, at, (run.pid,), main, event["log"], deadly=True))

    def on_killed(self, event: Event, at: float) -> None:
        self._kills[event["pid"]] = at
        self._died(event["pid"], at, at)

    def on_gone(self, event: Event, at: float) -> None:
        self._died(event["pid"], event["seen"] / 1e9, at)

    def on_gap(self, event: Event, at: float) -> None:
        main = event["main"]
        self._story.windows.append(Window("gap", "worker", event["since"] / 1e9, at, (main,), main))

    def on_fault(self, event: Event, at: float) -> None:
        self._lasting[event["number"]] = event, at
        for pid in event["pids"] if event.get("deadly") else ():
            self._died(pid, at, at)

    def on_over(self, event: Event, at: float) -> None:
        self._story.windows.append(_window(*self._lasting.pop(event["number"]), at))

    def on_sent(self, event: Event, at: float) -> None:
        self._story.sent[event["id"]] = Sent(event["task"], at, event.get("began", 0) / 1e9, event["name"])

    def on_acked(self, event: Event, at: float) -> None:
        self._story.acks.setdefault((event["id"], event["main"]), []).append(at)

    def on_unsure(self, event: Event, at: float) -> None:
        self._story.unsure.add(event["id"])

    def _died(self, pid: int, first: float, last: float) -> None:
        self._deaths.setdefault(pid, []).append((first, last))


def _window(event: Event, start: float, end: float) -> Window:
    # Signals that end a worker are over at once; what they cause lasts, and is looked for behind them.
    if event["kind"] in ("SIGTERM", "SIGQUIT"):
        end = start
    facts = {fact: event[fact] for fact in ("main", "log", "deadly") if fact in event}
    return Window(event["kind"], event["target"], start, end, tuple(event.get("pids", ())), **facts)
