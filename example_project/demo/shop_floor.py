"""The environment of the scenario: the running shop, its history, and its time limit."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from celery import Celery, states

from example_project.demo.history import Fact, History
from example_project.demo.ledgers import TASK
from example_project.demo.processes import Processes
from example_project.demo.screen import Screen
from example_project.demo.server import SERVER
from example_project.demo.verdict import Evidence, Line, inside, rows


class DemoError(Exception):
    """The demo could not be played to its end."""


class OutOfTime(DemoError):
    """A condition did not come true in time."""


class ShopFloor:
    def __init__(
        self,
        app: Celery,
        processes: Processes,
        history: History,
        screen: Screen,
        *,
        counters: Mapping[str, Callable[[], Mapping[str, int]]],
        recognised: Mapping[str, Callable[[], Mapping[str, int]]],
        locking: bool,
        ends_at: float,
    ) -> None:
        self.processes = processes
        self.locking = locking
        self.killed: dict[int, float] = {}
        self.free_after: dict[str, float] = {}
        self.say = screen.say
        self._app = app
        self._history = history
        self._screen = screen
        self._counters = counters
        self._recognised = recognised
        self._ends_at = ends_at
        self._ended: dict[str, str] = {}

    def task(self, name: str) -> Any:
        return self._app.tasks[f"shop.{name}"]

    def publish(self, name: str, *args: Any, queue: str | None = None) -> None:
        self.task(name).apply_async(args, queue=queue)

    def consume_too(self, worker: str, queue: str) -> None:
        """Have a running worker consume one more queue."""
        self._app.control.add_consumer(queue, destination=[f"{worker}@shop"], reply=True, timeout=5)

    def strike(self, child: int) -> float:
        """Kill a pool child and return the time."""
        with contextlib.suppress(ProcessLookupError):  # its worker died, which the next wait reports
            os.kill(child, signal.SIGKILL)
        self.killed[child] = time.monotonic()
        return self.killed[child]

    def kill(self, worker: str) -> None:
        """Kill a worker with all its children at once."""
        pids = self.processes.kill(worker)
        self.killed.update(dict.fromkeys(pids, time.monotonic()))

    def arrived(self, name: str, subject: str) -> int:
        return self._counters[f"shop.{name}"]().get(subject, 0)

    def state(self, task_id: str) -> str:
        return self._ask(task_id)

    def all_facts(self) -> list[Fact]:
        return self._history.read()

    def facts(self, what: str) -> list[Fact]:
        return [fact for fact in self.all_facts() if fact.what == what]

    def evidence(self) -> Evidence:
        received = {task: count() for task, count in self._counters.items()}
        found = self._states()
        facts = self._history.read()  # read last: it has every task whose state was read
        recognised = {task: sum(count().values()) for task, count in self._recognised.items()}
        return Evidence(facts, found, received, self.killed, self.free_after, self._ledgers(facts), recognised)

    def all_ended(self) -> bool:
        return all(state in states.READY_STATES for state in self._states().values())

    def wait_for(self, what: str, condition: Callable[[], object], every: float = 0.05) -> None:
        while not condition():
            if dead := self.processes.dead():
                raise DemoError(f"ended unexpectedly: {', '.join(dead)}")
            if time.monotonic() > self._ends_at:
                raise OutOfTime(f"out of time while waiting for {what}")
            if self._screen.due():
                evidence = self.evidence()
                self._screen.progress(rows(evidence), inside(evidence.facts, self.killed))
            time.sleep(every)

    def _ledgers(self, facts: Sequence[Fact]) -> dict[str, list[Line]]:
        accounts = {fact.subject for fact in facts if fact.what == "publish" and fact.task == TASK}
        if not accounts or not self.processes.alive(SERVER):
            return {}
        with redis.Redis.from_url(self._app.conf.broker_url, decode_responses=True) as client:
            found = {account: client.lrange(f"ledger:{account}", 0, -1) for account in accounts}
        return {account: [Line(**json.loads(line)) for line in lines] for account, lines in found.items()}

    def _states(self) -> dict[str, str]:
        found = {}
        for fact in self.facts("publish"):
            state = self._ended.get(fact.task_id) or self._ask(fact.task_id)
            if state in states.READY_STATES:  # an end is final, so it is read once
                self._ended[fact.task_id] = state
            found[fact.task_id] = state
        return found

    def _ask(self, task_id: str) -> str:
        # Celery would retry a dead server for longer than the time limit.
        return self._app.AsyncResult(task_id).state if self.processes.alive(SERVER) else "UNKNOWN"
