"""One of several independent servers: asked, left in peace while it does not answer, and told later what it missed."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ...errors import ReplyLost, ReplyTimeout, StoreQuarantined, StoreRefused, StoreUnavailable
from ...keys.lock_name import LockName
from ...utils.clock import Clock
from ...utils.log import logger
from ..base import QueueStore, ReleaseRequest, call_again_if_reply_lost
from ..circuit_breaker import CircuitBreaker
from ..model import Acquired, AcquireRequest, Refusal, Released, Renewal
from .fanout import PendingReplies

__all__ = ["Member", "QuorumMember"]

#: Seconds that one is not asked that did not answer; and one that let nobody in, which costs less.
REST, SHORT_REST = 1.0, 0.25
#: Calls to it that nobody waits for any more, from which on it is not asked either: each has a thread and a connection.
MOST_LEFT: Final = 4
#: Releases that it missed and that are remembered, so many seconds: longer than a command lingers in a stopped server.
MOST_OWED, OWED_FOR = 1000, 600.0


class Member(QueueStore, Protocol):
    """A store of one server that can take part in votes."""

    def agree(self, name: LockName, acquisition: str, token: int, seed: str = "", tick: str = "") -> bool:
        """Take over the token (and the seed) of a vote that was won; false if the lock is another's here."""
        ...


class QuorumMember:
    """One server of a Redlock.

    Args:
        store: On this server alone.
        name: As it is shown to people.
        clock: Monotonic.
        timeout: Seconds that a command may take.
    """

    def __init__(self, store: Member, name: str, clock: Clock, timeout: float) -> None:
        self.store = store
        self.name = name
        self._clock = clock
        self._breaker = CircuitBreaker([0, 0], clock, REST, timeout)
        # A dict's own steps are atomic; what iterates takes a copy first.
        self._out: dict[PendingReplies, None] = {}
        self._away_until = 0.0
        self._refused = False
        #: Acquisitions of which it is not known whether they have reached it, or may yet.
        self._unheard: dict[str, None] = {}
        self._owed: collections.deque[tuple[float, LockName, str, ReleaseRequest]] = collections.deque(maxlen=MOST_OWED)

    @property
    def unhealthy(self) -> bool:
        """It keeps somebody waiting, or has for too long."""
        return self._breaker.open or self._left() > 0

    def skipped(self) -> bool:
        """It did not answer a moment ago, and is not to be asked just now."""
        if self._left() >= MOST_LEFT or self._clock.monotonic() < self._away_until:
            return True
        try:
            self._breaker.before_call()
        except StoreUnavailable:
            return True
        return False

    def ask(
        self,
        question: PendingReplies,
        place: int,
        call: Callable[[QuorumMember], Any],
        late: Callable[[QuorumMember, Any], None],
    ) -> None:
        """Make a call to it and tell its answer, an exception as a value; it never raises.

        Args:
            question: Whose answer it is.
            place: Under which number it is told.
            call: Called with this node.
            late: Called with the node and its answer, once that was told.
        """
        # In its own thread: whoever asks may be interrupted between any two steps.
        self._out[question] = None
        answer: Any
        try:
            answer = self._breaker.call(call, self)
        except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
            answer = error
            if type(error) is StoreUnavailable:
                self._away_until = self._clock.monotonic() + SHORT_REST
        question.tell(place, answer)
        self._tell(answer)
        try:
            late(self, answer)
            if not isinstance(answer, Exception):
                self._flush_releases()
        except StoreUnavailable:
            pass  # it is owed again
        finally:
            self._out.pop(question, None)

    def _tell(self, answer: Any) -> None:
        """The others make up for a server that refuses, and it does not pass by itself."""
        if isinstance(answer, StoreRefused) and not self._refused:
            self._refused = True
            logger.warning("a server of the lock store refuses: %s: %s", self.name, answer)

    def expect(self, acquisition: str) -> None:
        """Its acquire is about to be sent. Said before any thread has it: the release may come to another one first."""
        self._unheard[acquisition] = None
        if len(self._unheard) > MOST_OWED:
            # Whoever hears of no answer leaves the release to a keeper, which is another store.
            self._unheard.pop(next(iter(list(self._unheard))), None)

    def unexpect(self, acquisition: str) -> None:
        """It was not sent after all."""
        self._unheard.pop(acquisition, None)

    def _left(self) -> int:
        """Calls to it that nobody waits for any more."""
        return sum(one.over for one in list(self._out))

    def acquire(
        self, name: LockName, acquisition: str, ttl_ms: int, claim: AcquireRequest, undone: ReleaseRequest
    ) -> Acquired | Refusal:
        """Take the lock here, with a second try where the connection was cut, by an idle limit or a restart.

        Args:
            name: Of the lock.
            acquisition: Safe to be sent twice: the script finds its own lock.
            ttl_ms: Of the lease, in milliseconds.
            claim: What the store needs to know.
            undone: How the acquisition ends if its first command is carried out after the second was refused.
        """
        try:
            answer = self.store.acquire(name, acquisition, ttl_ms, claim)
        except ReplyTimeout:
            raise
        except ReplyLost:
            answer = self._acquire_again(name, acquisition, ttl_ms, claim)
            if not isinstance(answer, Acquired):
                self.queue_release(name, acquisition, undone)
            # It stays expected: its release leaves a tombstone, because the first command may still arrive.
            return answer
        except StoreUnavailable:
            self.unexpect(acquisition)
            raise
        self.unexpect(acquisition)
        return answer

    def _acquire_again(
        self, name: LockName, acquisition: str, ttl_ms: int, claim: AcquireRequest
    ) -> Acquired | Refusal:
        try:
            return self.store.acquire(name, acquisition, ttl_ms, claim)
        except (ReplyLost, StoreQuarantined):
            raise
        except StoreUnavailable as error:
            raise ReplyLost(str(error)) from error  # the first command may have been carried out

    def renew(self, renewals: Sequence[Renewal], within: float | None) -> list[bool | None]:
        """Renew leases here, with a second try where the connection was cut."""
        return call_again_if_reply_lost(self.store.renew, renewals, within)

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        # Its acquire may still be on its way, and be overtaken.
        if acquisition in self._unheard:
            ending = ending._replace(outcome_unknown=True)
        try:
            released = self.store.release(name, acquisition, ending)
        except StoreUnavailable:
            self.queue_release(name, acquisition, ending)
            raise
        self._unheard.pop(acquisition, None)
        return released

    def queue_release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> None:
        """Remember that it has not heard of this end.

        What it will be told is that the acquisition is over, and no more: a majority knows what became of it, and a
        mark that is set late would live too long.
        """
        ending = ending._replace(outcome_unknown=True, final=False, used_ms=0, reserved_for="", heir_ms=0)
        self._owed.append((self._clock.monotonic() + OWED_FOR, name, acquisition, ending))

    def _flush_releases(self) -> None:
        while self._owed:
            try:
                until, name, acquisition, ending = self._owed.popleft()
            except IndexError:
                return  # another thread took it
            if self._clock.monotonic() < until:
                self.release(name, acquisition, ending)
