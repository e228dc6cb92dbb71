"""The kill of a body that does not stop: when it is due, and that it strikes no other body."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_dlock.locking.shared_lease_table import SharedLeaseTable, WatchdogRecord
from celery_dlock.runtime import Runtime
from celery_dlock.worker import pool_children
from celery_dlock.worker.body_kill import StopDeadlines
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.pool_children import ChildWatch
from tests.support.polling import eventually
from tests.unit.fakes import a_name

pytestmark = pytest.mark.invariant("newest-call-stops-the-running-one")

GRACE = 5.0


class Table:
    """A table of which this process is the child and the main process."""

    def __init__(self) -> None:
        self.table = SharedLeaseTable()
        self.table.adopt()

    def body(self, number: int = 1, *, by: str | None = "newer", grace: float | None = GRACE) -> Any:
        record = self.table.open(a_name(str(number)), f"owner{number}.1", 30.0)
        record.held(1e9)
        record.set_kill_after(grace)
        if by is None:
            record.request_stop("newer")  # the holder has learned of it, and the watchdog has not
        else:
            self.seen(number).request_stop(by)
        return record

    def seen(self, number: int = 1) -> WatchdogRecord:
        return next(record for record in self.table.records() if record.acquisition == f"owner{number}.1")


@pytest.fixture
def table() -> Table:
    return Table()


def overdue(deadlines: StopDeadlines, table: Table, now: float) -> list[str]:
    return [record.acquisition for record in deadlines.overdue(table.table.records(), now)]


# When it is due


def test_body_is_overdue_its_grace_after_the_request_was_seen(table: Table) -> None:
    table.body()
    deadlines = StopDeadlines()
    assert [overdue(deadlines, table, at) for at in (100.0, 104.9, 105.0)] == [[], [], ["owner1.1"]]


def test_body_without_grace_is_overdue_at_once(table: Table) -> None:
    table.body(grace=0.0)
    assert overdue(StopDeadlines(), table, 100.0) == ["owner1.1"]


def test_body_that_has_ended_is_not_overdue(table: Table) -> None:
    record, deadlines = table.body(), StopDeadlines()
    assert not overdue(deadlines, table, 100.0)
    record.set_kill_after(None)
    assert not overdue(deadlines, table, 200.0)


def test_body_that_is_not_to_be_killed_is_never_overdue(table: Table) -> None:
    table.body(grace=None)
    deadlines = StopDeadlines()
    assert not overdue(deadlines, table, 100.0)
    assert not overdue(deadlines, table, 200.0)


def test_body_is_spared_until_the_newer_call_is_known_or_the_lease_is_lost(table: Table) -> None:
    table.body(1, by=None)
    table.body(2, by=None)
    deadlines = StopDeadlines()
    assert not overdue(deadlines, table, 100.0)
    assert not overdue(deadlines, table, 200.0)
    table.seen(1).request_stop("newer")
    table.seen(2).lose()
    assert overdue(deadlines, table, 200.2) == ["owner1.1", "owner2.1"]


# The kill


@contextmanager
def forked(body: Callable[[], object]) -> Iterator[ChildWatch]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests; this child takes no lock of them
        pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            body()
        os._exit(0)
    watch = ChildWatch(pid)
    try:
        yield watch
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        watch.close()


@pytest.fixture
def deliveries() -> DeliveryRegistry:
    app = Celery("kills", set_as_current=False)
    app.conf.dlock_url = "redis://127.0.0.1:1"
    return DeliveryRegistry(Runtime(app))


class Request:
    """The part of a request that the killer reads."""

    id = "older"
    task = SimpleNamespace(name="shop.deploy")

    def __init__(self, owner: str = "owner1") -> None:
        self.dlock_owner = owner

    def dlock_on_killed(self) -> None: ...


class Child:
    """A child that runs a body for ever, or as ``body`` says."""

    def __init__(self, stack: ExitStack, deliveries: DeliveryRegistry, body: Callable[[Child], object]) -> None:
        self.table = SharedLeaseTable()
        self.killer = deliveries.body_killer
        self.watch = stack.enter_context(forked(lambda: body(self)))

    def record(self) -> WatchdogRecord:
        return eventually(lambda: [record for record in self.table.records() if record.must_end])[0]

    def is_killed(self, within: float = 5.0) -> bool:
        with suppress(AssertionError):
            return eventually(self.watch.gone, within)
        return False


def endless(child: Child) -> None:
    child.table.adopt()
    record = child.table.open(a_name(), "owner1.1", 30.0)
    record.held(1e9)
    record.set_kill_after(0.0)
    record.request_stop("newer")
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(0.01)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_body_that_blocks_all_signals_is_killed(
    stack: ExitStack, deliveries: DeliveryRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    child, request = Child(stack, deliveries, endless), Request()
    deliveries.add(request)  # type: ignore[arg-type]  # what is read of it
    announced: list[int] = []
    deliveries.body_killer.announce = announced.append
    ended: list[object] = []
    deliveries.body_killer.soon = ended.append
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        deliveries.body_killer.kill(child.watch, child.record())
    assert child.is_killed()
    assert announced == [child.watch.pid]
    assert ended == [request.dlock_on_killed]
    assert deliveries.body_killer.knows("owner1")
    (line,) = caplog.messages
    assert line == (
        f"Task shop.deploy[older] is killed with pool child {child.watch.pid}: a newer call has replaced it, and it "
        "has not ended within 0 s (stop)"
    )


def test_body_whose_request_celery_has_forgotten_is_killed(
    stack: ExitStack, deliveries: DeliveryRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery before 5.7 forgets it when it loses the broker."""
    child = Child(stack, deliveries, endless)
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        deliveries.body_killer.kill(child.watch, child.record())
    assert child.is_killed()
    assert f"Task under {a_name()} is killed with pool child" in caplog.text
    assert not deliveries.body_killer.knows("owner1")


