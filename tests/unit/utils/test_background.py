"""Background threads: what fails in them, and what users plug in, ends none of them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from greenlet import GreenletExit

from celery_dlock.errors import LockLost
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.claim_rollback import ClaimRollback
from celery_dlock.locking.events import Event, Listeners, Loss, LossCause
from celery_dlock.runtime import Runtime
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.model import Requester
from celery_dlock.store.redlock.call_threads import CallThreads
from celery_dlock.utils import threads as native
from celery_dlock.utils.background import Loop, begin_thread, result_in_time
from celery_dlock.utils.log import logger
from celery_dlock.worker.claim_renewal import ClaimRenewer
from celery_dlock.worker.crash_record import WorkerRecord
from celery_dlock.worker.crash_recovery import CrashRecovery
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.queue_sweeper import QueueSweeper
from celery_dlock.worker.store_check import StoreCheck
from tests.support.polling import eventually
from tests.unit.fakes import FakeClock

NO_THREAD = "can't start new thread"


@pytest.fixture
def broken_log() -> Iterator[list[str]]:
    """A filter that raises at each record of the library, and the records that it has seen."""
    seen: list[str] = []

    def fail(record: logging.LogRecord) -> bool:
        seen.append(record.getMessage())
        raise SystemExit(3)

    near = logging.getLogger("celery_dlock")
    near.addFilter(fail)
    yield seen
    near.removeFilter(fail)


class Starts:
    """Starts threads of the test's own choice, but not those whose number is refused."""

    def __init__(self, *refused: int, error: BaseException | None = None) -> None:
        self.refused = set(refused)
        self.error = error or RuntimeError(NO_THREAD)
        self.made = 0

    def __call__(self, work: Callable[[], None]) -> None:
        self.made += 1
        if self.made in self.refused:
            raise self.error
        work()


def turns(*outcomes: BaseException | float | None) -> Callable[[], float | None]:
    left = iter(outcomes)

    def turn() -> float | None:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return turn


