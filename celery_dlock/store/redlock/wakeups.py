"""A release listener that uses one of several servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from ...errors import StoreUnavailable
from ...keys.lock_name import LockName
from ...utils.rng import rng
from ..base import LockStore

__all__ = ["FailoverListener"]

#: Seconds to wait after a wake-up, until a majority has executed the release. Random, because waiters on different
#: servers may be woken at the same time.
DELAY: Final = (0.001, 0.005)
#: Seconds to the next poll of a waiter that has just been refused, doubled with each poll. If the preferred server does
#: not have the lock of the holder, it does not announce the release. Two examples: the holder released there just
#: before the waiter asked; the holder won its vote on other servers.
POLL_SOON: Final = 0.05


class FailoverListener:
    """A listener on one server, and on the next one if that server fails. Every server wakes one waiter per release.

    All waiters of a lock name prefer the same server. Otherwise each release would wake one waiter per server, and
    these would split the votes.

    Args:
        servers: Returns the stores of the servers, in the order in which they are tried.
        name: Lock name.
    """

    def __init__(self, servers: Callable[[], Sequence[LockStore]], name: LockName) -> None:
        self._servers = servers
        self._name = name
        self._poll = POLL_SOON

    def wait(self, timeout: float) -> bool:
        woken = self._wait(min(timeout, self._poll))
        if woken:
            self._poll = POLL_SOON
            time.sleep(rng.uniform(*DELAY))
        else:
            self._poll *= 2
        return woken

    def pass_on(self) -> None:
        self._servers()[0].release_listener(self._name).pass_on()

    def _wait(self, timeout: float) -> bool:
        *others, last = self._servers()
        for store in others:
            try:
                return store.release_listener(self._name).wait(timeout)
            except StoreUnavailable:
                pass  # no connection, or a refusal: the next server wakes a waiter too
        return last.release_listener(self._name).wait(timeout)
