"""The completion marker: writes the done mark of a run whose acknowledgement was lost.

If an acknowledgement is lost, the broker delivers the message again. The done mark prevents a second run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..keys.lock_name import LockName
from ..runtime import WATCHDOG_TIMEOUT
from ..utils import threads
from ..utils.log import log_fields, logger

if TYPE_CHECKING:
    from ..runtime import Runtime
    from .request import SingletonRequest

__all__ = ["CompletedRun", "CompletionMarker", "channel_is_gone"]

T = TypeVar("T")

#: Seconds after which an acknowledgement that was not sent counts as lost. An event loop sends it within milliseconds,
#: but with greenlets Celery 5.5 first waits for the broker's next message, for up to 2 s.
ACK_SENT_WITHIN = 3.0
#: Seconds for which a delivery of a dead pool child is watched. By then, the watchdog has released the child's lock.
RELEASED_WITHIN = 30.0
#: Seconds between two attempts to store marks. It is less than the 0.5 s after which a duplicate is republished.
RETRY_DELAY = 0.25
#: Maximum number of marks that wait for an unreachable store. If there are more, the oldest is dropped.
MAX_WAITING = 10_000


def channel_is_gone(message: Any) -> bool:
    """Return whether the channel that delivered this message is closed."""
    channel = message.channel
    return getattr(channel, "connection", True) is None or getattr(channel, "closed", False)


def _ack_is_lost(request: SingletonRequest, since: float) -> bool:
    """Return whether the acknowledgement will no longer be sent."""
    late = time.monotonic() - since >= ACK_SENT_WITHIN
    return late or request.dlock_ack_lost or channel_is_gone(request.message)


def _taken(waiting: deque[T]) -> Iterator[T]:
    """Remove and yield the items that are in the deque now. Another thread may remove some of them meanwhile."""
    for _ in range(len(waiting)):
        try:
            yield waiting.popleft()
        except IndexError:
            return


class CompletedRun(NamedTuple):
    """The done mark to write. It has no reference to the request, which would keep the message in memory.

    Args:
        dated: A time on the monotonic clock. A message that was received later is no duplicate: it is a new message
            with the same id. If the pool child reported the end, this is the start of the run. A publisher may
            publish that new message before the main process knows of the end.
        name: The lock name.
        identity: The digest of the message's identity.
        owner: The delivery that ran.
        task: The task's name.
        task_id: The task's id.
    """

    dated: float
    name: LockName
    identity: str
    owner: str
    task: str
    task_id: str

    @property
    def call(self) -> str:
        """The task's name and id for a log line."""
        return f"{self.task}[{self.task_id}]"

    @property
    def log_fields(self) -> dict[str, str | None]:
        """The extra fields of a log line."""
        return log_fields(self.task, self.task_id, self.name.text)


