"""Sends messages at a steady rate, with a broker that may be away."""

import random
import threading
from typing import Any

from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from chaos.history import History

#: As in tests.support.apps.chaos; one that stands twice is sent twice as often.
TASKS = ("skips", "retries", "queues", "queues", "waits", "aborts", "retries_early", "queues_early")
#: Seconds inside: most are short, some longer than a lease.
SECONDS = ((0.05, 0.4), (0.05, 0.4), (0.4, 1.5), (2.0, 4.0))
WEIGHTS = (4, 3, 2, 1)
#: No more than so many without an end, lest a run ends with a backlog.
MOST = 60


class Publisher:
    """Its thread's `run` sends until `stop`; `sent` are the ids, in order."""

    def __init__(self, module: Any, history: History, names: list[str], rate: float, chance: random.Random) -> None:
        self._module, self._history, self._names, self._rate, self._chance = module, history, names, rate, chance
        self.sent: list[str] = []
        #: How many of those have no end yet; told by the run.
        self.unended = 0
        self._stop = threading.Event()
        self._number = 0
        self._exits = 0

    def stop(self) -> None:
        self._stop.set()

    def send_exit(self) -> None:
        """The next message's body kills its process."""
        self._exits += 1

    def run(self) -> None:
        while not self._stop.wait(self._chance.uniform(0.5, 1.5) / self._rate):
            if self.unended < MOST:
                self._send()

    def _send(self) -> None:
        chance = self._chance
        self._number += 1
        task, name = chance.choice(TASKS), chance.choice(self._names)
        seconds = chance.uniform(*chance.choices(SECONDS, WEIGHTS)[0])
        end = "return"
        if self._exits:
            self._exits -= 1
            end, task = "exit", chance.choice(("retries", "queues"))
        message = getattr(self._module, task).s(name, self._number, round(seconds, 3), end)
        task_id = message.freeze().id
        facts = {"id": task_id, "task": message.task, "name": name}
        try:
            message.apply_async()
        except (OSError, KombuError, RedisError) as error:
            # The broker may have it or not: nobody can be held to it.
            self._history.note("unsure", **facts, error=type(error).__name__)
            return
        self._history.note("sent", **facts)
        self.sent.append(task_id)
