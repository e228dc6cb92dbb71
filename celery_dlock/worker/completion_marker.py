"""Ends of which the broker did not hear: marked, so that the message that it delivers again does not run again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ..keys.lock_name import LockName
from ..runtime import KEEPER_TIMEOUT
from ..store.model import Identity
from ..utils import threads as native
from ..utils.log import logger

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["CompletedDelivery", "CompletedRun", "CompletionMarker", "channel_is_gone"]

T = TypeVar("T")

#: Seconds after which an acknowledgement is no longer on its way. An event loop needs milliseconds, but with greenlets
#: Celery 5.5 waits for the broker's next word, for up to 2 s.
TRIED_WITHIN = 3.0
#: Seconds in which the keeper has freed what a dead child held, by far.
FREED_WITHIN = 30.0
#: Seconds between two tries of a store that did not take a mark; the copy of a message comes back after 0.5 at least.
REST = 0.25
#: Ends that wait for a store that is away; beyond that the oldest is given up.
MOST = 10_000


class CompletedDelivery(Protocol):
    """One delivery whose end is stored: what is asked of its request."""

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
    """Was the channel closed from which this message came?"""
    channel = getattr(message, "channel", None)
    return bool(getattr(channel, "closed", False)) or getattr(channel, "connection", True) is None


def _is_given_up(request: CompletedDelivery, since: float) -> bool:
    """Is its acknowledgement no longer on its way?"""
    late = time.monotonic() - since >= TRIED_WITHIN
    return late or request.dlock_ack_lost or channel_is_gone(request.message)


def _taken(waiting: deque[T]) -> Iterator[T]:
    """Take out what is there now; another thread may do so at once."""
    for _ in range(len(waiting)):
        try:
            yield waiting.popleft()
        except IndexError:
            return


class CompletedRun(NamedTuple):
    """What is to be marked; not the request, which would keep its message in memory while the store is away."""

    #: On the monotonic clock: what came later is another message with the same id. Of an end that a child told, it is
    #: the start of the run, because a sender who waited for the result may come before that is known here; a copy is
    #: flagged, or was there by then.
    dated: float
    name: LockName
    identity: str
    owner: str
    whose: str


class CompletionMarker:
    """Sees to it that what has ended does not run again.

    Celery's own thread tells of ends, and another one calls :meth:`look` again and again.

    Args:
        runtime: Whose store keeps the marks.
        died_holding: Did this owner's child die while it held a lock?
    """

    def __init__(self, runtime: Runtime, died_holding: Callable[[str], bool]) -> None:
        self._runtime = runtime
        self._died_holding = died_holding
        #: Set once a thread calls `look` again and again. Without one, what is expected would only use up memory.
        self.is_polled = False
        # Deques: append and popleft are atomic, so no lock that a greenlet could sit on.
        self._awaited: deque[tuple[float, CompletedDelivery]] = deque()
        self._dead: deque[tuple[float, CompletedDelivery]] = deque()
        self._unmarked: deque[CompletedRun] = deque()
        self._failing = False
        self._rests_until = 0.0

    def expect_ack(self, request: CompletedDelivery) -> None:
        """Its end is stored, and its acknowledgement is to be tried in a moment."""
        if self.is_polled:
            self._awaited.append((time.monotonic(), request))

    def expect_ack_of_dead(self, request: CompletedDelivery) -> None:
        """Likewise, and its child died or is dying."""
        if self.is_polled:
            self._dead.append((time.monotonic(), request))

    def mark(self, request: CompletedDelivery) -> None:
        """Its end is stored and its acknowledgement was not heard: mark it, now or as soon as the store takes it.

        Never raises, because Celery's event loop would end with it. That may end with this very step, so the first try
        is made here; but none while the store is away, for whose timeout the loop would stand still each time.
        """
        if (name := request.dlock_lock) is None:
            return
        whose = f"{request.task.name}[{request.id}]"
        end = CompletedRun(request.dlock_started_at, name, request.dlock_identity.digest, request.dlock_owner, whose)
        with native.background():  # a log handler that raises must not end the event loop either
            self._wait(*([end] if self._failing else self._written([end])))

    def mark_soon(self, end: CompletedRun) -> None:
        """Mark this at the next look."""
        self._wait(end)

    def _wait(self, *ends: CompletedRun) -> None:
        self._unmarked += ends
        while len(self._unmarked) > MOST:
            given_up = self._unmarked.popleft().whose
            logger.error("%s has ended, and may run again: the store has not taken its mark", given_up)

    def look(self) -> None:
        """Mark what was left, and those whose acknowledgement was not tried.

        Kombu's event loop forgets what else was to be done in the round in which it breaks.
        """
        self._look_at_awaited()
        self._look_at_dead()
        if self._unmarked and not self._resting:
            self._unmarked += self._written(list(_taken(self._unmarked)))

    def connection_broke(self) -> None:
        """Mark all whose acknowledgement is on its way: it will not be heard.

        To be called before the channel is closed. With that the broker has the messages back, and whoever waits for one
        runs it before anybody looks here.
        """
        self._runtime.disconnected_at = time.monotonic()
        for _, request in _taken(self._awaited):
            if not request.message.acknowledged and not request.dlock_ack_lost:
                self.mark(request)

    def _look_at_awaited(self) -> None:
        for since, request in _taken(self._awaited):
            if request.message.acknowledged or request.dlock_ack_lost:
                continue  # it was tried; whoever finds it unheard marks it
            if _is_given_up(request, since):
                self.mark(request)
            else:
                self._awaited.append((since, request))

    def _look_at_dead(self) -> None:
        for since, request in _taken(self._dead):
            if request.message.acknowledged and not request.dlock_ack_lost:
                continue
            if _is_given_up(request, since) and self._died_holding(request.dlock_owner):
                request.dlock_end_stored = True
                self.mark(request)
            elif time.monotonic() - since < FREED_WITHIN:
                self._dead.append((since, request))

    @property
    def _resting(self) -> bool:
        return time.monotonic() < self._rests_until

    def _written(self, ends: list[CompletedRun]) -> list[CompletedRun]:
        """Those that are left, because the store did not take one."""
        done = 0
        try:
            # One of its own: the event loop and the thread that looks may be here at once.
            store = self._runtime.store(KEEPER_TIMEOUT)
            try:
                # Opens the connection: what that takes must not look like a part of the mark's way, by which it comes
                # later than the message that it tells of.
                store.inspect(ends[0].name)
                for end in ends:
                    age_us = max(0, round((time.monotonic() - end.dated) * 1e6))
                    store.mark_done(end.name, end.identity, end.owner, age_us)
                    done += 1
            finally:
                store.close()
        except Exception as error:  # noqa: BLE001  # no file left to open, say: whatever it is, the mark is tried again
            left = ends[done:]
            if left and not self._failing:
                logger.warning("cannot mark %s as done yet: %s", left[0].whose, error)
            self._failing = True
            self._rests_until = time.monotonic() + REST
            # The refused one goes behind the others: it must not stand in their way for ever.
            return [*left[1:], *left[:1]]
        self._failing = False
        return []
