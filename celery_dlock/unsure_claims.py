"""Claims of which it is not known whether the store took them are taken back, whoever asked for them has gone on."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Final

from . import native
from .clock import Clock
from .errors import StoreRefused, StoreUnavailable
from .keys import LockKeys
from .records import Publication
from .store import ClaimStore

__all__ = ["UnsureClaims"]

#: Seconds between two tries.
AGAIN: Final = 0.5
#: Claims that are remembered; of more, the eldest end by their queued_ttl.
MOST: Final = 10_000


class UnsureClaims:
    """A thread that lives while there is something to take back.

    A claim that a slow store takes after all would refuse its caller's next try, and all others, for a message that was
    never published. So it is given up by its attempt: it takes effect neither now nor later.

    Args:
        make_store: Makes a store of the thread's own.
        clock: Where the claims' life is read.
    """

    def __init__(self, make_store: Callable[[], ClaimStore], clock: Clock) -> None:
        self._make_store = make_store
        self._clock = clock
        # append and popleft are atomic, so no lock that a signal handler or a greenlet could sit on.
        self._left: collections.deque[tuple[LockKeys, Publication, float]] = collections.deque(maxlen=MOST)
        self._running = native.Flag()

    def take_back(self, keys: LockKeys, publication: Publication) -> None:
        """Never blocks."""
        self._left.append((keys, publication, self._clock.monotonic() + publication.life_ms / 1000))
        self._wake()

    def _wake(self) -> None:
        if self._running.take():
            native.start_daemon(self._run)

    def _run(self) -> None:
        store = self._make_store()
        while self._left:
            keys, publication, end = self._left[0]
            try:
                if self._clock.monotonic() < end:
                    store.unclaim(keys, publication.task_id, publication.turn, publication.attempt)
            except StoreRefused:
                pass  # then it refused the claim, too
            except StoreUnavailable:
                native.sleep(AGAIN)
                continue
            self._left.popleft()
        store.close()
        self._running.drop()
        # Whatever was appended after the last look found the flag still up, so look once more.
        if self._left:
            self._wake()
