"""The circuit breaker: after a timeout, calls fail at once for a while. A dead store costs one timeout, not one a task.

Pattern: M. Nygard, *Release It!*, "Circuit Breaker".
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from ..errors import ReplyTimeout, StoreUnavailable
from ..utils.clock import Clock

__all__ = ["PARTS", "CircuitBreaker", "shared_words"]

T = TypeVar("T")

#: The number of shards that can fail independently; a single server is one shard. Shards are numbered by a hash, and
#: two with the same remainder share a state, so this is far more than there are servers.
PARTS: Final = 4096
#: The two words of a shard: the time of its last timeout (0: it answers), and the time of the next attempt.
_FAILED, _NEXT = range(2)
_WORDS: Final = 2
_NS: Final = 1e9
#: A connection that fails sooner than this costs too little to be worth skipping: a server is being restarted.
_QUICK: Final = round(0.1 * _NS)
_NEVER: Final = 1 << 62


class SharedWords(Protocol):
    """An array of whole numbers."""

    def __getitem__(self, place: int, /) -> int: ...
    def __setitem__(self, place: int, number: int, /) -> None: ...


def shared_words() -> SharedWords:
    """Return the state of a breaker, in memory shared with every process that is forked from now on."""
    # The view keeps the memory alive.
    return memoryview(mmap.mmap(-1, PARTS * _WORDS * 8)).cast("Q")


class CircuitBreaker:
    """A circuit breaker for each shard of a store.

    Closed while the shard answers. A timeout opens it for ``rest`` seconds. Then it is half-open: one call tries the
    shard, and its result closes or opens the breaker.

    Threads, greenlets and processes may share it. There is no lock that a dead process could hold: each word is stored
    whole. So two calls may try the shard at the same moment, which costs one more timeout.

    Args:
        words: The state, two whole numbers for each shard.
        clock: The clock; monotonic, and the same in all processes that share the state.
        rest: Seconds for which a shard is skipped after a timeout; 0: never skip it.
        timeout: Seconds that a command may take. If a call that tries a half-open shard does not end within twice this
            time, another call may try it.
    """

    def __init__(self, words: SharedWords, clock: Clock, rest: float, timeout: float) -> None:
        self._words = words
        self._clock = clock
        self._rest = round(rest * _NS)
        self._trial_ns = round(2 * timeout * _NS)
        # A failure opens the breaker if it took at least this long. A sooner timeout was a shorter limit of the caller.
        # Other errors do not open it: the server answered, or closed a connection and may accept the next one.
        half = round(timeout / 2 * _NS)
        self._costs = {ReplyTimeout: half, StoreUnavailable: min(_QUICK, half)}

    @property
    def open(self) -> bool:
        """Whether the first shard has not answered since its last timeout."""
        return bool(self._words[_FAILED])

    def before_call(self, part: int = 0) -> None:
        """Raise if the breaker is open. Call this before a command that the caller can do without.

        Raises:
            StoreUnavailable: The shard timed out a moment ago, so it was not asked.
        """
        base = part % PARTS * _WORDS
        failed = self._words[base + _FAILED]
        if not failed:
            return
        now = self._now()
        if now < self._words[base + _NEXT]:
            ago = (now - failed) / _NS
            raise StoreUnavailable(f"the lock store was not asked: it did not answer {ago:.1f} s ago")
        self._words[base + _NEXT] = now + self._trial_ns

    def call(self, call: Callable[..., T], *words: Any, part: int = 0) -> T:
        """Return the result of ``call``, and record whether the shard answered."""
        began = self._clock.monotonic()
        try:
            answer = call(*words)
        except StoreUnavailable as error:
            cost = round((self._clock.monotonic() - began) * _NS)
            self._note(part, silent=cost >= self._costs.get(type(error), _NEVER))
            raise
        if self._words[part % PARTS * _WORDS + _FAILED]:
            self._note(part, silent=False)
        return answer

    def _note(self, part: int, *, silent: bool) -> None:
        base = part % PARTS * _WORDS
        if silent and self._rest:
            now = self._now()
            self._words[base + _NEXT] = now + self._rest
            self._words[base + _FAILED] = now
        elif self._words[base + _FAILED]:
            self._words[base + _FAILED] = 0

    def _now(self) -> int:
        return round(self._clock.monotonic() * _NS)
