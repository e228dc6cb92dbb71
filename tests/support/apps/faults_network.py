"""Tasks behind a network that fails. They note what they see in a file, because a network can take a server away."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from celery_dlock import LockLost, SingletonTask, signals, singleton_task
from celery_dlock.locking.events import Event
from celery_dlock.store.redis.keys import LockKeys
from tests.support.apps.base import make_app

#: Long enough that one timeout of the watchdog (0.4 s) fits into it, also on a loaded machine.
TTL = 3.0
#: For answers that take a second: the watchdog waits longer where no lease ends soon.
LONG_TTL = 8.0
TIMEOUT, BREAKER_RESET = 1.0, 1.0
#: Seconds from a free lock until a message that waits for it was republished.
COMEBACK = 0.2

app = make_app(
    "faults_network",
    dlock_timeout=TIMEOUT,
    breaker_reset=BREAKER_RESET,
    broker_connection_max_retries=None,
    worker_prefetch_multiplier=1,
)


def note(row: str, word: str, **facts: Any) -> None:
    """One line, in one write: lines of several processes do not mix."""
    line = json.dumps({"row": row, "word": word, "at": time.monotonic(), **facts}) + "\n"
    with Path(os.environ["DLOCK_TEST_NOTES"]).open("ab", buffering=0) as file:
        file.write(line.encode())


@signals.lock_lost.connect
def _on_lost(event: Event, **_: Any) -> None:
    note(event.name, "lost", reason=event.reason)


def _body(task: SingletonTask, row: str, seconds: float, gate: str, step: Callable[[], None]) -> bool:
    """Go on for so long, or until the file `gate` is there; did it hold its lease all the while?"""
    lease: Any = task.lease
    note(
        row,
        "start",
        node=task.request.hostname,
        token=lease.token,
        key=LockKeys.of("dlock", lease.lock_name).lock,
        acq=lease.acquisition,
    )
    end, held = time.monotonic() + seconds, True
    while time.monotonic() < end and not (gate and Path(gate).exists()):
        step()
        held = held and bool(lease.held)
        time.sleep(0.05)
    note(row, "end", held=held)
    return held


@singleton_task(
    app=app, bind=True, key=["row"], scope="shared", ttl=TTL,
    on_conflict="retry", retry_delay=0.1, retry_delay_max=COMEBACK,
)  # fmt: skip
def works(self: SingletonTask, row: str, seconds: float, gate: str = "") -> bool:
    return _body(self, row, seconds, gate, lambda: None)


@singleton_task(
    app=app, bind=True, key=["row"], ttl=LONG_TTL, on_conflict="retry", retry_delay=0.1, retry_delay_max=COMEBACK
)
def works_far_away(self: SingletonTask, row: str, seconds: float, gate: str = "") -> bool:
    return _body(self, row, seconds, gate, lambda: None)


@singleton_task(app=app, bind=True, key=["row"], scope="shared", ttl=TTL)
def insists(self: SingletonTask, row: str, seconds: float) -> bool:
    """Ask for its lock again and again, and go on although the lock is reported as lost."""
    told = False

    def step() -> None:
        nonlocal told
        try:
            self.lease.ensure()
            told and note(row, "a lost lease passed")
        except LockLost:
            told or note(row, "LockLost")
            told = True

    return _body(self, row, seconds, "", step)


@singleton_task(app=app, bind=True, key=["row"], ttl=60, on_conflict="retry", retry_delay=0.1, retry_delay_max=COMEBACK)
def counts(self: SingletonTask, row: str) -> bool:
    """Looks up, past the network, how often the store says that its lock is held; no ttl would free a stuck one."""
    lease: Any = self.lease
    with redis.Redis.from_url(os.environ["DLOCK_TEST_DIRECT_URL"], decode_responses=True) as client:
        acq, count = client.hmget(LockKeys.of("dlock", lease.lock_name).lock, "acq", "count")
    note(row, "count", acq=acq, ours=lease.acquisition, count=count)
    return _body(self, row, 0.02, "", lambda: None)
