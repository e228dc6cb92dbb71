"""Samples of the hand-off, from a body's end to the next start on the same name, and of plain Celery tasks."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable
from statistics import mean, median

from celery import chain

from benchmarks import figures
from benchmarks.handoff_environment import CHILDREN, Environment, Event, gaps
from benchmarks.tables import percentile, spread, table
from benchmarks.targets import Target
from celery_dlock.store.base import ReleaseRequest
from tests.support.polling import eventually
from tests.support.stores import name_in

#: Samples of one kind before the next kind. Few, because the load of the machine changes quickly.
BLOCK = 5
#: Other messages in the broker's queue, for the backlog part.
BACKLOG = 500
#: Calls of one name for the comparison of policies.
CALLS = 200
#: Seconds after which a body that has not ended is at its gate.
AT_GATE = 0.03

#: Seconds by kind, and for each kind by round.
Samples = dict[str, list[list[float]]]

FLOOR = "plain task, publish to start (the floor)"
OUTSIDE = "... published by a plain process"
CHAINED = "Celery's chain, end to start"
ONE, UNSTORED = "hand-off, 1 waiting", "... its result ignored"


class Rounds:
    """The kinds of samples, taken in turns in one worker.

    Args:
        environment: The environment, with a running worker.
        crowd: Number of waiters of the crowded lock.
    """

    def __init__(self, environment: Environment, crowd: int) -> None:
        self._environment = environment
        self._tasks = environment.tasks
        self._numbers = itertools.count()
        self._latest: list[Event] = []
        self.many = f"hand-off, {crowd:,} waiting"
        self.kinds: dict[str, Callable[[], list[float]]] = {
            FLOOR: self._floor,
            OUTSIDE: self._outside,
            CHAINED: self._chained,
            ONE: lambda: [self._pair() for _ in range(BLOCK)],
            UNSTORED: lambda: [self._pair(ignore_result=True) for _ in range(BLOCK)],
            self.many: self._crowd,
        }

    def _fresh(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"

    def _floor(self) -> list[float]:
        name = self._fresh("floor")
        self._tasks.publish.delay(name, BLOCK)
        return published_to_start(self._environment.ended(name, BLOCK))

    def _outside(self) -> list[float]:
        name, took = self._fresh("outside"), []
        for number in range(BLOCK):
            time.sleep(self._tasks.BODY)
            published = time.monotonic()
            self._tasks.plain.delay(name, number)
            events = self._environment.ended(name, 1)
            took.append(events[0].at - published)
        return took

    def _chained(self) -> list[float]:
        name = self._fresh("chained")
        chain(*[self._tasks.plain.si(name, number) for number in range(BLOCK + 1)]).delay()
        return gaps(self._environment.ended(name, BLOCK + 1), name)

    def _pair(self, fill: Callable[[], None] | None = None, *, ignore_result: bool = False) -> float:
        """Return the gap between two calls of one name: the first runs until the second is parked."""
        environment, name = self._environment, self._fresh("pair")
        environment.close_gate(name)
        for number in range(2):
            self._tasks.queued.apply_async((name, number), ignore_result=ignore_result)
        eventually(lambda: environment.waiting(name) == 1, message="the second call is not parked")
        time.sleep(self._tasks.BODY)
        if fill:
            fill()
        environment.open_gate(name)
        self._latest = environment.ended(name, 2)
        [gap] = gaps(self._latest, name)
        return gap

    def _crowd(self) -> list[float]:
        """Return the gaps of a chain of hand-offs, from one body at its gate to another."""
        environment = self._environment
        environment.open_gate("crowd")
        events = environment.ended("crowd", BLOCK)
        environment.close_gate("crowd")
        # The last gap ends when the second body is at its gate.
        events += environment.gather(lambda _: _at_gate(events + _))
        return gaps(sorted(events), "crowd")[: 2 * BLOCK]

    def gather_crowd(self, crowd: int) -> None:
        """Park the crowd, let its first call run, and stop that one at its gate."""
        environment, keys = self._environment, self._environment.keys("crowd")
        holder = environment.hold("crowd")
        environment.park("crowd", range(crowd))
        environment.close_gate("crowd")
        granted = environment.store.release(name_in(keys), holder, ReleaseRequest(queue=True)).granted
        task = self._tasks.queued
        task.dlock.grant_publisher.publish_next(task.lock_spec.name_of(("crowd", 0), {}), granted)
        environment.gather(lambda events: events)

    # -- with other messages in the broker's queue

    def behind_backlog(self, times: int) -> str:
        """Return a table of the seconds that a plain task and a hand-off take behind other messages."""
        lengths: list[int] = []

        def fill() -> None:
            lengths.append(_fill(self._environment))

        plain, handed = [], []
        for _ in range(times):
            plain.append(self._plain_behind(fill))
            handed.append(self._pair(fill))
        ratios = [ours / floor for ours, floor in zip(handed, plain, strict=True)]
        rows = [
            ["plain task", f"{median(plain) * 1e3:.0f}", "1.00"],
            ["hand-off", f"{median(handed) * 1e3:.0f}", spread(ratios)],
        ]
        head = ["behind a backlog", "p50 ms", "by the plain task"]
        return f"Behind {BACKLOG} messages in the broker's queue, {times} times\n\n{table(head, rows)}"

    def _plain_behind(self, fill: Callable[[], None]) -> float:
        environment, name = self._environment, self._fresh("behind")
        environment.close_gate(name)
        self._tasks.publish.delay(name, 1)
        time.sleep(0.1)  # until it is at its gate
        fill()
        environment.open_gate(name)
        # The plain task's body passes the same gate, which stays open.
        [took] = published_to_start(environment.ended(name, 1))
        return took

    # -- for the profile

    def profiled(self) -> list[Event]:
        """Return the stamps from the end of one body to the start of the next one."""
        self._pair()
        names = [event for event in self._latest if event.name != "-"]
        return [event for event in self._latest if names[1].at <= event.at <= names[2].at]

    def profiled_floor(self) -> list[Event]:
        name = self._fresh("floor")
        self._tasks.publish.delay(name, 1)
        events = self._environment.ended(name, 1)
        published, started = (event.at for event in events if event.name == name and event.what != "end")
        return [event for event in events if published <= event.at <= started]

    # -- the same work by other means

    def compare(self) -> str:
        """Return a table of the same calls of one name, serialised in three ways, with another task behind them."""
        rows = []
        for shown, task in (
            ("on_conflict='queue'", self._tasks.queued),
            ("redis-py's Lock in the body, sleep=0.1", self._tasks.locked),
            ("on_conflict='retry'", self._tasks.retried),
        ):
            name = self._fresh("compared")
            began = time.monotonic()
            for number in range(CALLS):
                task.delay(name, number)
            self._tasks.plain.delay(f"{name}-behind", 0)
            events = self._environment.gather(lambda events: sum(event.what == "end" for event in events) > CALLS)
            between, its = gaps(events, name), [event for event in events if event.name == name]
            [behind] = {event.at for event in events if event.name != name and event.what == "start"}
            order = [event.number for event in its if event.what == "start"]
            seconds = (its[-1].at - began, behind - began)
            millis = (mean(between) * 1e3, median(between) * 1e3, max(between) * 1e3)
            in_order = "yes" if order == sorted(order) else "no"
            rows.append([shown, *(f"{took:.2f}" for took in seconds), *(f"{took:.1f}" for took in millis), in_order])
        head = ["calls of one name", "total s", "a task behind, s", "mean gap ms", "p50", "longest", "in order"]
        body_ms = self._tasks.BODY * 1e3
        return f"{CALLS} calls of one name, a body of {body_ms:.0f} ms, {CHILDREN} children\n\n{table(head, rows)}"


def published_to_start(events: list[Event]) -> list[float]:
    published = {event.number: event.at for event in events if event.what == "published"}
    started = {event.number: event.at for event in events if event.what == "start"}
    return [started[number] - at for number, at in published.items()]


def _at_gate(events: list[Event]) -> bool:
    last = max(events)
    return last.what == "start" and time.monotonic() - last.at > AT_GATE


def _fill(environment: Environment) -> int:
    """Put the backlog into the broker's queue in one write, so that the worker does not drain it meanwhile."""
    away = "unconsumed"
    environment.tasks.filler.apply_async(queue=away)
    model: str = environment.broker.lpop(away)  # type: ignore[assignment]  # the client gives text
    tag, task_id = json.loads(model)["properties"]["delivery_tag"], json.loads(model)["headers"]["id"]
    copies = [model.replace(tag, str(uuid.uuid4())).replace(task_id, str(uuid.uuid4())) for _ in range(BACKLOG)]
    length: int = environment.broker.lpush("celery", *copies)
    return length


