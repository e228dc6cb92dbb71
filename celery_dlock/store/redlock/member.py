"""One of several independent servers: skipped while it does not answer. Releases that it missed are sent later."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ...errors import ReplyLost, ReplyTimeout, ScriptStopped, StoreQuarantined, StoreRefused, StoreUnavailable
from ...keys.lock_name import LockName
from ...utils.clock import Clock
from ...utils.log import logger
from ..base import LockStore, ReleaseRequest, call_again_if_reply_lost
from ..circuit_breaker import CircuitBreaker, ShardStates
from ..model import Acquired, AcquireRequest, Refusal, Released, Renewal, RenewalResult
from .call_threads import PendingReplies

__all__ = ["Member", "MemberServer"]

#: Seconds that a server is skipped: after a timeout, and after a failed connection, which costs less time.
SKIP_AFTER_TIMEOUT, SKIP_AFTER_FAILURE = 1.0, 0.25
#: With this many calls whose caller waits no longer, a server is skipped: each has a thread and a connection.
MAX_LATE_CALLS: Final = 4
#: Number of missed releases to remember, and for how many seconds: longer than a stopped server keeps a command.
MAX_QUEUED_RELEASES, QUEUED_RELEASE_LIFE = 1000, 600.0


class Member(LockStore, Protocol):
    """A store of one server that can take part in votes."""

    def adopt_token(
        self, name: LockName, acquisition: str, token: int, seed: str = "", tick: str = "", *, waited: bool = False
    ) -> bool:
        """Adopt the token (and the seed) of a won vote. Return False if the acquisition does not hold the lock here.

        With ``waited``, the release of the lock wakes a waiter.
        """
        ...


class MemberServer:
    """One server of a Redlock.

    Args:
        store: Store of this server alone.
        name: Name of the server, as logs and errors show it.
        clock: Monotonic clock.
        timeout: Seconds that a command may take.
    """

    def __init__(self, store: Member, name: str, clock: Clock, timeout: float) -> None:
        self.store = store
        self.name = name
        self._clock = clock
        self._breaker = CircuitBreaker(ShardStates([0], [0]), clock, SKIP_AFTER_TIMEOUT, timeout)
        # Each step on a dict is atomic. Code that iterates takes a copy first.
        self._pending: dict[PendingReplies, None] = {}
        self._skipped_until = 0.0
        self._refused = False
        #: Acquisitions whose acquire may have reached this server, or may still reach it.
        self._uncertain_acquires: dict[str, None] = {}
        self._queued_releases: collections.deque[tuple[float, LockName, str, ReleaseRequest]] = collections.deque(
            maxlen=MAX_QUEUED_RELEASES
        )

    @property
    def unhealthy(self) -> bool:
        """Whether the server timed out or refused a connection a moment ago."""
        return self._breaker.open or self._clock.monotonic() < self._skipped_until

    def skipped(self) -> bool:
        """Return whether to skip the server now, because it did not answer a moment ago."""
        if self._late_calls() >= MAX_LATE_CALLS or self._clock.monotonic() < self._skipped_until:
            return True
        try:
            self._breaker.before_call()
        except StoreUnavailable:
            return True
        return False

    def ask(
        self,
        pending: PendingReplies,
        index: int,
        call: Callable[[MemberServer], Any],
        on_reply: Callable[[MemberServer, Any], None],
    ) -> None:
        """Make a call and deliver its reply. An exception of the call is delivered as a value. Never raises.

        Args:
            pending: Receives the reply.
            index: Index of this server.
            call: Called with this member.
            on_reply: Called with this member and the reply, after the reply was delivered.
        """
        # In the thread of the call: an interrupted caller cannot leave an entry behind.
        self._pending[pending] = None
        reply: Any
        try:
            reply = self._breaker.call(call, self)
        except Exception as error:  # noqa: BLE001  # the waiting caller raises it
            reply = error
            if type(error) is StoreUnavailable:
                self._skipped_until = self._clock.monotonic() + SKIP_AFTER_FAILURE
        pending.put(index, reply)
        self._warn_once_if_refused(reply)
        try:
            on_reply(self, reply)
            if not isinstance(reply, Exception):
                self._flush_releases()
        except StoreUnavailable:
            pass  # the release is queued again
        finally:
            self._pending.pop(pending, None)

    def _warn_once_if_refused(self, reply: Any) -> None:
        """Log a refusal once. It lasts until the operator acts, and the other servers hide it."""
        if isinstance(reply, StoreRefused) and not self._refused:
            self._refused = True
            logger.warning("a server of the lock store refuses: %s: %s", self.name, reply)

    def expect_acquire(self, acquisition: str) -> None:
        """Record that an acquire is about to be sent.

        Call this before a thread has the acquire, because the release may reach the server first.
        """
        self._uncertain_acquires[acquisition] = None
        if len(self._uncertain_acquires) > MAX_QUEUED_RELEASES:
            # If no reply arrives, the watchdog releases the lease, and it has a store of its own.
            self._uncertain_acquires.pop(next(iter(list(self._uncertain_acquires))), None)

    def acquire_not_sent(self, acquisition: str) -> None:
        """Record that the acquire was not sent."""
        self._uncertain_acquires.pop(acquisition, None)

    def _late_calls(self) -> int:
        """Return the number of calls whose caller waits no longer."""
        return sum(one.over for one in list(self._pending))

    def acquire(
        self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest, rollback: ReleaseRequest
    ) -> Acquired | Refusal:
        """Acquire the lock on this server. If an idle limit or a restart cut the connection, try once more.

        Args:
            name: Lock name.
            acquisition: Owner and number. The script finds its own lock if it runs twice.
            ttl_ms: Milliseconds until the lease expires.
            request: The request.
            rollback: Release to send if the second command is refused, because the first may have been executed. Also
                sent if the script stopped in its middle.
        """
        try:
            answer = self.store.acquire(name, acquisition, ttl_ms, request)
        except ReplyTimeout:
            raise
        except ReplyLost:
            answer = self._acquire_again(name, acquisition, ttl_ms, request)
            if not isinstance(answer, Acquired):
                self.queue_release(name, acquisition, rollback)
            # It stays uncertain: its release leaves a tombstone, because the first command may still arrive.
            return answer
        except StoreUnavailable as error:
            self.acquire_not_sent(acquisition)
            if isinstance(error, ScriptStopped):  # it may have taken the lock
                self.queue_release(name, acquisition, rollback)
            raise
        self.acquire_not_sent(acquisition)
        return answer

    def _acquire_again(
        self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest
    ) -> Acquired | Refusal:
        try:
            return self.store.acquire(name, acquisition, ttl_ms, request)
        except (ReplyLost, StoreQuarantined):
            raise
        except StoreUnavailable as error:
            raise ReplyLost(str(error)) from error  # the first command may have been executed

    def renew(self, renewals: Sequence[Renewal], within: float | None) -> list[RenewalResult]:
        """Renew leases on this server. If the connection was cut, try once more."""
        return call_again_if_reply_lost(self.store.renew, renewals, within)

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        # The release may reach the server before its acquire does. Then the tombstone refuses the acquire.
        if acquisition in self._uncertain_acquires:
            ending = ending._replace(outcome_unknown=True)
        try:
            released = self.store.release(name, acquisition, ending)
        except StoreUnavailable:
            self.queue_release(name, acquisition, ending)
            raise
        self._uncertain_acquires.pop(acquisition, None)
        return released

    def queue_release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> None:
        """Remember a release that this server has missed.

        The late release only frees the lock and leaves a tombstone. A majority already has the marks of the run; here,
        a mark set late would live too long.
        """
        ending = ending._replace(outcome_unknown=True, final=False, used_ms=0, reserved_for="", reserved_ms=0)
        self._queued_releases.append((self._clock.monotonic() + QUEUED_RELEASE_LIFE, name, acquisition, ending))

    def _flush_releases(self) -> None:
        while self._queued_releases:
            try:
                until, name, acquisition, ending = self._queued_releases.popleft()
            except IndexError:
                return  # another thread took the last one
            if self._clock.monotonic() < until:
                self.release(name, acquisition, ending)
