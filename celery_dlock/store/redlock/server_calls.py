"""Concurrent calls to several independent servers. A call waits for no more replies than it needs to decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from ...errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreQuarantined, StoreRefused, StoreUnavailable
from ...utils.clock import Clock
from .call_threads import CallThreads, PendingReplies
from .member import Member, MemberServer
from .voting import majority_of

__all__ = ["Servers", "successful"]

T = TypeVar("T")

#: For calls with `settle`. If a majority has replied and the replies decide nothing yet, the call waits for the other
#: servers. It waits at most this many times as long as the majority took, or `settle` seconds if that is more.
SETTLE_TIMES: Final = 2.0


class Servers:
    """The servers of a Redlock.

    In this class, ``replies`` maps the index of a server to its reply. An exception is a reply too.

    Args:
        members: The servers.
        timeout: Seconds that a command to one server may take.
        clock: Monotonic clock.
    """

    def __init__(self, members: Sequence[MemberServer], timeout: float, clock: Clock) -> None:
        self.members: Final = tuple(members)
        self.majority: Final = majority_of(len(members))
        self.clock: Final = clock
        self._timeout = timeout
        self._threads = CallThreads()

    def ask(
        self,
        call: Callable[[MemberServer], Any],
        enough: Callable[[Mapping[int, Any]], bool] = lambda replies: False,
        within: float | None = None,
        indexes: Collection[int] | None = None,
        *,
        pending: PendingReplies | None = None,
        on_reply: Callable[[MemberServer, Any], None] = lambda member, reply: None,
        on_skipped: Callable[[MemberServer], None] = lambda member: None,
        settle: float | None = None,
    ) -> Mapping[int, Any]:
        """Make a call to all servers at once, and return the replies that arrived in time.

        Args:
            call: Called with each server.
            enough: Returns whether the replies decide the call. By default, the call waits for all servers.
            within: Seconds to wait at most; None: as long as a command may take.
            indexes: Servers to call; None: all.
            pending: Receives the replies; None: the call makes its own.
            on_reply: Called with each server and its reply, also after the caller has gone on.
            on_skipped: Called with each server to which the call was not sent. A server that did not answer a moment
                ago is skipped, unless the other servers cannot make a majority without it.
            settle: Seconds to wait at most for the other servers after a majority has replied without a decision. After
                a slow majority, :data:`SETTLE_TIMES` allows more. None: wait until ``within`` is over.
        """
        pending = pending or PendingReplies()
        chosen = list(range(len(self.members))) if indexes is None else list(indexes)
        skipped = [index for index in chosen if self.members[index].skipped()]
        if len(chosen) - len(skipped) < self.majority:
            skipped = []  # the other servers are no majority
        for index in skipped:
            pending.put(index, StoreUnavailable("it was not asked: it did not answer a moment ago"))

        not_started: list[int] = []

        def start(indexes: Sequence[int]) -> None:
            not_started.extend(self._start(pending, indexes, call, on_reply))

        deadline = _Deadline(self, within if within is not None else self._timeout, settle, len(chosen), enough)

        def seconds(replies: Mapping[int, Any]) -> float:
            if skipped and _errors(replies) > len(self.members) - self.majority:
                pending.forget(skipped)
                start(skipped)
                skipped.clear()
            return deadline.seconds_left(replies)

        try:
            start([index for index in chosen if index not in skipped])
            return _raise_foreign_errors(dict(pending.wait(seconds)))
        finally:
            pending.over = True
            for index in skipped + not_started:
                on_skipped(self.members[index])

    def _start(
        self,
        pending: PendingReplies,
        indexes: Sequence[int],
        call: Callable[[MemberServer], Any],
        on_reply: Callable[[MemberServer, Any], None],
    ) -> list[int]:
        """Start the calls to these servers. Return the servers for which no thread could be started."""
        calls = [functools.partial(self.members[index].ask, pending, index, call, on_reply) for index in indexes]
        failures = self._threads.start(calls)
        for position, error in failures.items():
            pending.put(indexes[position], StoreUnavailable(f"it was not asked: {error}"))
        return [indexes[position] for position in failures]

    @property
    def busy(self) -> bool:
        """Whether a call is still running."""
        return self._threads.busy

    def majority_results(self, call: Callable[[MemberServer], T]) -> list[T]:
        """Return the results of at least a majority.

        Raises:
            StoreUnavailable: No majority answered.
        """
        return self._require_majority(self.ask(call, self.has_majority))

    def all_results(self, call: Callable[[MemberServer], T]) -> list[T]:
        """Return the results of all servers that answer. Use this for changes that should reach every server.

        For example, a run mark counts if any server has it: one server that missed its deletion would bring it back.

        Raises:
            StoreUnavailable: No majority answered.
        """
        return self._require_majority(self.ask(call))

    def _require_majority(self, replies: Mapping[int, Any]) -> list[Any]:
        if not self.has_majority(replies):
            raise self.no_majority(replies, no_effect=False)
        return successful(replies)

    def has_majority(self, replies: Mapping[int, Any]) -> bool:
        return len(successful(replies)) >= self.majority

    def failures(self, replies: Mapping[int, Any]) -> tuple[str, ...]:
        """Return the name of each server without a result, and why it has none."""
        return tuple(
            f"{member.name}: {_reason(replies.get(index))}"
            for index, member in enumerate(self.members)
            if index not in replies or isinstance(replies[index], Exception)
        )

    def no_majority(self, replies: Mapping[int, Any], *, no_effect: bool = True) -> StoreUnavailable:
        """Return the exception for a call without a majority.

        Args:
            replies: The replies that arrived.
            no_effect: Whether no server executed the call, or each server that did has rolled it back.
        """
        errors = [reply for reply in replies.values() if isinstance(reply, Exception)]
        quarantined = sorted((one for one in errors if isinstance(one, StoreQuarantined)), key=lambda one: one.seconds)
        missing = self.majority - len(successful(replies))
        if no_effect and 0 < missing <= len(quarantined):
            return quarantined[missing - 1]  # when this quarantine ends, there is a majority again
        why = "; ".join(self.failures(replies)) or "the servers do not agree"
        text = f"the lock store did not answer: no majority of its {len(self.members)} servers: {why}"
        if sum(isinstance(one, StoreRefused) for one in errors) > len(self.members) - self.majority:
            return StoreRefused(text)
        if not no_effect:
            return ReplyTimeout(text) if len(replies) < len(self.members) else ReplyLost(text)
        return StoreNotReady(text) if any(isinstance(one, StoreNotReady) for one in errors) else StoreUnavailable(text)

    def by_health(self, first: int) -> list[Member]:
        """Return the servers' stores from index ``first`` on. The stores of unhealthy servers come last."""
        first %= len(self.members)
        rotated = self.members[first:] + self.members[:first]
        return [member.store for member in sorted(rotated, key=lambda member: member.unhealthy)]