@pytest.mark.parametrize("why", ["its hard time limit has struck", "its body has ended"])
def test_child_is_left_alone_if(stack: ExitStack, deliveries: DeliveryRegistry, why: str) -> None:
    child, request = Child(stack, deliveries, endless), Request()
    record = child.record()
    deliveries.add(request)  # type: ignore[arg-type]  # what is read of it
    if why == "its hard time limit has struck":
        deliveries.killing(request)  # type: ignore[arg-type]  # what is read of it
    if why == "its body has ended":
        record.clear()
    deliveries.body_killer.kill(child.watch, record)
    assert not child.is_killed(within=0.3)


def test_kill_waits_for_a_child_that_does_not_pause_and_says_so_once(
    stack: ExitStack, deliveries: DeliveryRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, request = Child(stack, deliveries, endless), Request()
    deliveries.add(request)  # type: ignore[arg-type]  # what is read of it
    record = child.record()
    monkeypatch.setattr(pool_children, "PAUSED_WITHIN", 0.0)
    monkeypatch.setattr(os, "waitid", lambda *_: None)  # as of a child in an uninterruptible system call
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        for _ in range(3):
            deliveries.body_killer.kill(child.watch, record)
    assert not child.watch.gone()
    (line,) = caplog.messages
    assert f"cannot be killed yet (stop), because pool child {child.watch.pid} does not pause" in line
    monkeypatch.undo()
    deliveries.body_killer.kill(child.watch, record)
    assert child.is_killed()


def waiting_in_kernel(child: Child, path: str) -> None:
    """Start a program that never begins. Until it begins, its parent neither runs nor reacts to SIGSTOP."""
    child.table.adopt()
    record = child.table.open(a_name(), "owner1.1", 30.0)
    record.held(1e9)
    record.set_kill_after(0.0)
    record.request_stop("newer")
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, path, os.O_RDONLY, 0)])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells that a process waits in the kernel")
def test_body_that_waits_in_the_kernel_and_cannot_pause_is_killed(
    stack: ExitStack, deliveries: DeliveryRegistry, tmp_path: Path
) -> None:
    """As with a program on a network file system that does not answer."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    child, request = Child(stack, deliveries, lambda child: waiting_in_kernel(child, str(path))), Request()
    deliveries.add(request)  # type: ignore[arg-type]  # what is read of it
    record = child.record()
    stat = Path(f"/proc/{child.watch.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D", 5.0)
    try:
        deliveries.body_killer.kill(child.watch, record)
        assert child.is_killed()
    finally:
        os.close(os.open(path, os.O_WRONLY))  # the program begins and ends


def test_child_that_takes_long_to_die_is_killed_and_reported_once(
    stack: ExitStack, deliveries: DeliveryRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, request = Child(stack, deliveries, endless), Request()
    deliveries.add(request)  # type: ignore[arg-type]  # what is read of it
    record = child.record()
    monkeypatch.setattr(child.watch, "gone", lambda: False)  # as of a child with much memory
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        for _ in range(3):
            deliveries.body_killer.kill(child.watch, record)
    (line,) = caplog.messages
    assert f"is killed with pool child {child.watch.pid}" in line


def short_bodies(child: Child) -> None:
    """Run one short body after the other. The word behind the pid says whether one may be killed now."""
    child.table.adopt()
    chance = random.Random(os.getpid())
    number = 0
    while True:
        number += 1
        record = child.table.open(a_name(), "owner1.1", 30.0)
        record.held(1e9)
        child.table.words[INSIDE] = 1
        record.set_kill_after(0.0)
        record.request_stop("newer")
        for _ in range(chance.randrange(20)):
            pass
        record.set_kill_after(None)
        child.table.words[INSIDE] = 2
        record.clear()
        for _ in range(chance.randrange(20)):
            pass


#: A word of the table's first page that the library does not use.
INSIDE = 100


def test_kill_strikes_only_the_body_that_is_to_be_killed(deliveries: DeliveryRegistry) -> None:
    request, killed = Request(), 0
    deliveries.add(request)  # type: ignore[arg-type]  # what is read of it
    deadline = time.monotonic() + 20
    while killed < 40:
        assert time.monotonic() < deadline, f"only {killed} were killed"
        with ExitStack() as own:
            child = Child(own, deliveries, short_bodies)
            while not child.watch.gone() and time.monotonic() < deadline:
                for record in child.table.records():
                    deliveries.body_killer.kill(child.watch, record)
            assert child.table.words[INSIDE] == 1
            killed += 1


# The pause


def test_child_stands_still_during_a_pause_and_goes_on_after_it(stack: ExitStack) -> None:
    table = SharedLeaseTable()

    def count() -> None:
        while True:
            table.words[INSIDE] += 1

    watch = stack.enter_context(forked(count))
    eventually(lambda: table.words[INSIDE])
    with watch.paused() as stands_still:
        assert stands_still
        before = table.words[INSIDE]
        time.sleep(0.05)
        assert table.words[INSIDE] == before
    eventually(lambda: table.words[INSIDE] > before)


def test_child_that_has_ended_does_not_stand_still(stack: ExitStack) -> None:
    watch = stack.enter_context(forked(lambda: None))
    eventually(watch.gone)
    with watch.paused() as stands_still:
        assert not stands_still
