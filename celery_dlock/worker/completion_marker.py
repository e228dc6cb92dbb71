"""The completion marker: writes the done mark of a run whose acknowledgement was lost.

The broker delivers such a message again. The done mark keeps it from running again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ..keys.lock_name import LockName
from ..runtime import WATCHDOG_TIMEOUT
from ..store.model import Identity
from ..utils import threads
from ..utils.log import log_fields, logger

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["CompletedDelivery", "CompletedRun", "CompletionMarker", "channel_is_gone"]

T = TypeVar("T")

#: Seconds after which an acknowledgement that was not sent counts as lost. An event loop sends it within milliseconds,
#: but with greenlets Celery 5.5 first waits for the broker's next message, for up to 2 s.
ACK_SENT_WITHIN = 3.0
#: Seconds within which the watchdog has surely released the lock of a dead pool child.
RELEASED_WITHIN = 30.0
#: Seconds between two attempts to store marks. It is less than the 0.5 s after which a duplicate is republished.
RETRY_DELAY = 0.25
#: Marks that wait for an unreachable store. Beyond that, the oldest mark is dropped.
MAX_WAITING = 10_000


class CompletedDelivery(Protocol):
    """The part of a request that the done mark of its delivery needs."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> Any: ...
    @property
    def message(self) -> Any: ...
    @property
    def dlock_identity(self) -> Identity: ...
    @property
    def dlock_lock(self) -> LockName | None: ...

    @property
    def dlock_started_at(self) -> float: ...

    dlock_owner: str
    dlock_ack_lost: bool
    dlock_end_stored: bool


def channel_is_gone(message: Any) -> bool:
    """Return whether the channel that delivered this message is closed."""
    channel = getattr(message, "channel", None)
    return bool(getattr(channel, "closed", False)) or getattr(channel, "connection", True) is None


def _ack_is_lost(request: CompletedDelivery, since: float) -> bool:
    """Return whether the acknowledgement will no longer be sent."""
    late = time.monotonic() - since >= ACK_SENT_WITHIN
    return late or request.dlock_ack_lost or channel_is_gone(request.message)


def _taken(waiting: deque[T]) -> Iterator[T]:
    """Take out the items that are there now. Another thread may take out some of them at the same time."""
    for _ in range(len(waiting)):
        try:
            yield waiting.popleft()
        except IndexError:
            return


class CompletedRun(NamedTuple):
    """The done mark to write. It does not hold the request, which would keep its message in memory meanwhile.

    Args:
        dated: A time on the monotonic clock. A message that the worker received later is another one with the same id.
            If the pool child reported the end, it is the start of the run. A publisher that waited for the result may
            publish again before the main process knows of the end.
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

    Celery's main thread reports completed deliveries. The queue sweeper's thread calls :meth:`look` in each round.

    Args:
        runtime: The runtime whose store keeps the marks.
        died_holding: Returns whether the pool child of an owner died while it held a lock.
    """

    def __init__(self, runtime: Runtime, died_holding: Callable[[str], bool]) -> None:
        self._runtime = runtime
        self._died_holding = died_holding
        #: Set once a thread calls `look` in each round. Without one, expected deliveries would only fill the memory.
        self.is_polled = False
        # Deques, because append and popleft are atomic. A lock could be held by a greenlet.
        self._awaited: deque[tuple[float, CompletedDelivery]] = deque()
        self._dead: deque[tuple[float, CompletedDelivery]] = deque()
        self._unmarked: deque[CompletedRun] = deque()
        self._failing = False
        self._next_attempt = 0.0

    def expect_ack(self, request: CompletedDelivery) -> None:
        """Watch a delivery whose end is stored, and whose acknowledgement Celery will send soon."""
        if self.is_polled:
            self._awaited.append((time.monotonic(), request))

    def expect_ack_of_dead(self, request: CompletedDelivery) -> None:
        """Watch a delivery whose end is stored, and whose pool child has died or is dying."""
        if self.is_polled:
            self._dead.append((time.monotonic(), request))

    def mark(self, request: CompletedDelivery) -> None:
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
            self._wait(*([end] if self._failing else self._written([end])))

    def mark_soon(self, end: CompletedRun) -> None:
        """Write this mark in the next round."""
        self._wait(end)

    def _wait(self, *ends: CompletedRun) -> None:
        self._unmarked += ends
        while len(self._unmarked) > MAX_WAITING:
            dropped = self._unmarked.popleft()
            logger.error(
                "task %s has ended, but may run again: its done mark was dropped, because %d marks wait for the store",
                dropped.call, MAX_WAITING,
                extra=dropped.log_fields,
            )  # fmt: skip

    def look(self) -> None:
        """Write waiting marks, and those of deliveries whose acknowledgement was never sent.

        If kombu's event loop breaks in a round, it drops the acknowledgements that it would have sent in that round.
        """
        self._look_at_awaited()
        self._look_at_dead()
        if self._unmarked and time.monotonic() >= self._next_attempt:
            self._unmarked += self._written(list(_taken(self._unmarked)))

    def connection_broke(self) -> None:
        """Mark all deliveries whose acknowledgement was not sent yet: it will be lost.

        Call this before the channel is closed. Once it is closed, the broker delivers the messages again, and another
        worker may run one of them before the next round.
        """
        self._runtime.disconnected_at = time.monotonic()
        for _, request in _taken(self._awaited):
            if not request.message.acknowledged and not request.dlock_ack_lost:
                self.mark(request)

    def _look_at_awaited(self) -> None:
        for since, request in _taken(self._awaited):
            if request.message.acknowledged or request.dlock_ack_lost:
                continue  # it was sent; if that failed, the request itself asked for the mark
            if _ack_is_lost(request, since):
                self.mark(request)
            else:
                self._awaited.append((since, request))

    def _look_at_dead(self) -> None:
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
                # Open the connection first. The time that this takes must not be added to the age of the first mark.
                store.inspect(ends[0].name)
                for end in ends:
                    age_us = max(0, round((time.monotonic() - end.dated) * 1e6))
                    store.mark_done(end.name, end.identity, end.owner, age_us)
                    done += 1
            finally:
                store.close()
        except Exception as error:  # noqa: BLE001  # after any error, such as no file left to open, the mark is retried
            left = ends[done:]
            if left and not self._failing:
                logger.warning(
                    "cannot mark %s as done yet, retrying every %g s: %s", left[0].call, RETRY_DELAY, error,
                    extra=left[0].log_fields,
                )  # fmt: skip
            self._failing = True
            self._next_attempt = time.monotonic() + RETRY_DELAY
            # The refused mark goes behind the others, which it must not block for ever.
            return [*left[1:], *left[:1]]
        self._failing = False
        return []
