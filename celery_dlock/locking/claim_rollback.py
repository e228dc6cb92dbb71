"""The claim rollback: releases claims (``unique``) after the publisher got no answer from the store.

The publisher does not wait for it, so a thread repeats the release until the store answers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final

from ..errors import StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..store.base import LockStore
from ..store.claim_model import ClaimRequest
from ..utils.background import Loop
from ..utils.clock import Clock

__all__ = ["ClaimRollback"]

#: Seconds between two attempts while the store does not answer.
AGAIN: Final = 0.5
#: Maximum number of claims that wait for their rollback. Beyond it, the oldest one is left to its ``queued_ttl``.
MOST: Final = 10_000


class ClaimRollback:
    """A thread that runs while there are claims to roll back.

    The store may have made such a claim, or may make it later. It would then refuse other calls of the lock name, even
    if the message of the claim was never published. The release names the attempt. A claim of this attempt that arrives
    later has no effect.

    Args:
        make_store: Creates the store of this thread, which no other thread uses.
        clock: The clock by which claims expire here.
    """

    def __init__(self, make_store: Callable[[], LockStore], clock: Clock) -> None:
        self._make_store = make_store
        self._clock = clock
        # append and popleft are atomic, so no lock is needed. A lock could be held by the code that a signal handler
        # interrupted, or by a suspended greenlet.
        self._left: collections.deque[tuple[LockName, ClaimRequest, float]] = collections.deque(maxlen=MOST)
        self._store: LockStore | None = None
        self._loop = Loop("unsure claims", self._run_round, needed=lambda: bool(self._left), close=self._close)

    def take_back(self, name: LockName, publication: ClaimRequest) -> None:
        """Release a claim as soon as the store answers, unless it has expired by then. Never blocks."""
        self._left.append((name, publication, self._clock.monotonic() + publication.life_ms / 1000))
        self._loop.wake()

    def _run_round(self) -> float | None:
        if not self._left:
            return None
        if self._store is None:
            self._store = self._make_store()
        name, publication, end = self._left[0]
        try:
            if self._clock.monotonic() < end:
                self._store.release_claim(name, publication.task_id, publication.generation, publication.attempt)
        except StoreRefused:
            pass  # the store refused the claim for the same reason
        except StoreUnavailable:
            return AGAIN
        self._left.popleft()
        return 0.0

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
