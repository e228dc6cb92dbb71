"""Waiting on a condition: the only way a test lets time pass."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], within: float = 5.0, every: float = 0.02, message: str = "") -> T:
    """Call `condition` until it is truthy and return what it gave; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        # Read the clock first: a condition that blocks must still be asked once after the deadline.
        late = time.monotonic() >= deadline
        if value := condition():
            return value
        if late:
            raise AssertionError(f"{message or repr(condition)}: still {value!r} after {within} s")
        time.sleep(every)
