"""A stop that strikes at the edge of a body, by a real signal and by a real asynchronous exception."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from celery.concurrency.prefork import TaskPool as Prefork
from celery.concurrency.thread import TaskPool as Threads

from celery_dlock import LockOptions, Replaced
from celery_dlock.keys.lock_name import LockName
from celery_dlock.locking.lease_table import LocalLeaseTable
from celery_dlock.task.body_stop import run_stoppable
from celery_dlock.worker.body_stop import STOP_SIGNAL, aborter_for_pool

pytestmark = pytest.mark.invariant("newest-call-stops-the-running-one")


@pytest.fixture
def record():
    return LocalLeaseTable().open(LockName("n:x", 7, 1), "o.1", 60)


@pytest.fixture
def handler():
    before = signal.getsignal(STOP_SIGNAL)
    yield
    signal.signal(STOP_SIGNAL, before)


class Struck:
    """An aborter whose ``leave`` is interrupted at its first instruction."""

    def __init__(self, aborter, strike):
        self.enter, self.told, self._leave, self._strike = aborter.enter, aborter.told, aborter.leave, strike

    def leave(self, record):
        strike, self._strike = self._strike, lambda: None
        strike()
        for _ in range(1000):  # an asynchronous exception is raised at one of the next instructions
            pass
        self._leave(record)


def stop_from_another_thread(record):
    stopper = threading.Thread(target=record.stop, args=("replaced",))
    stopper.start()
    stopper.join()


def run_of(aborter, record):
    lease = SimpleNamespace(record=record, watch_for_stop=lambda error: setattr(lease, "stop_error", error))
    return SimpleNamespace(
        runtime=SimpleNamespace(worker=SimpleNamespace(aborter=aborter)),
        options=LockOptions(on_conflict="replace"),
        delivery=object(),
        lease=lease,
    )


@pytest.mark.usefixtures("handler")
def test_signal_after_the_end_of_the_body_leaves_its_value(record):
    def strike():
        record.request_stop("b")
        os.kill(os.getpid(), STOP_SIGNAL)

    run = run_of(Struck(aborter_for_pool(Prefork), strike), record)
    assert run_stoppable(run, lambda: "value", (), {}) == "value"
    os.kill(os.getpid(), STOP_SIGNAL)  # the next task is not struck


def test_asynchronous_exception_after_the_end_of_the_body_leaves_its_value(record):
    run = run_of(Struck(aborter_for_pool(Threads), lambda: stop_from_another_thread(record)), record)
    assert run_stoppable(run, lambda: "value", (), {}) == "value"
    stop_from_another_thread(record)


def test_thread_that_was_told_by_ensure_is_not_struck_too(record):
    run = run_of(aborter_for_pool(Threads), record)

    def body():
        error = run.lease.stop_error("", "n:x", "b")
        stop_from_another_thread(record)
        raise error

    with pytest.raises(Replaced) as raised:
        run_stoppable(run, body, (), {})
    assert raised.value.task_id == "b"


@pytest.mark.usefixtures("handler")
def test_child_that_was_told_by_ensure_is_not_struck_too(record):
    run = run_of(aborter_for_pool(Prefork), record)

    def body():
        error = run.lease.stop_error("", "n:x", "b")
        record.request_stop("b")
        os.kill(os.getpid(), STOP_SIGNAL)
        raise error

    with pytest.raises(Replaced) as raised:
        run_stoppable(run, body, (), {})
    assert raised.value.task_id == "b"


AFTER_A_STOP = """
import sys, threading, time
from celery.concurrency.thread import TaskPool
from celery_dlock import Replaced
from celery_dlock.keys.lock_name import LockName
from celery_dlock.locking.lease_table import LocalLeaseTable
from celery_dlock.worker.body_stop import aborter_for_pool

aborter, record = aborter_for_pool(TaskPool), LocalLeaseTable().open(LockName("n:x", 7, 1), "o.1", 60)
inside = []

def stop():  # not earlier: an exception within Thread.start() leaves its lock in disorder
    while not inside:
        time.sleep(0.001)
    record.stop("replaced")

stopper = threading.Thread(target=stop)
stopper.start()
aborter.enter(record, ["replaced"])
try:
    inside.append(True)
    while True:
        pass
except Replaced:
    print("stopped")
aborter.leave(record)
stopper.join()

def traced():
    return "ended"

sys.settrace(lambda *_: None)
print(traced())
"""


def test_traced_code_ends_after_a_body_was_stopped():
    """Python must not be left looking for an exception that is never raised: under 3.11, traced code would hang."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_STOP], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["stopped", "ended"]
