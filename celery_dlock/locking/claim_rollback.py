"""Release claims whose outcome is unknown. Their publisher has gone on and cannot do it."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final

from ..errors import StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..store.base import ClaimStore
from ..store.queue_model import ClaimRequest
from ..utils.background import Loop
from ..utils.clock import Clock

__all__ = ["ClaimRollback"]

#: Seconds between two attempts.
AGAIN: Final = 0.5
#: Maximum number of stored claims. Beyond it, the oldest ones end by their queued_ttl.
MOST: Final = 10_000


class ClaimRollback:
    """A thread that runs while claims are to be rolled back.

    If a slow store made the claim after all, it would refuse all later calls for a message that was never published.
    The claim is released by its attempt id, so it takes effect neither now nor later.

    Args:
        make_store: Creates a store for this thread only.
        clock: The clock by which claims expire.
    """

    def __init__(self, make_store: Callable[[], ClaimStore], clock: Clock) -> None:
        self._make_store = make_store
        self._clock = clock
        # append and popleft are atomic. A lock here could be held by an interrupted signal handler or greenlet.
        self._left: collections.deque[tuple[LockName, ClaimRequest, float]] = collections.deque(maxlen=MOST)
        self._store: ClaimStore | None = None
        self._loop = Loop("unsure claims", self._turn, needed=lambda: bool(self._left), close=self._close)

    def take_back(self, name: LockName, publication: ClaimRequest) -> None:
        """Queue a claim for release. Never blocks."""
        self._left.append((name, publication, self._clock.monotonic() + publication.life_ms / 1000))
        self._loop.wake()

    def _turn(self) -> float | None:
        if not self._left:
            return None
        if self._store is None:
            self._store = self._make_store()
        name, publication, end = self._left[0]
        try:
            if self._clock.monotonic() < end:
                self._store.release_claim(name, publication.task_id, publication.generation, publication.attempt)
        except StoreRefused:
            pass  # it refused the claim for the same reason
        except StoreUnavailable:
            return AGAIN
        self._left.popleft()
        return 0.0

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
