"""An answer that takes long, asked for by many requests and fetched once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from ..utils.background import begin_thread

__all__ = ["Attempt", "Shared"]

T = TypeVar("T")


class Attempt(NamedTuple, Generic[T]):
    """One call of the function.

    Args:
        began: When it began, on the monotonic clock.
        answer: Its result, or its exception.
    """

    began: float
    answer: Future[T]


class Shared(Generic[T]):
    """The result of a slow function. Requests share it while the function runs, and for a while afterwards.

    At most one thread runs the function, however many requests ask. Only the requests that wait for it share its error.

    Args:
        name: The name of that thread.
        ask: The function.
        keep: Seconds for which a result is used.
        stale: Seconds for which a result is used while the next one is not there.
    """

    def __init__(self, name: str, ask: Callable[[], T], keep: float, stale: float = 0.0) -> None:
        self._begin = begin_thread(name)
        self._ask = ask
        self._keep = keep
        self._stale = stale
        self._one = Lock()
        self._attempt: Attempt[T] | None = None
        self._last: tuple[float, T] | None = None
        self._ended_at = 0.0

    def attempt(self) -> Attempt[T]:
        """Return the attempt that runs, or whose result is new enough. If there is none, start one."""
        with self._one:
            found = self._attempt
            if found is not None and (not found.answer.done() or self._is_kept(found)):
                return found
            self._attempt = made = Attempt(time.monotonic(), Future[T]())
        made.answer.set_running_or_notify_cancel()  # a request that stops waiting cannot cancel it for the others
        self._begin(lambda: self._run(made))
        return made

    def forget(self) -> None:
        """Forget the result, so that the next request asks again."""
        with self._one:
            self._attempt = None

    def _is_kept(self, attempt: Attempt[T]) -> bool:
        return attempt.answer.exception() is None and time.monotonic() - self._ended_at < self._keep

    def _run(self, attempt: Attempt[T]) -> None:
        try:
            found = self._ask()
        except BaseException as error:  # noqa: BLE001  # each request that asked raises it
            self._ended_at = time.monotonic()
            attempt.answer.set_exception(error)
        else:
            self._ended_at = time.monotonic()
            self._last = self._ended_at, found
            attempt.answer.set_result(found)

    def result(self, within: float) -> T | None:
        """Return the result, and wait for it for at most ``within`` seconds.

        If it does not come in time, return the last result if that is not too old (``stale``), else None.

        Raises:
            Exception: The function raised it.
        """
        answer = self.attempt().answer
        wait([answer], within)
        if answer.done():
            return answer.result()
        last = self._last
        return last[1] if last is not None and time.monotonic() - last[0] < self._stale else None
