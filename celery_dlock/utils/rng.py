"""Random numbers that are nobody else's.

Our threads draw them beside a program's own work: from the functions of `random` they would change what a program that
seeds those gets (a test with its own seed, a simulation).
"""

from __future__ import annotations

import random
from typing import Final

__all__ = ["rng"]

#: Has no state, so that threads and forks may share it.
rng: Final = random.SystemRandom()
