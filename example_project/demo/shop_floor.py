"""Where the scenario is played: the running shop, its history, and the clock that ends it all in time."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery, states

from example_project.demo.history import Fact, History
from example_project.demo.processes import Processes
from example_project.demo.screen import Screen
from example_project.demo.server import SERVER
from example_project.demo.verdict import Evidence, inside, rows


class DemoError(Exception):
    """The demo could not be played to its end."""


class ShopFloor:
    def __init__(
        self,
        app: Celery,
        processes: Processes,
        history: History,
        screen: Screen,
        *,
        counters: Mapping[str, Callable[[], Mapping[str, int]]],
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
        self._ends_at = ends_at
        self._ended: dict[str, str] = {}

    def task(self, name: str) -> Any:
        return self._app.tasks[f"shop.{name}"]

    def publish(self, name: str, *args: Any) -> None:
        self.task(name).delay(*args)

    def facts(self, what: str) -> list[Fact]:
        return [fact for fact in self._history.read() if fact.what == what]

    def evidence(self) -> Evidence:
        received = {task: count() for task, count in self._counters.items()}
        return Evidence(self._history.read(), self._states(), received, self.killed, self.free_after)

    def all_ended(self) -> bool:
        return all(state in states.READY_STATES for state in self._states().values())

    def wait_for(self, what: str, condition: Callable[[], object], every: float = 0.05) -> None:
        while not condition():
            if dead := self.processes.dead():
                raise DemoError(f"ended unexpectedly: {', '.join(dead)}")
            if time.monotonic() > self._ends_at:
                raise DemoError(f"out of time while waiting for {what}")
            if self._screen.due():
                evidence = self.evidence()
                self._screen.progress(rows(evidence), inside(evidence.facts, self.killed))
            time.sleep(every)

    def _states(self) -> dict[str, str]:
        found = {}
        for fact in self.facts("publish"):
            state = self._ended.get(fact.task_id) or self._ask(fact.task_id)
            if state in states.READY_STATES:  # an end is final: it need not be asked for again
                self._ended[fact.task_id] = state
            found[fact.task_id] = state
        return found

    def _ask(self, task_id: str) -> str:
        # Celery would ask a dead server again and again, beyond the time that is left.
        return self._app.AsyncResult(task_id).state if self.processes.alive(SERVER) else "UNKNOWN"
