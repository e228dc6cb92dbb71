"""Tasks for the faults of processes: bodies that hold on, fork, start others, look at their lease, and are killed."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from typing import Any

from celery.signals import worker_process_init

from celery_dlock import LockLost, signals, singleton_task
from celery_dlock.task import execution
from tests.support.apps.base import make_app
from tests.support.apps.marks import FOR_EVER, mark, mark_lost, marks_client, noted

BRIEF = 2.0

app = make_app(
    "processes",
    broker_connection_max_retries=None,
)


@worker_process_init.connect
def _outlive_the_main_process(**_: Any) -> None:
    """If a test asks for it, children live on without their main process, as they do on systems other than Linux."""
    if "DLOCK_TEST_OUTLIVE" in os.environ:
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, 0)


signals.lock_lost.connect(mark_lost)


def _until_told_to_go(row: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    with marks_client() as client:
        while time.monotonic() < end and not client.exists(f"go:{row}"):
            time.sleep(0.02)


@singleton_task(app=app, bind=True, key="{name}", scope="shared", ttl=60, wait=60, on_conflict="raise")
def held(self: Any, row: str, name: str) -> None:  # noqa: ARG001  # name is what is locked
    """Holds its lock until the test lets it go."""
    with noted(row):
        _until_told_to_go(row, FOR_EVER)


@singleton_task(app=app, bind=True, key="{name}", scope="shared", ttl=3 * BRIEF, wait=60, on_conflict="raise")
def held_brief(self: Any, row: str, name: str) -> None:  # noqa: ARG001  # name is what is locked
    """The same, under a lock that is soon over if it is not renewed."""
    with noted(row):
        _until_told_to_go(row, FOR_EVER)


@singleton_task(app=app, bind=True, key="{name}", ttl=60, on_conflict="queue")
def queued(self: Any, row: str, name: str) -> None:  # noqa: ARG001  # name is what is locked
    """The same, but who finds it held waits in the store."""
    with noted(row):
        _until_told_to_go(row, FOR_EVER)


@singleton_task(app=app, bind=True, key="{name}", scope="shared", ttl=BRIEF, wait=60, on_conflict="raise")
def watching(self: Any, row: str, name: str) -> None:  # noqa: ARG001  # name is what is locked
    """Looks at its lease until that is over, asks the store, and goes on until the test lets it end."""
    with noted(row):
        end = time.monotonic() + FOR_EVER
        while self.lease.held and time.monotonic() < end:
            time.sleep(0.02)
        mark(row, "not held")
        time.sleep(0.1)  # the store's own end of the lease comes a little later
        try:
            self.lease.ensure()
        except LockLost:
            mark(row, "LockLost")
        _until_told_to_go(row, FOR_EVER)


@singleton_task(app=app, bind=True, key="{name}", scope="shared", ttl=60, wait=60, on_conflict="raise")
def leaving(self: Any, row: str, name: str, what: str) -> None:
    """Leaves a thread, a program or a fork of its process behind, which lives on until the test lets it end."""
    with noted(row):
        LEFT_BEHIND[what](self, row, name)


def _thread(task: Any, row: str, name: str) -> None:
    lock = task.lock_for(row, name, "")

    def work() -> None:
        _until_told_to_go(row, FOR_EVER)
        mark(row, f"what was left gets it: {lock.acquire(blocking=False)}")

    threading.Thread(target=work, daemon=True).start()


def _program(_task: Any, row: str, _name: str) -> None:
    program = (
        "import time\n"
        "from tests.support.apps.marks import mark, mark_lost, marks_client\n"
        f"while not marks_client().exists('go:{row}'):\n"
        "    time.sleep(0.02)\n"
        f"mark('{row}', 'what was left ends')\n"
    )
    subprocess.Popen([sys.executable, "-c", program])


def _fork(_task: Any, row: str, _name: str) -> None:
    if os.fork() == 0:
        try:
            _until_told_to_go(row, FOR_EVER)
            run = execution.running()
            assert run is not None
            run.finish(final=True, success=True)  # every exit hook that releases a lock ends here
            mark(row, "what was left ends")
        finally:
            os._exit(0)


LEFT_BEHIND = {"thread": _thread, "program": _program, "fork": _fork}
