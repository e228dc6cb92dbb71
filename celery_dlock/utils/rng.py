"""Random numbers that do not depend on the seed of the program.

A program may seed the functions of `random`, for a test or a simulation. If the threads of this package drew from them
too, the program would get other numbers.
"""

from __future__ import annotations

import random
from typing import Final

__all__ = ["rng"]

#: It has no state, so threads and forked children can share it.
rng: Final = random.SystemRandom()