def measure(rounds: Rounds, turns: int) -> Samples:
    """Print what each kind takes, and return its samples by round, in seconds."""
    samples: Samples = {kind: [] for kind in rounds.kinds}
    for turn in range(-1, turns):
        kinds = list(rounds.kinds)
        for kind in kinds if turn % 2 else reversed(kinds):
            took = rounds.kinds[kind]()
            if turn >= 0:  # the first one warms up
                samples[kind].append(took)

    rows = []
    for kind, blocks in samples.items():
        flat = [took * 1e3 for block in blocks for took in block]
        shown = (f"{percentile(flat, percent):.2f}" for percent in (10, 50, 90))
        by_floor, by_outside = (spread(_ratios(samples, kind, floor)) for floor in (FLOOR, OUTSIDE))
        rows.append([kind, str(len(flat)), *shown, by_floor, by_outside])
    head = [
        "from one body to the next",
        "samples",
        "p10 ms",
        "p50",
        "p90",
        "/ the floor",
        "/ from a plain process",
    ]
    print(f"{turns} rounds, {BLOCK} or more of each in turn\n\n{table(head, rows)}\n")
    return samples


def targets(rounds: Rounds, samples: Samples) -> list[Target]:
    """Return the targets."""
    kinds = (ONE, rounds.many)
    return [Target(f"{kind}, divided by the floor", median(_ratios(samples, kind, FLOOR)), 1.5) for kind in kinds]


def record(samples: Samples) -> None:
    """Record the median of each kind, for the plots."""
    bars = {kind: median(took for block in blocks for took in block) * 1e3 for kind, blocks in samples.items()}
    title = "From the end of one body to the start of the next, median in ms"
    figures.record("handoff", title, bars, command="benchmarks/handoff.py --only rounds")


def _ratios(samples: Samples, kind: str, floor: str) -> list[float]:
    return [median(ours) / median(its) for ours, its in zip(samples[kind], samples[floor], strict=True)]
