"""The thread of a worker that keeps the claims of the messages that the worker knows, and gives up those that ended."""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from celery.worker.state import revoked

from ..errors import StoreRefused, StoreUnavailable
from ..keys.lock_name import LockName
from ..options.validation import as_seconds
from ..store.model import Identity
from ..utils.background import Loop
from ..utils.log import logger

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ..task.call_options import Call

__all__ = ["ClaimRenewer"]


#: Seconds between two looks.
TICK: Final = 0.2


class Claiming(Protocol):
    """A delivery whose message has a claim, as far as it matters here."""

    dlock_identity: Identity
    dlock_renew_claim_at: float
    dlock_in_process: bool

    @property
    def id(self) -> str: ...
    @property
    def dlock_lock(self) -> LockName | None: ...
    @property
    def dlock_claim_call(self) -> Call | None: ...


class ClaimRenewer:
    """Keeps claims while their messages are prefetched, wait for their ETA or for their pool.

    Not the sweeper: a slow broker holds that up, and a claim may last no longer than a second. Claims that have been
    given up are not made again, so messages that have started cost no more than the asking.

    Args:
        runtime: Whose claims.
        known: The deliveries whose messages claim.
        goes_on: Asked before each tick; false ends the thread.
    """

    def __init__(self, runtime: Runtime, known: Callable[[], Iterable[Claiming]], goes_on: Callable[[], bool]) -> None:
        self._runtime = runtime
        self._known = known
        self._goes_on = goes_on
        self._store = runtime.store(runtime.settings.timeout)
        # append and popleft are atomic, so no lock that a signal handler or a greenlet could sit on.
        self._ended: collections.deque[Claiming] = collections.deque()
        #: Those whose claim was given up because they were revoked.
        self._revoked: weakref.WeakSet[Claiming] = weakref.WeakSet()
        self._failing = False
        self._loop = Loop("claim renewer", self._turn, close=self._close)

    def start(self) -> None:
        self._loop.start()

    def release_claim(self, request: Claiming) -> None:
        """Its message has ended before it started."""
        self._ended.append(request)

    def _turn(self) -> float | None:
        if not self._goes_on():
            return None
        try:
            self._tick()
            self._failing = False
        except StoreUnavailable as error:
            if not self._failing:
                logger.warning("claims of messages are not kept: %s", error)
            self._failing = True
        return TICK

    def _close(self) -> None:
        self._store.close()

    def _tick(self) -> None:
        self._note_revoked()
        while self._ended:
            try:
                self._release(self._ended[0])
            except StoreUnavailable as error:
                if not isinstance(error, StoreRefused):
                    raise  # it is tried again
                # A foreign key, say: it must not keep the others from being given up.
                logger.warning("the claim of %s ends by its queued_ttl only: %s", self._ended[0].dlock_lock, error)
            except BaseException:
                self._ended.popleft()
                raise
            self._ended.popleft()
        now = time.monotonic()
        known = [
            request for request in self._known() if request.dlock_in_process and now >= request.dlock_renew_claim_at
        ]
        looked_at = [self._kept(request, now) for request in known]
        if due := [kept for kept in looked_at if kept is not None]:
            self._store.keep_claims(due)

    def _note_revoked(self) -> None:
        """Give claims up at the control command itself: Celery ends a revoked message at its ETA only.

        Each message is looked up: Celery's set of revocations is bounded, and its length tells nothing once it is full.
        """
        if not revoked:
            return
        for request in self._known():
            if request.id in revoked and request not in self._revoked:
                self._revoked.add(request)
                self._ended.append(request)

    def _release(self, request: Claiming) -> None:
        if (name := request.dlock_lock) is not None:
            identity = request.dlock_identity
            self._store.unclaim(name, identity.task_id, identity.generation)

    def _kept(self, request: Claiming, now: float) -> tuple[LockName, str, int] | None:
        call, name = request.dlock_claim_call, request.dlock_lock
        if call is None or name is None:
            request.dlock_renew_claim_at = float("inf")
            return None
        seconds = as_seconds(call.options.queued_ttl)
        request.dlock_renew_claim_at = now + seconds / 3
        return name, request.id, round(seconds * 1000)
