"""The circuit breaker: after a timeout, calls fail at once for a while, so a dead store does not delay every task.

Pattern: M. Nygard, *Release It!*, "Circuit Breaker".
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from ..errors import ReplyTimeout, StoreUnavailable
from ..utils.clock import Clock

__all__ = ["SHARDS", "CircuitBreaker", "ShardStates", "shared_states"]

T = TypeVar("T")

#: A shard is a part of the store that can fail alone. In a Cluster, each primary is one. Its number is a hash of its
#: address, smaller than SHARDS. Two primaries rarely have the same number. Any other store is one shard with number 0.
SHARDS: Final = 4096
_NS: Final = 1e9
#: If a connection fails sooner than this, the breaker stays closed: a server is being restarted, and each attempt is
#: cheap.
_QUICK: Final = round(0.1 * _NS)
_NEVER: Final = 1 << 62


class ShardStates(NamedTuple):
    """The state of each shard, by its number. Times are nanoseconds of the monotonic clock.

    Args:
        failed: The time of the last timeout; 0: the shard answers.
        next_try: While it does not answer, the time of the next attempt.
    """

    failed: memoryview[int] | list[int]
    next_try: memoryview[int] | list[int]


def shared_states() -> ShardStates:
    """Return the states of a breaker, in memory shared with every process that is forked from now on."""
    # The views keep the memory alive.
    words = memoryview(mmap.mmap(-1, 2 * SHARDS * 8)).cast("Q")
    return ShardStates(words[:SHARDS], words[SHARDS:])


class CircuitBreaker:
    """A circuit breaker for each shard of a store.

    Closed while the shard answers. A timeout opens it for ``skip_after_timeout`` seconds. Then it is
    half-open: one call tries the shard, and its result closes or opens the breaker.

    Threads, greenlets and processes may share it. It has no lock, because a process could die while it holds one. Each
    word is stored atomically. Two calls may try the shard at the same moment, which costs one more timeout.

    Args:
        states: The states of the shards.
        clock: The clock; monotonic, and the same in all processes that share the state.
        skip_after_timeout: Seconds for which a shard is skipped after a timeout; 0: never skip it.
        timeout: Seconds that a command may take. If a call that tries a half-open shard does not end within twice this
            time, another call may try it.
        failed: Called with the error of each failed command; with None for a command that was not sent.
    """

    def __init__(
        self,
        states: ShardStates,
        clock: Clock,
        skip_after_timeout: float,
        timeout: float,
        failed: Callable[[StoreUnavailable | None], object] = lambda error: None,
    ) -> None:
        #: The time of each shard's last timeout, by its number; 0: the shard answers.
        self.failed_at, self._next_try = states
        self._failed = failed
        self._clock = clock
        self._skip_ns = round(skip_after_timeout * _NS)
        self._trial_ns = round(2 * timeout * _NS)
        # These two errors open the breaker, each only if the call took at least this long. A timeout that came sooner
        # does not show that the shard is dead: the caller allowed less time for this command.
        # No other error opens it: the server answered, or closed a connection and may accept the next one.
        half = round(timeout / 2 * _NS)
        self._opening_ns = {ReplyTimeout: half, StoreUnavailable: min(_QUICK, half)}

    @property
    def open(self) -> bool:
        """Whether shard 0 timed out and has not answered since. Stores of one server have only this shard."""
        return bool(self.failed_at[0])

    def before_call(self, shard: int = 0) -> None:
        """Raise if the breaker is open. Call this only if the command may be skipped, because it is repeated later.

        A message whose acquire is skipped can be republished. A release that is skipped is left to the watchdog.

        Raises:
            StoreUnavailable: The shard timed out a moment ago, so it was not asked.
        """
        failed = self.failed_at[shard]
        if not failed:
            return
        now = self._now()
        if now < self._next_try[shard]:
            ago = (now - failed) / _NS
            self._failed(None)
            raise StoreUnavailable(f"the lock store was not asked: it did not answer {ago:.1f} s ago")
        self._next_try[shard] = now + self._trial_ns

    def call(self, call: Callable[..., T], *words: Any, shard: int = 0) -> T:
        """Return the result of ``call``, and record whether the shard answered."""
        began = self._clock.monotonic()
        try:
            answer = call(*words)
        except StoreUnavailable as error:
            cost = round((self._clock.monotonic() - began) * _NS)
            self._note(shard, silent=cost >= self._opening_ns.get(type(error), _NEVER))
            self._failed(error)
            raise
        if self.failed_at[shard]:
            self._note(shard, silent=False)
        return answer

    def time_next(self, calls: int, took: Callable[[str, float], object]) -> None:
        """Measure the next ``calls`` commands, and report the name and the seconds of each one that succeeds.

        While it measures, an instance attribute hides the method :meth:`call`. Afterwards it is deleted, so commands
        that are not measured pay nothing.
        """
        left = iter(range(calls - 1))

        def timed(call: Callable[..., T], *words: Any, shard: int = 0) -> T:
            if next(left, None) is None:
                vars(self).pop("call", None)
            began = self._clock.monotonic()
            answer = CircuitBreaker.call(self, call, *words, shard=shard)
            took(call.__name__, self._clock.monotonic() - began)
            return answer

        vars(self)["call"] = timed

    def _note(self, shard: int, *, silent: bool) -> None:
        if silent and self._skip_ns:
            now = self._now()
            self._next_try[shard] = now + self._skip_ns
            self.failed_at[shard] = now
        elif self.failed_at[shard]:
            self.failed_at[shard] = 0

    def _now(self) -> int:
        return round(self._clock.monotonic() * _NS)
