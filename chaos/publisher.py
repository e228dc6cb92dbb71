"""Senders of messages at a steady rate."""

import random
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from chaos.history import History

#: As in tests.support.apps.chaos; one that stands twice is sent twice as often.
TASKS = (
    "skips", "retries", "queues", "queues", "debounces", "replaces", "replaces_kill", "waits", "waits_queues", "aborts",
    "seats", "seats", "seats_retry", "retries_early", "queues_early",
)  # fmt: skip
#: Seconds inside: most are short, some longer than a lease.
SECONDS = ((0.05, 0.4), (0.05, 0.4), (0.4, 1.5), (2.0, 4.0))
WEIGHTS = (4, 3, 2, 1)
#: Number of calls that are sent at once to these tasks, whose newer calls replace older ones.
BURST = 3
BURSTS = ("debounces", "replaces", "replaces_kill")
#: Most messages without an end.
MOST = 60


class SteadySender(ABC):
    """Sends messages at a steady rate: `run`, in a thread of its own, until `stop`.

    Args:
        rate: Messages a second.
        chance: The source of random numbers.
        most: No more messages than this are without an end, lest a run ends with a backlog.
    """

    def __init__(self, rate: float, chance: random.Random, most: int) -> None:
        self._rate, self._chance, self._most = rate, chance, most
        #: Ids of the messages, in order.
        self.sent: list[str] = []
        #: Number of those without an end; the run counts them.
        self.unended = 0
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        while not self._stop.wait(self._chance.uniform(0.5, 1.5) / self._rate):
            if self.unended < self._most:
                self._send()

    @abstractmethod
    def _send(self) -> None: ...


class Publisher(SteadySender):
    """Sends to the tasks of `tests.support.apps.chaos`, with a broker that may be away."""

    def __init__(self, module: Any, history: History, names: list[str], rate: float, chance: random.Random) -> None:
        super().__init__(rate, chance, MOST)
        self._module, self._history, self._names = module, history, names
        self._number = 0
        self._exits = 0

    def send_exit(self) -> None:
        """The next message's body kills its process."""
        self._exits += 1

    def _send(self) -> None:
        chance = self._chance
        self._number += 1
        task, name = chance.choice(TASKS), chance.choice(self._names)
        # A body that is to be stopped has to last until its lease is renewed.
        seconds = chance.uniform(*(SECONDS[-1] if task.startswith("replaces") else chance.choices(SECONDS, WEIGHTS)[0]))
        end = "return"
        if self._exits:
            self._exits -= 1
            end, task = "exit", chance.choice(("retries", "queues"))
        message = getattr(self._module, task).s(name, self._number, round(seconds, 3), end)
        for _ in range(BURST if task in BURSTS else 1):
            self._publish(message.clone(), name)

    def _publish(self, message: Any, name: str) -> None:
        task_id = message.freeze().id
        facts = {"id": task_id, "task": message.task, "name": name, "began": time.monotonic_ns()}
        try:
            message.apply_async()
        except (OSError, KombuError, RedisError) as error:
            # The broker may have it or not, so its end is not checked.
            self._history.note("unsure", **facts, error=type(error).__name__)
            return
        self._history.note("sent", **facts)
        self.sent.append(task_id)