class _Deadline:
    """The end of the wait for replies. The arguments are those of :meth:`Servers.ask`."""

    def __init__(
        self,
        servers: Servers,
        within: float,
        settle: float | None,
        called: int,
        enough: Callable[[Mapping[int, Any]], bool],
    ) -> None:
        self._servers = servers
        self._settle = settle
        self._called = called
        self._enough = enough
        self._began = servers.clock.monotonic()
        self._end = self._began + within

    def seconds_left(self, replies: Mapping[int, Any]) -> float:
        if len(replies) >= self._called or self._enough(replies):
            return 0.0
        now = self._servers.clock.monotonic()
        if self._settle is not None and self._servers.has_majority(replies):
            self._end = min(self._end, now + max(self._settle, SETTLE_TIMES * (now - self._began)))
            self._settle = None
        return self._end - now


def _errors(replies: Mapping[int, Any]) -> int:
    return len(replies) - len(successful(replies))


def successful(replies: Mapping[int, Any]) -> list[Any]:
    """Return the results of the servers that executed the call."""
    return [reply for reply in replies.values() if not isinstance(reply, Exception)]


def _raise_foreign_errors(replies: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return the replies. If one is an exception other than ``StoreUnavailable``, raise it."""
    for reply in replies.values():
        if isinstance(reply, Exception) and not isinstance(reply, StoreUnavailable):
            raise reply
    return replies


def _reason(reply: object) -> str:
    return "no answer in time" if reply is None else str(reply).removeprefix("the lock store ")
