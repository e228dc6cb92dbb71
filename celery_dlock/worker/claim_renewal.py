"""The thread of a worker that renews the claims of its messages (``unique``), and releases those of revoked ones."""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from celery.worker.state import revoked

from ..errors import StoreRefused, StoreUnavailable
from ..options.durations import as_seconds
from ..store.claim_model import ClaimExtension
from ..utils.background import Loop
from ..utils.log import log_fields, logger

if TYPE_CHECKING:
    from .delivery_registry import DeliveryRegistry
    from .request import SingletonRequest

__all__ = ["ClaimRenewer"]


#: Seconds between two rounds.
ROUND: Final = 0.2


class ClaimRenewer:
    """Renews claims while their messages are prefetched, and while they wait for their ETA or for the pool.

    It is not a part of the queue sweeper, which a slow broker delays: a claim may last only a second. A claim that was
    released is not made again, so a message that has started costs one question to the store.

    Args:
        deliveries: The deliveries of this worker.
        goes_on: Called before each round; false ends the thread.
    """

    def __init__(self, deliveries: DeliveryRegistry, goes_on: Callable[[], bool]) -> None:
        self._known = deliveries.with_claims
        runtime = deliveries.runtime
        self._store = runtime.open_store(runtime.settings.timeout)
        # A deque, because its append and popleft are atomic. A lock could be held by a signal handler or a greenlet.
        self._ended: collections.deque[SingletonRequest] = collections.deque()
        #: The deliveries whose claims were released because they were revoked.
        self._revoked: weakref.WeakSet[SingletonRequest] = weakref.WeakSet()
        self._failing = False
        self.loop = Loop("claim renewer", self._run_round, goes_on=goes_on, close=self._store.close)

    def release_claim(self, request: SingletonRequest) -> None:
        """Release the claim of a message that ended before it started."""
        self._ended.append(request)

    def _run_round(self) -> float:
        try:
            self._renew_and_release()
            self._failing = False
        except StoreUnavailable as error:
            if not self._failing:
                logger.warning("claims of messages are not renewed, retrying every %g s: %s", ROUND, error)
            self._failing = True
        return ROUND

    def _renew_and_release(self) -> None:
        self._add_revoked()
        while self._ended:
            try:
                self._release(self._ended[0])
            except StoreUnavailable as error:
                if not isinstance(error, StoreRefused):
                    raise  # the next round tries it again
                # One claim, such as one whose key was overwritten, must not prevent the release of the others.
                _log_unreleased(self._ended[0], error)
            except BaseException:
                self._ended.popleft()
                raise
            self._ended.popleft()
        now = time.monotonic()
        known = [
            request for request in self._known() if request.dlock_in_process and now >= request.dlock_renew_claim_at
        ]
        renewals = [self._renewal(request, now) for request in known]
        if due := [renewal for renewal in renewals if renewal is not None]:
            self._store.extend_claims(due)

    def _add_revoked(self) -> None:
        """Find revoked messages, to release their claims at once: Celery ends a revoked message only at its ETA.

        Each message is looked up. Celery's set of revocations is bounded: a full set keeps its length.
        """
        if not revoked:
            return
        for request in self._known():
            if request.id in revoked and request not in self._revoked:
                self._revoked.add(request)
                self._ended.append(request)

    def _release(self, request: SingletonRequest) -> None:
        if (name := request.dlock_lock) is not None:
            identity = request.dlock_identity
            self._store.release_claim(name, identity.task_id, identity.generation)

    def _renewal(self, request: SingletonRequest, now: float) -> ClaimExtension | None:
        call, name = request.dlock_claim_call, request.dlock_lock
        if call is None or name is None:
            request.dlock_renew_claim_at = float("inf")
            return None
        seconds = as_seconds(call.options.queued_ttl)
        request.dlock_renew_claim_at = now + seconds / 3
        return ClaimExtension(name, request.id, round(seconds * 1000))


def _log_unreleased(request: SingletonRequest, error: StoreRefused) -> None:
    name, task = request.dlock_lock, request.task.name
    logger.warning(
        "the claim of task %s[%s] on %s cannot be released, it ends after its queued_ttl: %s",
        task, request.id, name, error, extra=log_fields(task, request.id, name.text if name else ""),
    )  # fmt: skip
