"""Which messages of a worker have reached the store, known to its main process and to every pool child.

Anonymous memory, mapped before the children are forked: so it costs no message and no round trip to ask. Each word has
one writer at a time, and a whole word is stored at once.
"""

from __future__ import annotations

import itertools
import mmap
from typing import Final

__all__ = ["ReceiveOrder"]

#: More than a worker ever has under way. A word that was overwritten speaks of a message that is long since done.
_SIZE: Final = 8192


class ReceiveOrder:
    """Numbers handed out in one process, and noted in any."""

    def __init__(self) -> None:
        # The view keeps the memory alive. A number at each even place, its rank behind it.
        self._words = memoryview(mmap.mmap(-1, _SIZE * 16)).cast("Q")
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        return next(self._numbers)

    def note(self, number: int, rank_us: int) -> None:
        """The message of this number holds its lock or is parked, both under this rank; 0: it needs neither."""
        place = number % _SIZE * 2
        if self._words[place] < number:
            self._words[place + 1] = rank_us
            self._words[place] = number

    def has(self, number: int) -> bool:
        return self._words[number % _SIZE * 2] >= number

    def rank_us(self, number: int) -> int:
        """The rank under which it arrived; 0 where that is not known (any more)."""
        place = number % _SIZE * 2
        rank_us = self._words[place + 1]
        return rank_us if self._words[place] == number else 0