class CompletionMarker:
    """Writes done marks, so that completed runs do not run again.

    Celery's main thread reports completed deliveries. The queue sweeper's thread calls :meth:`run_round` in each round.

    Args:
        runtime: The runtime whose store keeps the marks.
        died_holding: Returns whether the pool child of an owner died while it held a lock.
    """

    def __init__(self, runtime: Runtime, died_holding: Callable[[str], bool]) -> None:
        self._runtime = runtime
        self._died_holding = died_holding
        #: Set once a thread calls `run_round`. Before that, watched deliveries would only fill the memory.
        self.is_polled = False
        # Deques need no lock, because append and popleft are atomic. A suspended greenlet could hold a lock.
        self._awaited: deque[tuple[float, SingletonRequest]] = deque()
        self._dead: deque[tuple[float, SingletonRequest]] = deque()
        self._unmarked: deque[CompletedRun] = deque()
        self._failing = False
        self._next_attempt = 0.0

    def expect_ack(self, request: SingletonRequest) -> None:
        """Watch a delivery whose end is stored, and whose acknowledgement Celery will send soon."""
        if self.is_polled:
            self._awaited.append((time.monotonic(), request))

    def expect_ack_of_dead(self, request: SingletonRequest) -> None:
        """Watch a delivery whose end is stored, and whose pool child has died or is dying."""
        if self.is_polled:
            self._dead.append((time.monotonic(), request))

    def mark(self, request: SingletonRequest) -> None:
        """Write the done mark of a delivery whose end is stored and whose acknowledgement was lost.

        This never raises, because an error would end Celery's event loop. The loop may end right after this call, so
        the first attempt is made here. If the store did not answer the last attempt, the mark waits for the next round.
        Otherwise each delivery would block the event loop for the store's timeout.
        """
        if (name := request.dlock_lock) is None:
            return
        end = CompletedRun(
            request.dlock_started_at, name, request.dlock_identity.digest, request.dlock_owner,
            request.task.name, request.id,
        )  # fmt: skip
        with threads.background():  # a log handler that raises must not end the event loop either
            self.mark_soon(*([end] if self._failing else self._written([end])))

    def mark_soon(self, *ends: CompletedRun) -> None:
        """Write these marks in the next round."""
        self._unmarked += ends
        while len(self._unmarked) > MAX_WAITING:
            dropped = self._unmarked.popleft()
            logger.error(
                "task %s has ended, but may run again: its done mark was dropped, because %d marks wait for the store",
                dropped.call, MAX_WAITING,
                extra=dropped.log_fields,
            )  # fmt: skip

    def run_round(self) -> None:
        """Write waiting marks, and those of deliveries whose acknowledgement was never sent.

        If an error ends a round of kombu's event loop, the acknowledgements that the round had to send are lost.
        """
        self._check_awaited()
        self._check_dead()
        if self._unmarked and time.monotonic() >= self._next_attempt:
            self._unmarked += self._written(list(_taken(self._unmarked)))

    def connection_broke(self) -> None:
        """Mark all deliveries whose acknowledgement was not sent before the connection broke.

        Call this before the channel is closed. Once it is closed, the broker delivers the messages again, and another
        worker may run one of them before the next round.
        """
        self._runtime.disconnected_at = time.monotonic()
        for _, request in _taken(self._awaited):
            if not request.message.acknowledged and not request.dlock_ack_lost:
                self.mark(request)

    def _check_awaited(self) -> None:
        for since, request in _taken(self._awaited):
            if request.message.acknowledged or request.dlock_ack_lost:
                continue  # sent, or lost; if it is lost, the request itself calls `mark`
            if _ack_is_lost(request, since):
                self.mark(request)
            else:
                self._awaited.append((since, request))

    def _check_dead(self) -> None:
        for since, request in _taken(self._dead):
            if request.message.acknowledged and not request.dlock_ack_lost:
                continue
            if _ack_is_lost(request, since) and self._died_holding(request.dlock_owner):
                request.dlock_end_stored = True
                self.mark(request)
            elif time.monotonic() - since < RELEASED_WITHIN:
                self._dead.append((since, request))

    def _written(self, ends: list[CompletedRun]) -> list[CompletedRun]:
        """Write marks; return those that the store did not take."""
        done = 0
        try:
            # A store for this call only: the event loop and the sweeper's thread may be here at the same time.
            store = self._runtime.open_store(WATCHDOG_TIMEOUT)
            try:
                # Open the connection first. Otherwise the time that this takes would date the first mark too late.
                store.inspect(ends[0].name)
                for end in ends:
                    age_us = max(0, round((time.monotonic() - end.dated) * 1e6))
                    store.mark_done(end.name, end.identity, end.owner, age_us)
                    done += 1
            finally:
                store.close()
        except Exception as error:  # noqa: BLE001  # retry after any error, such as too many open files
            left = ends[done:]
            if left and not self._failing:
                logger.warning(
                    "cannot mark %s as done yet, retrying every %g s: %s", left[0].call, RETRY_DELAY, error,
                    extra=left[0].log_fields,
                )  # fmt: skip
            self._failing = True
            self._next_attempt = time.monotonic() + RETRY_DELAY
            # Retry this mark last. If the store always refuses it, it must not block the others.
            return [*left[1:], *left[:1]]
        self._failing = False
        return []
