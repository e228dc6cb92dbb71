"""A dict of limited size."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

__all__ = ["Latest"]

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """A dict that keeps the latest entries: a new one removes the oldest, if there are too many.

    Args:
        most: The maximum number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)
