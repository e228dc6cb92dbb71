"""Told of releases by any one of several servers."""

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

#: Seconds until a majority has heard of a release of which one server tells; random, so that the woken do not meet.
HEARD: Final = (0.002, 0.02)


class FailoverListener:
    """Listens at one of several servers; where that goes away, at the next. Each is told of every release.

    Args:
        stores: Of the servers, in the order in which they are tried.
        name: Of the lock.

    Raises:
        StoreUnavailable: No server can be listened to.
    """

    def __init__(self, stores: Sequence[LockStore], name: LockName) -> None:
        self._stores = list(stores)
        self._name = name
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._waker = self._listening()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def wait(self, timeout: float) -> bool:
        try:
            told = self._waker.wait(timeout)
        except StoreUnavailable:
            self._open.close()
            self._stores.append(self._stores.pop(0))
            self._waker = self._listening()
            return True  # what happened in between is not known
        if told:
            time.sleep(rng.uniform(*HEARD))  # spreads those who were woken
        return told

    def _listening(self) -> ReleaseListener:
        for _ in range(len(self._stores) - 1):
            try:
                return self._open.enter_context(self._stores[0].waker(self._name))
            except StoreUnavailable:
                self._stores.append(self._stores.pop(0))
        return self._open.enter_context(self._stores[0].waker(self._name))
