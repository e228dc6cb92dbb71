"""The threads that make pages, and the circuit breaker before them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from ..store.circuit_breaker import CircuitBreaker, ShardStates
from ..utils.clock import SystemClock

__all__ = ["PageThreads"]

T = TypeVar("T")

#: Pages that are made at once. Others wait, without a thread.
AT_ONCE: Final = 16
#: Pages that are made at once of what may take seconds without a fault: the gauges, and the answers of workers.
SLOW_AT_ONCE: Final = 2


class PageThreads:
    """The threads of one dashboard. They are its own, so that a silent store takes none from the site around it.

    A page holds its thread until the store has answered or timed out. After a timeout, pages fail at once for a moment,
    and then one page tries the store again.

    Args:
        timeout: Seconds that a command of the store may take.
        skip: Seconds for which the store is not asked after a timeout.
    """

    def __init__(self, timeout: float, skip: float) -> None:
        self._breaker = CircuitBreaker(ShardStates([0], [0]), SystemClock(), skip, timeout)
        self._pages = ThreadPoolExecutor(AT_ONCE, "dlock-page")
        self._slow = ThreadPoolExecutor(SLOW_AT_ONCE, "dlock-slow-page")

    async def ask_store(self, work: Callable[..., T], *args: object) -> T:
        """Return the result of work that asks the store.

        Raises:
            StoreUnavailable: The store did not answer, or it was not asked because it did not answer a moment ago.
        """
        return await _run(self._pages, self._guarded, work, *args)

    async def run_slow(self, work: Callable[..., T], *args: object) -> T:
        """Return the result of work that limits itself how long and how often it asks."""
        return await _run(self._slow, work, *args)

    def _guarded(self, work: Callable[..., T], *args: object) -> T:
        self._breaker.before_call()
        return self._breaker.call(work, *args)


async def _run(pool: ThreadPoolExecutor, work: Callable[..., T], *args: object) -> T:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(work, *args))
