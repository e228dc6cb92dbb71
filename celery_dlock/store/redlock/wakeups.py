"""A release listener that uses one of several servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Final

from ...errors import StoreUnavailable
from ...keys.lock_name import LockName
from ...utils.rng import rng
from ..base import LockStore, ReleaseListener

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FailoverListener"]

#: Seconds to wait after a notification, until a majority has the release. Random, so that callers do not collide.
DELAY: Final = (0.002, 0.02)


class FailoverListener:
    """A listener on one server, and on the next one if that server fails. Every server publishes every release.

    Args:
        stores: Stores of the servers, in the order in which they are tried.
        name: Lock name.

    Raises:
        StoreUnavailable: No server accepts a subscription.
    """

    def __init__(self, stores: Sequence[LockStore], name: LockName) -> None:
        self._stores = list(stores)
        self._name = name
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._listener = self._subscribe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def wait(self, timeout: float) -> bool:
        try:
            notified = self._listener.wait(timeout)
        except StoreUnavailable:
            self._open.close()
            self._stores.append(self._stores.pop(0))
            self._listener = self._subscribe()
            return True  # a release may have been missed meanwhile
        if notified:
            time.sleep(rng.uniform(*DELAY))
        return notified

    def _subscribe(self) -> ReleaseListener:
        for _ in range(len(self._stores) - 1):
            try:
                return self._open.enter_context(self._stores[0].release_listener(self._name))
            except StoreUnavailable:
                self._stores.append(self._stores.pop(0))
        return self._open.enter_context(self._stores[0].release_listener(self._name))
