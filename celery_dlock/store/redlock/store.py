"""Locks on several independent servers, held where a majority of them holds it (Redlock)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from ...errors import InvalidLockOptions, ReplyLost, StoreRefused
from ...keys.lock_name import LockName
from ...options.durability import PRIMARY, Durability
from ...utils.clock import Clock, SystemClock
from ..base import ReleaseListener, ReleaseRequest, StoreInfo
from ..model import Acquired, AcquireRequest, Holder, LastRun, NoMajority, Refusal, Released, Renewal
from . import voting as votes
from .endpoint import SameServer
from .fanout import PendingReplies
from .member import Member, QuorumMember
from .quorum import Quorum, answers_of
from .unsupported import QueuesUnsupported
from .wakeups import FailoverListener

__all__ = ["RedlockStore"]

#: A vote, and each agreement behind it, takes this part of the ttl at most.
PART_OF_TTL: Final = 0.1
#: Seconds that servers are waited for which can still make a majority of one mind.
SETTLE: Final = 0.05
#: ... and which have not confirmed a release: whoever comes next would meet them held.
FREE_SETTLE: Final = 0.01


class RedlockStore(QueuesUnsupported):
    """A majority of servers that know nothing of one another, as one store; without queues and claims.

    All are asked at once, and nobody waits for more than decides. What a server has taken for a vote that was lost is
    given back, by whoever asked or, where its answer comes late, by the thread that hears it. A server that does not
    answer is left in peace for a moment, as long as the others are a majority.

    **Fencing tokens grow strictly.** Each server mints its own; T, the highest of a majority, is written back
    (``adopt_token.lua``: last = max(last, T)) wherever the acquisition still holds the lock, and only once a majority
    has confirmed that is the lock anybody's. Let A's T be confirmed by a majority WA. A later B is given the lock by a
    majority MB. They have a server n in common. As A still held n at its agreement and two cannot hold n at once, B
    took n after it; so n's last was TA at least when n minted B's token, which is higher, and TB is that or more.

    **The lease** counts from before the first request, and each server counts its ttl from a later moment; the locker's
    margin (1 % and 2 ms) is the allowance for clocks that run unequally fast. Vote and agreements take three tenths of
    the ttl at most.

    Args:
        members: A store of each server. Three or more, an odd number.
        names: Of the servers, as they are shown to people.
        timeout: Seconds that a command to one may take.
        clock: Monotonic.
    """

    def __init__(
        self, members: Sequence[Member], names: Sequence[str], *, timeout: float, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._nodes = Quorum(
            [QuorumMember(*one, clock, timeout) for one in zip(members, names, strict=True)], timeout, clock
        )
        self._timeout = timeout
        #: All servers were asked who they are since one of them had two names.
        self._looked = False

    # -- locks

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, claim: AcquireRequest) -> Acquired | Refusal:
        if claim.place is not None:
            raise InvalidLockOptions("on_conflict='queue' is not allowed on several servers (Redlock)")
        nodes, vote, undone = self._nodes, PendingReplies(), _undone(claim)
        within = min(self._timeout, ttl_ms / 1000 * PART_OF_TTL)
        try:
            answer, heard = self._voted(vote, name, acquisition, ttl_ms, claim, undone, within)
            twins = self._one_server(answer, heard, within)
            if isinstance(answer, Acquired) and not twins:
                agreed = self._agreed(name, acquisition, answer, claim, within, heard)
                if agreed is not None:
                    return agreed
        except BaseException:
            vote.lost = True
            raise
        vote.lost = True
        heard = dict(vote.heard())
        sure = self._given_back(name, acquisition, undone, heard, within) and len(heard) == len(nodes.all)
        if twins:
            raise StoreRefused(f"the lock store refused: dlock_url is not allowed for Redlock: {twins}")
        if isinstance(answer, Acquired) or not nodes.majority_answered(heard):
            # In the first case it was won, until its servers should agree on the token.
            raise nodes.no_majority(heard, sure=sure)
        return answer

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[bool | None]:
        servers = len(self._nodes.all)

        def told(heard: Mapping[int, Any]) -> list[bool | None]:
            lists = answers_of(heard)
            return [votes.renewed([one[place] for one in lists], servers) for place in range(len(renewals))]

        heard = self._nodes.ask(
            lambda node: node.renew(renewals, within),
            lambda heard: None not in told(heard),
            self._timeout if within is None else min(within, self._timeout),
        )
        answers = told(heard)
        if renewals and all(answer is None for answer in answers):
            raise self._nodes.no_majority(heard, sure=False)
        return answers

    def release(
        self, name: LockName, acquisition: str, ending: ReleaseRequest, durability: Durability = PRIMARY
    ) -> Released:
        heard = self._nodes.ask(
            lambda node: node.release(name, acquisition, ending),
            settle=FREE_SETTLE,
            resting=lambda node: node.queue_release(name, acquisition, ending),
        )
        answers: list[Released] = answers_of(heard)
        if len(answers) < self._nodes.most:
            raise self._nodes.no_majority(heard, sure=False)
        lost = sum(not one.ours for one in answers) >= self._nodes.most
        return Released(not lost, any(one.duplicate_seen for one in answers))

    def shard(self, name: LockName) -> int:
        return 0

    def inspect(self, name: LockName) -> Holder | None:
        most = self._nodes.most

        def told(heard: Mapping[int, Any]) -> tuple[Holder | None, int]:
            return votes.majority_holder(one for one in answers_of(heard) if one is not None)

        heard = self._nodes.ask(
            lambda node: node.store.inspect(name),
            lambda heard: told(heard)[1] >= most or answers_of(heard).count(None) >= most,
            settle=SETTLE,
        )
        if not self._nodes.majority_answered(heard):
            raise self._nodes.no_majority(heard)
        holder, alike = told(heard)
        return holder if alike >= most else None

    def waker(self, name: LockName) -> AbstractContextManager[ReleaseListener]:
        return FailoverListener(self._nodes.by_health(), name)

    def close(self) -> None:
        for node in self._nodes.all:
            node.store.close()

    # -- names that were used

    def use(self, name: LockName, tick: str = "") -> LastRun | None:
        return votes.best_known(self._nodes.most_of(lambda node: node.store.use(name, tick)))

    def forget(self, name: LockName, tick: str = "") -> bool:
        return any(self._nodes.all_of(lambda node: node.store.forget(name, tick)))

    def resolve(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "") -> bool:
        def settle(node: QuorumMember) -> bool:
            return node.store.resolve(name, sent=sent, window_ms=window_ms, tick=tick)

        return any(self._nodes.all_of(settle))

    # -- workers, servers, and messages

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        self._nodes.most_of(lambda node: node.store.mark_done(name, identity, owner, age_us))

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        self._nodes.most_of(lambda member: member.store.save_worker_record(node, worker, text, life_ms))

    def worker_records(self, node: str) -> dict[str, str]:
        # Of each worker that which says most. An old one does no harm: what it names is gone, or is not held any more.
        found: dict[str, str] = {}
        for records in self._nodes.most_of(lambda member: member.store.worker_records(node)):
            found.update((worker, text) for worker, text in records.items() if len(text) > len(found.get(worker, "")))
        return found

    def facts(self) -> StoreInfo:
        heard = self._nodes.ask(lambda node: node.store.facts())
        told: list[StoreInfo] = answers_of(heard)
        if len(told) < self._nodes.most:
            raise self._nodes.no_majority(heard)
        eviction = next((one.eviction for one in told if one.eviction != "noeviction"), "noeviction")
        # A server under two names is told as that, and not as silent.
        silent = self._nodes.silent({p: "" if isinstance(one, SameServer) else one for p, one in heard.items()})
        return StoreInfo(all(one.durable for one in told), eviction, silent, twins=_twins(heard))

    def _one_server(self, answer: Acquired | Refusal, heard: Mapping[int, Any], within: float) -> str:
        """Return in words which two names lead to one server, where no other refused the lock; "" if none are known to.

        Such a server has one vote, so a lock that is granted all the same is safe. All are asked at the first vote that
        is won, and again while one has two names.

        Args:
            answer: The outcome of the vote.
            heard: What each server answered.
            within: Seconds to wait for the servers, if they are asked who they are.
        """
        if not isinstance(answer, Acquired | NoMajority):
            return ""
        twins = _twins(heard)
        if isinstance(answer, Acquired) and not twins and not self._looked:
            self._looked = True
            twins = _twins(self._asked_who_they_are(within))
        if twins:
            self._looked = False
        return twins

    def _asked_who_they_are(self, within: float) -> Mapping[int, Any]:
        """Ask all servers who they are, and wait no longer than for a vote: the lease runs meanwhile."""

        def refused(heard: Mapping[int, Any]) -> bool:
            # Where INFO is not allowed, a server that hangs would be waited for in vain.
            return len(heard) >= self._nodes.most and not answers_of(heard)

        return self._nodes.ask(lambda node: node.store.facts(), refused, within, settle=SETTLE)

    # -- a vote

    def _voted(
        self,
        vote: PendingReplies,
        name: LockName,
        acquisition: str,
        ttl_ms: int,
        claim: AcquireRequest,
        undone: ReleaseRequest,
        within: float,
    ) -> tuple[Acquired | Refusal, Mapping[int, Any]]:
        """Its outcome, and what was heard until then."""
        servers = len(self._nodes.all)

        def outcome(heard: Mapping[int, Any]) -> Acquired | Refusal | None:
            return votes.outcome(answers_of(heard), servers - len(heard), servers)

        def give_back(node: QuorumMember, answer: Any) -> None:
            if vote.lost and isinstance(answer, Acquired):
                node.release(name, acquisition, undone)
            elif vote.lost and isinstance(answer, ReplyLost):
                node.queue_release(name, acquisition, undone)  # it may take it yet

        for node in self._nodes.all:
            node.expect(acquisition)
        heard = self._nodes.ask(
            lambda node: node.acquire(name, acquisition, ttl_ms, claim, undone),
            lambda heard: outcome(heard) is not None,
            within,
            vote=vote,
            late=give_back,
            resting=lambda node: node.unexpect(acquisition),
            settle=SETTLE,
        )
        return outcome(heard) or NoMajority(), heard

    def _agreed(
        self,
        name: LockName,
        acquisition: str,
        won: Acquired,
        claim: AcquireRequest,
        within: float,
        heard: Mapping[int, Any],
    ) -> Acquired | None:
        """What a majority has confirmed; None if none has."""
        # Those who have not answered yet may hold it by now.
        takers = [p for p in range(len(self._nodes.all)) if p not in heard or isinstance(heard[p], Acquired)]

        def confirmed(seed: str = "") -> bool:
            def enough(said: Mapping[int, Any]) -> bool:
                return answers_of(said).count(True) >= self._nodes.most

            def agree(node: QuorumMember) -> bool:
                return node.store.agree(name, acquisition, won.token, seed, claim.tick)

            return enough(self._nodes.ask(agree, enough, within, takers))

        if not confirmed():
            return None
        if not claim.once:
            return won
        seed, written = votes.agreed_seed(won.seed, won.token)
        return won._replace(seed=seed) if confirmed(written) else None

    def _given_back(
        self, name: LockName, acquisition: str, undone: ReleaseRequest, heard: Mapping[int, Any], within: float
    ) -> bool:
        """Have all who took it, or may have, confirmed that it is over?"""
        takers = [place for place, one in heard.items() if isinstance(one, Acquired | ReplyLost)]
        if not takers:
            return True
        said = self._nodes.ask(lambda node: node.release(name, acquisition, undone), within=within, places=takers)
        return len(answers_of(said)) == len(takers)


def _twins(told: Mapping[int, Any]) -> str:
    said = next((str(one) for _, one in sorted(told.items()) if isinstance(one, SameServer)), "")
    return said.removeprefix("the lock store refused: ")


def _undone(claim: AcquireRequest) -> ReleaseRequest:
    """How an acquisition ends that is given back: its body has not begun."""
    identity = claim.identity.digest if claim.identity else ""
    if not claim.once:
        return ReleaseRequest(identity=identity, outcome_unknown=True)
    return ReleaseRequest(identity=identity, outcome_unknown=True, once=True, tick=claim.tick, window_ms=claim.begun_ms)
