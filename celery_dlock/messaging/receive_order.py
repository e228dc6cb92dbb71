"""The order in which a worker received its messages, and which of them have reached the store.

It is in anonymous memory, mapped before the pool children are forked. So the main process and every child can read it
without a message or a round trip. Each word has one writer at a time, and is written in one step.
"""

from __future__ import annotations

import itertools
import mmap
from typing import Final

__all__ = ["ReceiveOrder"]

#: More messages than a worker ever has at a time. A message whose number was overwritten has ended long ago.
_SIZE: Final = 8192


class ReceiveOrder:
    """Numbers of received messages: the main process assigns them, and any process of the worker records them."""

    def __init__(self) -> None:
        # The view keeps the memory alive. Each even word has a number, and the next word has its rank.
        self._words = memoryview(mmap.mmap(-1, _SIZE * 16)).cast("Q")
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Return the number of the next message."""
        return next(self._numbers)

    def record(self, number: int, rank_us: int) -> None:
        """Record that a message holds its lock or is parked, with its rank; rank 0 if it needs neither."""
        index = number % _SIZE * 2
        if self._words[index] < number:
            self._words[index + 1] = rank_us
            self._words[index] = number

    def has_recorded(self, number: int) -> bool:
        """Return whether the message was recorded. An overwritten one counts as recorded."""
        return self._words[number % _SIZE * 2] >= number

    def rank_us(self, number: int) -> int:
        """Return the rank of a recorded message; 0 if it has none or was overwritten."""
        index = number % _SIZE * 2
        rank_us = self._words[index + 1]
        return rank_us if self._words[index] == number else 0
