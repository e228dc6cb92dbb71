"""Background threads that survive every error, including errors of log handlers, listeners and result backends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from . import threads
from .log import logger

__all__ = ["Loop", "begin_thread", "result_in_time"]

T = TypeVar("T")

#: Seconds until the next round after one that failed.
AGAIN: Final = 0.2
#: Seconds in which errors of one kind in one loop are logged once.
LOG_INTERVAL: Final = 60.0


def begin_thread(name: str) -> Callable[[Callable[[], None]], None]:
    """Return a function that starts a daemon thread of this name: a greenlet, if threads are greenlets."""

    def begin(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"dlock-{name}", daemon=True).start()

    return begin


def result_in_time(name: str, ask: Callable[[], T], seconds: float) -> T | None:
    """Return the result of a function that may hang, or None if it does not return in time.

    Args:
        name: Names the thread that runs the function, also after the time.
        ask: The function. It raises no error.
        seconds: The time.
    """
    found: list[T] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(ask())
        finally:
            done.set()

    begin_thread(name)(run)
    done.wait(seconds)
    return found[0] if found else None


def _sleep(seconds: float) -> None:
    """Sleep with the current ``time.sleep``, because gevent and eventlet may replace it after this import."""
    time.sleep(seconds)


class Loop:
    """A thread that calls ``run_round`` repeatedly until it returns None.

    An exception in a round is logged, and the next round follows. If the thread ends for another reason, such as a
    killed greenlet, it is started again.

    Args:
        name: Names the thread in the log.
        run_round: Runs one round. Returns the seconds until the next one, or None to end the thread.
        goes_on: Called before each round; false ends the thread.
        needed: Called when the thread has ended. Returns whether there is work again.
        close: Called when the thread ends.
        wait: Waits between two rounds.
        begin: Starts the thread. By default it is a native one, even if threads are greenlets.
    """

    def __init__(
        self,
        name: str,
        run_round: Callable[[], float | None],
        *,
        goes_on: Callable[[], bool] = lambda: True,
        needed: Callable[[], bool] = lambda: False,
        close: Callable[[], object] = lambda: None,
        wait: Callable[[float], None] | None = None,
        begin: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._name = name
        self._run_round = run_round
        self._goes_on = goes_on
        self._is_needed = needed
        self._close = close
        self._sleep = threads.sleep if begin is None else _sleep
        self._wait = wait or self._sleep
        self._thread = threads.OneThread(self._work, self._needed, begin)
        self._logged: dict[str, float] = {}
        self._cannot_start = False

    @property
    def running(self) -> Any:
        """The lock that a thread holds while it runs the loop."""
        return self._thread.running

    def start(self) -> None:
        """Start the thread, at a worker's start.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        if (error := self._thread.wake()) is not None:
            raise error

    def wake(self) -> bool:
        """Make sure that the thread runs; return False if it cannot be started. Never blocks.

        A thread that cannot be started is started later by another background thread, or by the next call.
        """
        error = self._thread.wake()
        if error is not None and not self._cannot_start:
            with threads.background():  # the caller may be a fork hook or a task body
                logger.error("the %s thread cannot be started, retrying: %s", self._name, error)
        self._cannot_start = error is not None
        return error is None

    def run(self) -> None:
        """Run the loop in this thread."""
        self._thread.run()

    def _work(self) -> None:
        with threads.background():
            ended = False
            try:
                while self._round():
                    pass
                ended = True
            finally:
                self._guarded(self._close)
                if not ended:
                    logger.error("the %s thread was killed, restarting it", self._name)

    def _round(self) -> bool:
        """Run one round; return False if it was the last."""
        seconds: float | None = AGAIN
        try:
            threads.retry_starts()
            seconds = self._run_round() if self._goes_on() else None
        except BaseException as error:  # noqa: BLE001  # logged, and the next round follows
            self._failed(error)
        if seconds is None:
            return False
        try:
            self._wait(seconds)
        except BaseException as error:  # noqa: BLE001  # logged, and the next round follows
            self._failed(error)
            self._sleep(seconds)
        return True

    def _guarded(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001  # logged, and the next round follows
            self._failed(error)
            return True

    def _needed(self) -> bool:
        with threads.background():
            return bool(self._guarded(self._is_needed))

    def _failed(self, error: BaseException) -> None:
        if threads.is_kill(error):
            raise error
        # Log each kind of error once per interval: a round that always fails would fill the log.
        kind, now = type(error).__qualname__, time.monotonic()
        if now - self._logged.get(kind, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._logged = {kind: now}
            logger.error("the %s failed in one round, continuing", self._name, exc_info=error)
