"""A step that is kept apart from forks never overlaps one, and neither waits long for the other."""

import ctypes
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final

import pytest
from celery import Celery

from celery_dlock.keys.lock_name import shared_name
from celery_dlock.messaging.handoff import GrantPublisher
from celery_dlock.messaging.message import RawMessage
from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.store.model import Grant
from celery_dlock.utils import fork_guard, threads
from celery_dlock.utils.background import Loop, begin_thread
from celery_dlock.utils.fork_guard import no_fork
from tests.support.polling import eventually


def forked(ends_with: Callable[[], int]) -> int:
    """The exit status of a child that does this and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, as a worker's main process does
        pid = os.fork()
    if pid == 0:
        os._exit(ends_with())
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def crosses() -> int:
    with no_fork():
        return 7


@pytest.fixture
def inside() -> Iterator[Callable[[float], list[float]]]:
    """A thread that is apart from forks for so many seconds; the list gets its end."""
    threads = []

    def start(seconds: float) -> list[float]:
        entered, ended = threading.Event(), list[float]()

        def stay() -> None:
            with no_fork():
                entered.set()
                time.sleep(seconds / 2)
                with no_fork():  # as a publication that shakes hands
                    time.sleep(seconds / 2)
                ended.append(time.monotonic())

        threads.append(threading.Thread(target=stay))
        threads[-1].start()
        assert entered.wait(10)
        return ended

    yield start
    for thread in threads:
        thread.join(10)


@pytest.mark.invariant("fork-inherits-no-mutex")
def test_a_fork_waits_for_who_is_inside_and_the_child_can_be_too(inside: Callable[[float], list[float]]) -> None:
    ended = inside(0.2)
    assert forked(crosses) == 7
    assert len(ended) == 1


@pytest.mark.invariant("fork-inherits-no-mutex")
def test_who_waits_for_a_server_holds_no_fork_up_for_longer_than_half_a_second(
    inside: Callable[[float], list[float]],
) -> None:
    ended, took = inside(4.0), list[float]()
    # The shortest of several: a busy machine lengthens one, not all.
    while min(took, default=1.0) >= 1:
        began = time.monotonic()
        assert forked(crosses) == 7
        took.append(time.monotonic() - began)
        assert ended == [], f"forks waited {took} s"
    assert 0.5 <= min(took) < 1


def test_who_forks_inside_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_guard, "_FORK_TIMEOUT", 20.0)
    began = time.monotonic()
    with no_fork():
        assert forked(crosses) == 7
    assert time.monotonic() - began < 10


@pytest.mark.invariant("fork-inherits-no-mutex")
def test_child_of_a_fork_in_c_enters_although_a_thread_of_its_parent_was_entering() -> None:
    """No hook is called in such a child, so it inherits the gate locked."""
    with fork_guard._GUARD._gate:
        pid = ctypes.PyDLL(None).fork()
        if pid == 0:
            os._exit(crosses())
    try:
        _, status = eventually(lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] and ended)
        assert os.waitstatus_to_exitcode(status) == 7
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.invariant("fork-inherits-no-mutex")
def test_no_child_is_forked_while_a_message_is_handed_over() -> None:
    """A lock that publishing takes (of Celery, kombu or Python) is free in every child.

    Expected: the child gets it at once; without the fence it inherits it taken, and waits for ever.
    """
    app = Celery("here", broker="memory://", set_as_current=False)
    theirs, publishing = threading.Lock(), threading.Event()

    @contextmanager
    def producer() -> Iterator[Any]:
        with theirs:
            publishing.set()
            time.sleep(0.05)  # far less than a fork waits, which a busy machine lengthens
            raise ConnectionError("enough seen")
        yield

    store: Any = SimpleNamespace(decline_grant=lambda *_given, **_options: None)
    handover = GrantPublisher(app, store, 1, producer)
    headers = {"task": "app.post", "id": "id1", "expires": None}
    raw = RawMessage("[[1], {}, {}]", "application/json", "utf-8", headers, {}, "celery")
    grant = Grant("identity", ParkedMessage.of(tuple(raw), handover.broker, 1, 0).text(), "turn")
    thread = threading.Thread(target=handover.publish_next, args=(shared_name("x"), grant))
    thread.start()
    assert publishing.wait(10)
    assert forked(lambda: 7 if theirs.acquire(timeout=2) else 1) == 7
    thread.join(10)


BEGINS: Final = {"real thread": None, "thread": begin_thread("test")}


@pytest.mark.invariant("fork-inherits-no-mutex")
@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
def test_no_child_is_forked_while_a_background_thread_logs(begin: Any) -> None:
    """Python renews a handler's own lock in a child, but none inside it, such as that of a ``QueueHandler``'s queue."""
    theirs, logging_now = threading.Lock(), threading.Event()

    class Locked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with theirs:
                logging_now.set()
                time.sleep(0.05)

    failed: list[bool] = []

    def turn() -> None:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError

    near, handler = logging.getLogger("celery_dlock"), Locked()
    near.addHandler(handler)
    loop = Loop("test", turn, begin=begin)
    try:
        loop.start()
        assert logging_now.wait(10)
        assert forked(lambda: 7 if theirs.acquire(timeout=2) else 1) == 7
        eventually(lambda: not loop.running.locked())
    finally:
        near.removeHandler(handler)


def test_child_takes_none_of_its_threads_for_one_of_the_main_process() -> None:
    """The system may give a thread of the child the number that a thread of the main process has."""
    began, over = threading.Event(), threading.Event()

    def stay() -> None:
        began.set()
        over.wait(30)

    threads.start_daemon(stay)
    assert began.wait(10)
    try:
        assert forked(lambda: len(threads._native_threads)) == 0
    finally:
        over.set()