# What a round raises


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.usefixtures("no_wait")
def test_loop_turn_that_raises_is_logged_and_goes_on(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []
    Loop("test", turns(error(), 0.0, error(), None), close=lambda: ended.append("closed")).run()
    assert ended == ["closed"]
    (record,) = caplog.records  # the same kind of error is logged once a minute
    assert record.getMessage() == "the test failed in one round, continuing"
    assert error.__name__ in caplog.text


@pytest.mark.usefixtures("no_wait")
def test_loop_wait_and_close_that_raise_do_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        raise OSError(24, "Too many open files")

    def close() -> None:
        raise SystemExit

    Loop("test", turns(1.0, 2.0, None), wait=wait, close=close).run()
    assert waited == [1.0, 2.0]
    assert [record.getMessage() for record in caplog.records] == ["the test failed in one round, continuing"] * 2


@pytest.mark.usefixtures("no_wait")
def test_loop_log_filter_that_raises_does_not_end_it(broken_log: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []
    Loop("test", turns(ZeroDivisionError(), 0.0, KeyError(), None), close=lambda: ended.append("closed")).run()
    assert ended == ["closed"]
    assert len(broken_log) == 2
    assert "a log handler or filter failed at ('the %s failed in one round" in capfd.readouterr().err


@pytest.mark.usefixtures("no_wait", "broken_log")
def test_loop_that_cannot_tell_whether_it_is_needed_goes_on() -> None:
    asked: list[str] = []

    def needed() -> bool:
        asked.append("asked")
        if len(asked) == 1:
            raise ZeroDivisionError
        return False

    Loop("test", turns(None, None), needed=needed).run()
    assert len(asked) == 2


def test_log_filter_that_raises_is_seen_by_the_foreground(broken_log: list[str]) -> None:
    """A soft time limit that strikes in a log call must reach the body."""
    with pytest.raises(SystemExit):
        logger.warning("in a body")
    with native.background():
        logger.warning("in a background thread")
    assert broken_log == ["in a body", "in a background thread"]


def test_log_record_of_a_background_thread_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    with native.background():
        logger.warning("here")
    assert (caplog.records[0].module, caplog.records[0].funcName) == (
        "test_background",
        "test_log_record_of_a_background_thread_names_its_caller",
    )


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_listener_that_raises_in_the_background_does_not_silence_others(error: type[BaseException]) -> None:
    told: list[Event] = []

    def broken(_: Event) -> None:
        raise error

    listeners = Listeners()
    listeners.add(broken)
    listeners.add(told.append)
    executor = native.SerialExecutor()
    executor.add(lambda: listeners.emit("lost", name="x", owner="me"))
    executor.add(lambda: listeners.emit("acquired", name="x", owner="me"))
    eventually(lambda: [event.kind for event in told] == ["lost", "acquired"])


class Blocking(logging.Handler):
    """A log handler that blocks at its first record until the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        self.over.wait(30)


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    handler, near = Blocking(), logging.getLogger("celery_dlock")
    near.addHandler(handler)
    yield handler
    handler.over.set()
    near.removeHandler(handler)


@pytest.mark.invariant("plugins-do-not-stop-threads")
def test_loop_in_a_real_thread_goes_on_beside_a_log_handler_that_blocks(blocking: Blocking) -> None:
    """Such as one that writes into a pipe that nothing reads."""
    loop = Loop("test", turns(ZeroDivisionError(), 0.0, KeyError(), None))
    loop.start()
    eventually(lambda: "KeyError" in loop._logged and not loop.running.locked())
    eventually(lambda: blocking.seen)
    assert blocking.seen == ["the test failed in one round, continuing"]
    blocking.over.set()
    eventually(lambda: len(blocking.seen) == 2)


@pytest.mark.invariant("plugins-do-not-stop-threads")
def test_loss_behind_a_listener_that_blocks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.dlock_url = "redis://127.0.0.1:1"
    runtime, over, told = Runtime.of(app), threading.Event(), list[Event]()

    def blocks(event: Event) -> None:
        told.append(event)
        over.wait(30)

    runtime.listeners.add(blocks)
    slot = runtime.lease_table.open(shared_name("x"), "me.1", 30.0)
    for reason in ("first", "second"):
        runtime.watchdog._hooks.lost(slot, Loss(LossCause.FORGOTTEN, reason))
    eventually(lambda: len(told) == 1)
    over.set()
    lost = [line.rpartition(": ")[2] for line in caplog.messages if line.startswith("the lease of x:")]
    assert lost == ["first", "second"]
    eventually(lambda: len(told) == 2)


def test_listener_that_exits_in_the_foreground_exits() -> None:
    def broken(_: Event) -> None:
        raise SystemExit

    listeners = Listeners()
    listeners.add(broken)
    with pytest.raises(SystemExit):
        listeners.emit("acquired", name="x", owner="me")


def test_call_that_raises_does_not_stop_the_calls_behind_it(capfd: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    may_begin = threading.Event()
    executor = native.SerialExecutor()

    def broken() -> None:
        raise SystemExit

    for call in (may_begin.wait, broken, lambda: done.append("done")):
        executor.add(call)
    may_begin.set()
    eventually(lambda: done == ["done"])
    assert "a call for a background thread failed" in capfd.readouterr().err


class Rounds:
    """So many rounds, each of which fails before it has done anything."""

    def __init__(self, number: int) -> None:
        self.left = number

    def goes_on(self) -> bool:
        self.left -= 1
        if self.left:
            raise type(f"Failed{self.left}", (Exception,), {})
        return False


def rooms(runtime: Runtime, rounds: Rounds) -> dict[str, Any]:
    note = WorkerRecord.of_this_process() or pytest.fail("this system does not tell processes apart")
    return {
        "queue sweeper": QueueSweeper(DeliveryRegistry(runtime), lambda call: call(), rounds.goes_on),
        "claim renewer": ClaimRenewer(DeliveryRegistry(runtime), rounds.goes_on),
        "crash recovery": CrashRecovery(runtime, "node", rounds.goes_on, note),
        "store check": StoreCheck(runtime, rounds.goes_on, parks=False),
    }


@pytest.mark.invariant("plugins-do-not-stop-threads")
@pytest.mark.parametrize("name", ["queue sweeper", "claim renewer", "crash recovery", "store check"])
@pytest.mark.usefixtures("no_wait")
def test_thread_of_a_worker_whose_rounds_and_log_fail_goes_on(broken_log: list[str], name: str) -> None:
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.dlock_url = "redis://127.0.0.1:1"
    rounds = Rounds(5)
    room = rooms(Runtime.of(app), rounds)[name]
    room.loop.run()
    assert rounds.left == 0
    assert broken_log == [f"the {name} failed in one round, continuing"] * 4


@pytest.mark.usefixtures("no_wait", "broken_log")
def test_unsure_claims_are_taken_back_after_a_store_that_raised_anything() -> None:
    done: list[str] = []
    made = iter([OSError(24, "Too many open files"), KeyError("no store")])

    class Store:
        def release_claim(self, name: LockName, task_id: str, turn: str, attempt: str) -> None:
            if not done:
                done.append("failed")
                raise ZeroDivisionError
            done.append(task_id)

        def close(self) -> None:
            done.append("closed")

    def make_store() -> Any:
        if (error := next(made, None)) is not None:
            raise error
        return Store()

    unsure = ClaimRollback(make_store, FakeClock())
    unsure._loop.running.acquire(blocking=False)  # so no thread starts
    publication = ClaimRequest("id1", 0, 30_000, False, Requester("", "", "", ""), "x")
    unsure.take_back(shared_name("x"), publication)
    unsure._loop.running.release()
    unsure._loop.run()
    assert done == ["failed", "id1", "closed"]


# A thread that ends all the same


@pytest.mark.invariant("plugins-do-not-stop-threads")
def test_loop_thread_that_is_killed_is_started_again_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[int] = []
    over = threading.Event()

    def turn() -> float | None:
        rounds.append(threading.get_ident())
        if len(rounds) == 1:
            raise GreenletExit
        over.set()
        return None

    def begin(work: Callable[[], None]) -> None:
        def quietly() -> None:
            with contextlib.suppress(GreenletExit):  # as gevent does
                work()

        begin_thread("test")(quietly)

    loop = Loop("test", turn, begin=begin)
    loop.start()
    assert over.wait(10)
    eventually(lambda: not loop.running.locked())
    assert len(rounds) == 2
    assert [record.getMessage() for record in caplog.records] == ["the test thread was killed, restarting it"]


# A thread that cannot be started


@pytest.mark.usefixtures("no_wait")
def test_loop_start_that_fails_is_made_by_the_next_wake(caplog: pytest.LogCaptureFixture) -> None:
    starts, done = Starts(1, 2), []

    def turn() -> float | None:
        done.append("done")
        return None

    loop = Loop("test", turn, begin=starts)
    assert not loop.wake()
    assert not loop.wake()
    assert [record.getMessage() for record in caplog.records] == [
        f"the test thread cannot be started, retrying: {NO_THREAD}"
    ]
    assert loop.wake()
    assert done == ["done"]


@pytest.mark.invariant("thread-start-is-retried")
@pytest.mark.usefixtures("no_wait")
def test_loop_start_that_fails_is_made_by_another_loop() -> None:
    done: list[str] = []

    def turn() -> float | None:
        done.append("done")
        return None

    assert not Loop("test", turn, begin=Starts(1)).wake()
    Loop("other", turns(None)).run()
    assert done == ["done"]


def test_loop_start_that_fails_ends_a_workers_start() -> None:
    with pytest.raises(RuntimeError, match=NO_THREAD):
        Loop("test", turns(None), begin=Starts(1)).start()
    native.retry_starts()


@pytest.mark.invariant("thread-start-is-retried")
@pytest.mark.usefixtures("no_wait")
def test_loop_start_that_is_interrupted_is_made_by_the_next_wake() -> None:
    """An asynchronous exception, such as that of ``on_lost="abort"``, may strike at any line."""
    done: list[str] = []

    def turn() -> float | None:
        done.append("done")
        return None

    loop = Loop("test", turn, begin=Starts(1, error=LockLost()))
    with pytest.raises(LockLost):
        loop.wake()
    assert loop.wake()
    assert done == ["done"]


def test_loop_that_was_started_twice_runs_once() -> None:
    began: list[Callable[[], None]] = []
    rounds: list[str] = []
    loop = Loop("test", turns(None), close=lambda: rounds.append("closed"), begin=began.append)
    assert loop.wake()
    assert loop.wake()
    assert len(began) == 1, "it has not begun yet, and is on its way"
    assert loop.running.acquire(blocking=False)  # another thread runs it
    began[0]()
    assert rounds == []
    loop.running.release()


def test_call_is_made_later_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(native, "_begin_green", Starts(1))
    executor = native.SerialExecutor()
    executor.add(lambda: done.append("first"))
    assert done == []
    executor.add(lambda: done.append("second"))
    assert done == ["first", "second"]


def test_call_is_made_by_the_next_round_of_a_loop_when_no_thread_could_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(native, "_begin_green", Starts(1))
    native.SerialExecutor().add(lambda: done.append("done"))
    assert done == []
    Loop("other", turns(None)).run()
    assert done == ["done"]


def test_call_threads_without_a_thread_returns_the_calls_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    starts = Starts(2)
    monkeypatch.setattr("_thread.start_new_thread", lambda run, args: starts(lambda: made.append(args[0]())))
    call_threads = CallThreads()
    failures = call_threads.start([lambda: "a", lambda: "b", lambda: "c"])
    assert made == ["a", "c"]
    assert [(index, str(error)) for index, error in failures.items()] == [(1, NO_THREAD)]
    assert len(call_threads._running) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_call_thread_survives_a_call_that_raises(error: type[BaseException]) -> None:
    made: list[int] = []

    def broken() -> None:
        made.append(threading.get_ident())
        raise error

    call_threads = CallThreads()
    call_threads.start([broken])
    eventually(lambda: not call_threads.busy and len(call_threads._idle) == 1)
    call_threads.start([lambda: made.append(threading.get_ident())])
    eventually(lambda: len(made) == 2)
    assert made[0] == made[1]


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "sleep", lambda seconds: None)
    monkeypatch.setattr("celery_dlock.utils.background._sleep", lambda seconds: None)


def test_result_in_time_does_not_wait_for_a_function_that_hangs() -> None:
    hangs = threading.Event()
    try:
        assert result_in_time("test", hangs.wait, 0.05) is None
    finally:
        hangs.set()
    assert result_in_time("test", lambda: "answer", 20) == "answer"
