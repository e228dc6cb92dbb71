"""Background threads that no error ends: neither one of ours, nor one of a log handler, listener or result backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from . import threads as native
from .log import logger

__all__ = ["Loop", "begin_thread"]

#: Seconds until the next round after one that failed.
AGAIN: Final = 0.2
#: Seconds in which the same kind of error in the same loop is logged once.
SAID_AGAIN: Final = 60.0


def begin_thread(name: str) -> Callable[[Callable[[], None]], None]:
    """Return what starts a daemon thread of this name; where threads are greenlets, it is one of them."""

    def begin(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"dlock-{name}", daemon=True).start()

    return begin


def _sleep(seconds: float) -> None:
    """Sleep as threads of this process do; gevent and eventlet may replace the function after this import."""
    time.sleep(seconds)


class Loop:
    """Calls ``turn`` again and again in a thread of its own, until it returns None.

    Whatever a round raises is logged, and the next round follows. A thread that ends all the same, such as a greenlet
    that is killed, is started again.

    Args:
        name: Names the thread in the log.
        turn: One round. Returns the seconds until the next one, or None to end the thread.
        needed: Asked when the thread has ended: is there something to do again?
        close: Called when the thread ends.
        rest: Waits between two rounds.
        begin: Starts the thread; by default a real one, also beside greenlets.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        *,
        needed: Callable[[], bool] = lambda: False,
        close: Callable[[], object] = lambda: None,
        rest: Callable[[float], None] | None = None,
        begin: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._name = name
        self._turn = turn
        self._is_needed = needed
        self._close = close
        self._sleep = native.sleep if begin is None else _sleep
        self._rest = rest or self._sleep
        self._thread = native.OneThread(self._work, self._needed, begin)
        self._said: dict[str, float] = {}
        self._cannot_start = False

    @property
    def running(self) -> native.TryLock:
        """Taken while a thread runs the loop."""
        return self._thread.running

    def start(self) -> None:
        """Start the thread, at a worker's start.

        Raises:
            RuntimeError: It cannot be started.
        """
        if (error := self._thread.wake()) is not None:
            raise error

    def wake(self) -> bool:
        """Make sure that the thread runs; return False if it cannot be started. Never blocks.

        A thread that cannot be started is started later by another background thread, or by the next call.
        """
        error = self._thread.wake()
        if error is not None and not self._cannot_start:
            with native.background():  # this may be a fork's hook, or a body
                logger.error("the %s thread cannot be started, trying again: %s", self._name, error)
        self._cannot_start = error is not None
        return error is None

    def run(self) -> None:
        """Run the loop in this thread."""
        self._thread.run()

    def _work(self) -> None:
        with native.background():
            ended = False
            try:
                while self._round():
                    pass
                ended = True
            finally:
                self._guarded(self._close)
                if not ended:
                    logger.error("the %s thread was ended from outside and is started again", self._name)

    def _round(self) -> bool:
        """Return False if it was the last one."""
        seconds: float | None = AGAIN
        try:
            native.retry_starts()
            seconds = self._turn()
        except BaseException as error:  # noqa: BLE001  # whatever it is: logged, and the next round follows
            self._failed(error)
        if seconds is None:
            return False
        try:
            self._rest(seconds)
        except BaseException as error:  # noqa: BLE001  # whatever it is: logged, and the next round follows
            self._failed(error)
            self._sleep(seconds)
        return True

    def _guarded(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001  # whatever it is: logged, and the next round follows
            self._failed(error)
            return True

    def _needed(self) -> bool:
        with native.background():
            return bool(self._guarded(self._is_needed))

    def _failed(self, error: BaseException) -> None:
        if native.is_kill(error):
            raise error
        # Not each time: a round that always fails would fill the log.
        what, now = type(error).__qualname__, time.monotonic()
        if now - self._said.get(what, -SAID_AGAIN) >= SAID_AGAIN:
            self._said = {what: now}
            logger.error("the %s failed in one round and goes on", self._name, exc_info=error)
