"""The locks of processes that are paused, and of bodies that leave processes behind.

Killed, ended and exiting processes are in tests/worker/test_endings*.py, the death of a whole worker in
test_predecessors.py. The kernel's out-of-memory killer sends SIGKILL, to a child, to the main process or (of a control
group) to all: it is tested as such.
"""

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.environments.worker import FREED, WorkerEnvironment, running_environment
from tests.support.polling import eventually
from tests.support.processes import session_of
from tests.support.workers import Worker

APP = "tests.support.apps.faults_processes"
BRIEF = 2.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path_factory.mktemp("processes"), APP) as running:
        running.start("-Q", "next", pool="threads", concurrency=8)
        yield running


@pytest.fixture(scope="module")
def prefork(environment: WorkerEnvironment) -> Worker:
    return environment.start("-Q", "prefork", concurrency=2)


@pytest.fixture(scope="module")
def threads(environment: WorkerEnvironment) -> Worker:
    return environment.start("-Q", "threads", pool="threads")


def send(environment: WorkerEnvironment, task: str, queue: str, row: str, name: str, *more: str) -> str:
    """Returns the lock's key."""
    getattr(environment.app, task).apply_async((row, name, *more), queue=queue)
    return environment.key(task, row, name, *more)


def times_freed(environment: WorkerEnvironment, key: str) -> int:
    """Counted, because an event has the time of its receipt: perhaps after the next body has begun."""
    return sum(seen == key and event in FREED for _, event, seen in list(environment.log.events))


def go(environment: WorkerEnvironment, row: str) -> None:
    environment.marks_client.set(f"go:{row}", 1)


# A pause that is longer than the ttl


@dataclass
class Paused:
    """The processes of a worker that are paused: all of them, or its main process alone."""

    worker: Worker
    everything: bool

    def __enter__(self) -> None:
        self._send(signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        if self.everything:
            for process in session_of(self.worker.pid):
                process.send_signal(number)
        else:
            self.worker.signal(number)


WHO = {
    "a child and its main process": ("prefork", True),
    "a main process without its child": ("prefork", False),
    "a worker of threads": ("threads", True),
}


@pytest.mark.invariant("stopped-process-keeps-or-reports")
@pytest.mark.parametrize("who", WHO)
def test_worker_paused_for_longer_than_its_ttl_reports_the_loss_before_it_releases(
    environment: WorkerEnvironment, request: pytest.FixtureRequest, who: str
) -> None:
    """It does not free the lock of its successor."""
    queue, everything = WHO[who]
    worker: Worker = request.getfixturevalue(queue)
    key = send(environment, "watching", queue, who, who)
    start = environment.mark(who, "start").at
    successor = f"after {who}"
    with Paused(worker, everything):
        send(environment, "held_brief", "next", successor, who)
        began = environment.mark(successor, "start").at
        assert began - start >= BRIEF - 0.1
        if not everything:
            # No process renews, and none reports the loss. The body itself still sees its deadline.
            environment.mark(who, "not held", within=10)
    environment.mark(who, "LockLost")
    lock_name = environment.app.watching.lock_name(who, who)
    eventually(lambda: environment.words(f"lost {lock_name}"), message="no signal lock_lost")
    go(environment, who)
    returned = environment.mark(who, "return").at
    # By then its release has come, and renewing never creates: the lock was held all the while.
    environment.wait_for_renewal(key, returned + 0.5)
    assert times_freed(environment, key) == 1, "once, when the first lease was over"
    go(environment, successor)
    environment.mark(successor, "return")
    eventually(lambda: times_freed(environment, key) == 2, message="the successor's lock is not free")
    assert environment.words(who) == ["start", "not held", "LockLost", "return"]


# What a body leaves behind


@pytest.mark.invariant("descendants-hold-nothing")
@pytest.mark.usefixtures("prefork")
@pytest.mark.parametrize("what", ["thread", "program", "fork"])
def test_process_that_outlives_a_body_holds_no_lock_and_frees_none(environment: WorkerEnvironment, what: str) -> None:
    row, successor = f"leaves a {what}", f"after a {what}"
    key = send(environment, "leaving", "prefork", row, row, what)
    ended = environment.mark(row, "return").at
    freed = eventually(lambda: environment.log.freed(key), message="still locked")
    assert freed - ended <= 1.0
    assert environment.words(row) == ["start", "return"]
    send(environment, "held", "next", successor, row)
    environment.mark(successor, "start")
    go(environment, row)
    environment.mark(row, "what was left gets it: False" if what == "thread" else "what was left ends")
    with contextlib.suppress(AssertionError):
        eventually(lambda: times_freed(environment, key) > 1, within=0.5)
    assert times_freed(environment, key) == 1, "once, by the first body's end"
    go(environment, successor)
    environment.mark(successor, "return")
