"""Several independent servers, asked at once; nobody waits for more answers than decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from ...errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreQuarantined, StoreRefused, StoreUnavailable
from ...utils.clock import Clock
from ...utils.rng import rng
from . import voting as votes
from .fanout import FanOut, PendingReplies
from .member import Member, QuorumMember

__all__ = ["Quorum", "answers_of"]

T = TypeVar("T")

#: Those who have not answered are waited for so many times as long as the majority took, or for `settle` s.
SETTLE_TIMES: Final = 2.0


class Quorum:
    """The servers of a Redlock.

    Args:
        nodes: The servers.
        timeout: Seconds that a command to one may take.
        clock: Monotonic.
    """

    def __init__(self, nodes: Sequence[QuorumMember], timeout: float, clock: Clock) -> None:
        self.all: Final = tuple(nodes)
        self.most: Final = votes.majority_of(len(nodes))
        self.clock: Final = clock
        self._timeout = timeout
        self._crew = FanOut()

    def ask(
        self,
        call: Callable[[QuorumMember], Any],
        enough: Callable[[Mapping[int, Any]], bool] = lambda heard: False,
        within: float | None = None,
        places: Collection[int] | None = None,
        *,
        vote: PendingReplies | None = None,
        late: Callable[[QuorumMember, Any], None] = lambda node, answer: None,
        resting: Callable[[QuorumMember], None] = lambda node: None,
        settle: float | None = None,
    ) -> Mapping[int, Any]:
        """What the servers answer to a call, an exception as a value; nothing of one that was not waited for.

        Args:
            call: Made to all at once.
            enough: Called with what was heard: does that decide? Without it, all are waited for.
            within: Seconds to wait at most; None: as long as a command may take.
            places: The numbers of those who are asked; None: all.
            vote: Where the answers are told.
            late: Called with each server and its answer, also where nobody waits any more.
            resting: Called with each that is not asked: only where the others cannot make a majority it is, at once.
            settle: Seconds that the others are waited for, once a majority has answered and that does not decide.
        """
        question = vote or PendingReplies()
        asked = list(range(len(self.all))) if places is None else list(places)
        left_out = [place for place in asked if self.all[place].skipped()]
        if len(asked) - len(left_out) < self.most:
            left_out = []  # without them nothing can be decided
        for place in left_out:
            question.tell(place, StoreUnavailable("it was not asked: it did not answer a moment ago"))

        not_begun: list[int] = []

        def begin(places: Sequence[int]) -> None:
            not_begun.extend(self._begin(question, places, call, late))

        patience = _Patience(self, within if within is not None else self._timeout, settle, len(asked), enough)

        def seconds(heard: Mapping[int, Any]) -> float:
            if left_out and _errors(heard) > len(self.all) - self.most:
                question.forget(left_out)
                begin(left_out)
                left_out.clear()
            return patience.left(heard)

        try:
            begin([place for place in asked if place not in left_out])
            return _checked(dict(question.wait(seconds)))
        finally:
            question.over = True
            for place in left_out + not_begun:
                resting(self.all[place])

    def _begin(
        self,
        question: PendingReplies,
        places: Sequence[int],
        call: Callable[[QuorumMember], Any],
        late: Callable[[QuorumMember, Any], None],
    ) -> list[int]:
        """Ask these servers; return those that no thread could be started for."""
        calls = [functools.partial(self.all[place].ask, question, place, call, late) for place in places]
        not_begun = self._crew.begin(calls)
        for index, error in not_begun.items():
            question.tell(places[index], StoreUnavailable(f"it was not asked: {error}"))
        return [places[index] for index in not_begun]

    @property
    def busy(self) -> bool:
        """A call has not come to its end."""
        return self._crew.busy

    def most_of(self, call: Callable[[QuorumMember], T]) -> list[T]:
        """The answers of a majority at least.

        Raises:
            StoreUnavailable: There is none.
        """
        return self._those(self.ask(call, self.majority_answered))

    def all_of(self, call: Callable[[QuorumMember], T]) -> list[T]:
        """As many answers as come, because who does not hear of it may speak against the others later.

        Raises:
            StoreUnavailable: They are no majority.
        """
        return self._those(self.ask(call))

    def _those(self, heard: Mapping[int, Any]) -> list[Any]:
        if not self.majority_answered(heard):
            raise self.no_majority(heard, sure=False)
        return answers_of(heard)

    def majority_answered(self, heard: Mapping[int, Any]) -> bool:
        return len(answers_of(heard)) >= self.most

    def silent(self, heard: Mapping[int, Any]) -> tuple[str, ...]:
        """Who did not answer, and why."""
        return tuple(
            f"{node.name}: {_why(heard.get(place))}"
            for place, node in enumerate(self.all)
            if place not in heard or isinstance(heard[place], Exception)
        )

    def no_majority(self, heard: Mapping[int, Any], *, sure: bool = True) -> StoreUnavailable:
        """The error for a call of which too few answers came.

        Args:
            heard: What was heard.
            sure: It is known that no server carried it out, or that all who did have taken it back.
        """
        errors = [one for one in heard.values() if isinstance(one, Exception)]
        waiting = sorted((one for one in errors if isinstance(one, StoreQuarantined)), key=lambda one: one.seconds)
        missing = self.most - len(answers_of(heard))
        if sure and 0 < missing <= len(waiting):
            return waiting[missing - 1]  # then a majority will be there again
        why = "; ".join(self.silent(heard)) or "they do not agree"
        said = f"the lock store did not answer: no majority of its {len(self.all)} servers: {why}"
        if sum(isinstance(one, StoreRefused) for one in errors) > len(self.all) - self.most:
            return StoreRefused(said)
        if not sure:
            return ReplyTimeout(said) if len(heard) < len(self.all) else ReplyLost(said)
        return StoreNotReady(said) if any(isinstance(one, StoreNotReady) for one in errors) else StoreUnavailable(said)

    def by_health(self) -> list[Member]:
        """Their stores in any order, but those that did not answer a moment ago come last."""
        return [node.store for node in sorted(rng.sample(self.all, len(self.all)), key=lambda node: node.unhealthy)]


class _Patience:
    """How long answers are waited for; the arguments as of :meth:`Quorum.ask`."""

    def __init__(
        self,
        nodes: Quorum,
        within: float,
        settle: float | None,
        asked: int,
        enough: Callable[[Mapping[int, Any]], bool],
    ) -> None:
        self._nodes = nodes
        self._settle = settle
        self._asked = asked
        self._enough = enough
        self._began = nodes.clock.monotonic()
        self._end = self._began + within

    def left(self, heard: Mapping[int, Any]) -> float:
        if len(heard) >= self._asked or self._enough(heard):
            return 0.0
        now = self._nodes.clock.monotonic()
        if self._settle is not None and self._nodes.majority_answered(heard):
            self._end = min(self._end, now + max(self._settle, SETTLE_TIMES * (now - self._began)))
            self._settle = None
        return self._end - now


def _errors(heard: Mapping[int, Any]) -> int:
    return len(heard) - len(answers_of(heard))


def answers_of(heard: Mapping[int, Any]) -> list[Any]:
    """What was answered by those who carried the call out."""
    return [answer for answer in heard.values() if not isinstance(answer, Exception)]


def _checked(heard: Mapping[int, Any]) -> Mapping[int, Any]:
    """Raises what is no matter of the store."""
    for answer in heard.values():
        if isinstance(answer, Exception) and not isinstance(answer, StoreUnavailable):
            raise answer
    return heard


def _why(answer: object) -> str:
    return "no answer in time" if answer is None else str(answer).removeprefix("the lock store ")
