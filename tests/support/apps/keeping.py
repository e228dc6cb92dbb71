"""Tasks that hold a lock for long, in ways that make it hard to keep."""

import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from celery_dlock import Lock, SingletonTask, signals, singleton_task
from celery_dlock.task import execution
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark, mark_lost, marks_client, noted

TTL = 3.0

app = make_app(
    "keeping",
    broker_connection_max_retries=None,
)


signals.lock_lost.connect(mark_lost)


#: Calls with which the caller's thread waits and gives the interpreter to no other; to wait takes no processor.
_C = ctypes.PyDLL(None)


def _spin(_row: str, seconds: float) -> None:
    """Gives the interpreter to others only where one who computes for ever has to, and less often."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _C.usleep(4 * round(sys.getswitchinterval() * 1e6))


def _hold(row: str, seconds: float) -> None:
    """One call into C that keeps the interpreter's lock for all those seconds.

    As a catastrophic pattern does; but that takes a processor for so long, and on a busy machine several times as long.
    """
    ticks = [time.monotonic()]
    threading.Thread(target=_tick, args=(ticks,), daemon=True).start()
    _C.usleep(round(seconds * 1e6))
    ticks.append(time.monotonic())
    mark(row, f"gap {max(b - a for a, b in itertools.pairwise(ticks)):.3f}")


def _tick(ticks: list[float]) -> None:
    while len(ticks) < 10_000:
        time.sleep(0.05)
        ticks.append(time.monotonic())


def _until_told_to_go(_row: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    with marks_client() as client:
        while time.monotonic() < end and not client.exists("go"):
            time.sleep(0.05)


WAYS: dict[str, Callable[[str, float], None]] = {
    "sleep": lambda row, seconds: time.sleep(seconds),
    "spin": _spin,
    "hold": _hold,
    "until told to go": _until_told_to_go,
}


@singleton_task(app=app, ttl=TTL)
def brief(row: str, way: str, seconds: float) -> None:
    with noted(row):
        WAYS[way](row, seconds)


@singleton_task(app=app, ttl=60)
def long(row: str, way: str, seconds: float) -> None:
    with noted(row):
        WAYS[way](row, seconds)


@app.task
def plain(row: str, way: str, seconds: float) -> None:
    with noted(row):
        WAYS[way](row, seconds)


@singleton_task(app=app, bind=True, ttl=2)
def told(self: Any, row: str, seconds: float) -> None:
    """Does nothing but look whether it still holds its lease."""
    end = time.monotonic() + seconds
    with noted(row):
        while self.lease.held and time.monotonic() < end:
            time.sleep(0.02)
        mark(row, f"held {self.lease.held}")
        self.lease.ensure()


@singleton_task(app=app, bind=True, ttl=60)
def asking(self: Any, row: str, seconds: float) -> None:
    """Asks the store again and again, long before the watchdog looks."""
    end = time.monotonic() + seconds
    with noted(row):
        while time.monotonic() < end:
            self.lease.ensure()
            time.sleep(0.02)


@singleton_task(app=app, bind=True, ttl=TTL)
def nested(self: Any, row: str, seconds: float) -> None:
    """Enters its own lock again and another one twice, and forgets to leave them."""
    with noted(row):
        self.lock_for(row, seconds).acquire()
        other = Lock(f"other {row}", app=app, ttl=TTL)
        other.acquire()
        other.acquire()
        counts = (self.lease.hold_count, other.lease.hold_count if other.lease else 0)
        mark(row, f"counts {counts}")
        time.sleep(seconds)


@singleton_task(app=app, bind=True, ttl=60)
def forks(self: Any, row: str, seconds: float) -> None:
    """Fork. The copy of this process runs the exit hooks that release a lock."""
    with noted(row):
        pid = os.fork()
        if pid == 0:
            try:
                lock = self.lock_for(row, seconds)
                mark(row, f"the fork gets it: {lock.acquire(blocking=False)}")
                run = execution.running()
                assert run is not None
                run.finish(final=True, success=True)
                mark(row, "the fork has left")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(seconds)


class _Hooked(SingletonTask):
    def note(self, word: str, args: Any) -> None:
        mark(args[0], f"{word}, locked: {self.lock_for(*args).locked()}")


class WithSuper(_Hooked):
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)
        self.note("before", args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note("call", args)
        return super().__call__(*args, **kwargs)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        super().after_return(status, retval, task_id, args, kwargs, einfo)
        self.note("after", args)


class WithoutSuper(_Hooked):
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.note("before", args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note("call", args)
        return self.run(*args, **kwargs)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.note("after", args)


@singleton_task(app=app, base=WithSuper, bind=True)
def with_super(self: Any, row: str) -> None:
    self.note("body", (row,))


@singleton_task(app=app, base=WithoutSuper, bind=True)
def without_super(self: Any, row: str) -> None:
    self.note("body", (row,))
