"""One dead store costs a worker one timeout, and not one for each task: the others are told at once."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from ..errors import ReplyTimeout, StoreUnavailable
from ..utils.clock import Clock

__all__ = ["PARTS", "CircuitBreaker", "shared_words"]

T = TypeVar("T")

#: Parts of a store that fail apart from one another; a single server has one. Far more than there are servers, because
#: they are numbered by a hash, and two whose numbers agree by this count as one.
PARTS: Final = 4096
#: Of each part: when it last failed to answer, and from when on it may be asked again; the first is 0 while it answers.
_FAILED, _NEXT = range(2)
_WORDS: Final = 2
_NS: Final = 1e9
#: A connection that fails sooner costs so little that nothing is gained by not asking: a server is being restarted.
_QUICK: Final = round(0.1 * _NS)
_NEVER: Final = 1 << 62


class SharedWords(Protocol):
    """Whole numbers by their places."""

    def __getitem__(self, place: int, /) -> int: ...
    def __setitem__(self, place: int, number: int, /) -> None: ...


def shared_words() -> SharedWords:
    """The state of a breaker, in memory that this process shares with all that it forks from now on."""
    # The view keeps the memory alive.
    return memoryview(mmap.mmap(-1, PARTS * _WORDS * 8)).cast("Q")


class CircuitBreaker:
    """Closed while the store answers; open, once it did not, for a rest; then half-open: one asker tries it.

    It may be used in any number of threads, greenlets and processes at once, and none of them can leave it stuck: whole
    words are stored, and there is no lock. So two may happen to try at the same instant; that costs one more timeout.

    Args:
        words: Its state, two whole numbers for each part of the store.
        clock: Monotonic, and the same in all processes that share the state.
        rest: Seconds that a store which did not answer is not asked; 0: it is always asked.
        timeout: Seconds that a command may take. After twice as long, one who tries the store and has said nothing is
            given up, and the next one may try.
    """

    def __init__(self, words: SharedWords, clock: Clock, rest: float, timeout: float) -> None:
        self._words = words
        self._clock = clock
        self._rest = round(rest * _NS)
        self._patience = round(2 * timeout * _NS)
        # From which cost on a failure opens it. Other errors mean that the server answered, or that it cut a connection
        # and may take the next one. Who asked for an answer in a much shorter time has learnt nothing of the store.
        half = round(timeout / 2 * _NS)
        self._costs = {ReplyTimeout: half, StoreUnavailable: min(_QUICK, half)}

    @property
    def open(self) -> bool:
        """The store did not answer, and has not answered since."""
        return bool(self._words[_FAILED])

    def before_call(self, part: int = 0) -> None:
        """Called by who is about to ask this part of the store, and can do something else instead.

        Raises:
            StoreUnavailable: The store was just found not to answer.
        """
        base = part % PARTS * _WORDS
        failed = self._words[base + _FAILED]
        if not failed:
            return
        now = self._now()
        if now < self._words[base + _NEXT]:
            ago = (now - failed) / _NS
            raise StoreUnavailable(f"the lock store was not asked: it did not answer {ago:.1f} s ago")
        self._words[base + _NEXT] = now + self._patience

    def call(self, call: Callable[..., T], *words: Any, part: int = 0) -> T:
        """What ``call`` answers; what that says of this part of the store is noted."""
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
