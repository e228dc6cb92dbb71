"""Locks on several independent servers. A lock is held if a majority of the servers holds it (Redlock)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...errors import GuardRefused, ReplyLost, StoreRefused
from ...keys.lock_name import LockName
from ...utils.clock import Clock, SystemClock
from ...utils.rng import rng
from ..base import NO_GUARD, LockStore, ReleaseListener, ReleaseRequest
from ..holder_model import Holder
from ..model import Acquired, AcquireRequest, Contended, Refusal, Released, Renewal, RenewalResult
from ..operator_model import RunView
from ..server_model import StoreInfo
from . import voting
from .call_threads import PendingReplies
from .endpoint import SameServer
from .member import Member, MemberServer
from .server_calls import Servers, successful
from .voting import NoMajority, Outcome
from .wakeups import FailoverListener

__all__ = ["RedlockStore"]

#: A vote, and each agreement after it, takes at most this share of the ttl.
MAX_SHARE_OF_TTL: Final = 0.1
#: Seconds to wait for further servers after a majority has replied without agreeing.
SETTLE: Final = 0.05
#: Seconds to wait for further servers after a majority has confirmed a release. Until they release, they refuse the
#: next acquire.
RELEASE_SETTLE: Final = 0.01


#: The longest pause before each further vote, in seconds. Pauses are random: after different ones, one owner can get a
#: majority.
PAUSES: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5)


class RedlockStore(LockStore):
    """A store on several independent servers, without queues and claims.

    A call goes to all servers at once, and waits for no more replies than it needs to decide. If a vote is lost, the
    servers that acquired the lock release it. The caller does that, or the thread that receives a late reply. A server
    that does not answer is skipped for a moment, as long as the others are a majority.

    **Fencing tokens grow strictly.** Each server issues a token of its own. T is the highest token of a majority. It is
    written back to the servers where the acquisition still holds the lock (``adopt_token.lua``: last = max(last, T)).
    The lock counts as acquired only after a majority has confirmed that.

    Proof: let the majority WA confirm TA, the token of A. The majority MB grants the lock to a later B. WA and MB have
    a server n in common. A still held n when n adopted TA, and two owners cannot hold n at once. So B acquired n later.
    When n issued B's token, n's last token was at least TA. So B's token on n is higher than TA, and TB is at least
    that.

    **The lease** starts before the first request, and each server starts its ttl later. The lock client's margin (1 %
    and 2 ms) allows for clocks that run at different speeds. Vote and agreements take at most three tenths of the ttl.

    Args:
        members: A store for each server. An odd number, at least three.
        names: Names of the servers, as logs and errors show them.
        timeout: Seconds that a command to one server may take.
        clock: Monotonic clock.
    """

    def __init__(
        self, members: Sequence[Member], names: Sequence[str], *, timeout: float, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._servers = Servers(
            [MemberServer(*one, clock, timeout) for one in zip(members, names, strict=True)], timeout, clock
        )
        self._timeout = timeout
        #: All servers have reported their run id since the last time when one of them had two names.
        self._identities_checked = False

    # -- locks

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
        servers, vote, rollback = self._servers, PendingReplies(), _rollback_of(request)
        within = min(self._timeout, ttl_ms / 1000 * MAX_SHARE_OF_TTL)
        waited = request.waited
        if waited:
            # Only a vote that is won marks the lock (adopt_token). The rollback of a lost vote must wake no waiter, who
            # would vote and lose too.
            request = request._replace(waited=False)
        try:
            answer, replies = self._vote(vote, name, acquisition, ttl_ms, request, rollback, within)
            same_server = self._find_same_server(answer, replies, within)
            if isinstance(answer, Acquired) and not same_server:
                agreed = self._agree(name, acquisition, answer, request, within, replies, waited=waited)
                if agreed is not None:
                    return agreed
        except BaseException:
            vote.lost = True
            raise
        vote.lost = True
        replies = dict(vote.received())
        rolled_back = self._roll_back(name, acquisition, rollback, replies, within)
        if same_server:
            raise StoreRefused(f"the lock store refused: invalid dlock_url for Redlock: {same_server}")
        if isinstance(answer, Acquired) or not servers.has_majority(replies):
            # If the vote was won, the servers did not agree on the token.
            raise servers.no_majority(replies, no_effect=rolled_back and len(replies) == len(servers.members))
        if isinstance(answer, NoMajority):
            return Contended(tuple(rng.uniform(0.0, longest) for longest in PAUSES))
        return answer

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[RenewalResult]:
        servers = len(self._servers.members)

        def outcomes(replies: Mapping[int, Any]) -> list[RenewalResult]:
            lists = successful(replies)
            return [voting.renewed([one[index] for one in lists], servers) for index in range(len(renewals))]

        replies = self._servers.ask(
            lambda member: member.renew(renewals, within),
            lambda replies: None not in outcomes(replies),
            self._timeout if within is None else min(within, self._timeout),
        )
        renewed = outcomes(replies)
        if renewals and all(one is None for one in renewed):
            raise self._servers.no_majority(replies, no_effect=False)
        return renewed

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        replies = self._servers.ask(
            lambda member: member.release(name, acquisition, ending),
            settle=RELEASE_SETTLE,
            on_skipped=lambda member: member.queue_release(name, acquisition, ending),
        )
        results: list[Released] = successful(replies)
        if len(results) < self._servers.majority:
            raise self._servers.no_majority(replies, no_effect=False)
        lost = sum(not one.ours for one in results) >= self._servers.majority
        return Released(not lost, any(one.duplicate_seen for one in results), woke=any(one.woke for one in results))

    def shard(self, name: LockName) -> int:
        return 0

    def inspect(self, name: LockName) -> Holder | None:
        majority = self._servers.majority

        def named(replies: Mapping[int, Any]) -> tuple[Holder | None, int]:
            return voting.majority_holder(one for one in successful(replies) if one is not None)

        replies = self._servers.ask(
            lambda member: member.store.inspect(name),
            lambda replies: named(replies)[1] >= majority or successful(replies).count(None) >= majority,
            settle=SETTLE,
        )
        if not self._servers.has_majority(replies):
            raise self._servers.no_majority(replies)
        holder, count = named(replies)
        return holder if count >= majority else None

    def guard(self, name: LockName, acquisition: str, connection: Any, settles: ReleaseRequest | None = None) -> bool:
        raise GuardRefused(NO_GUARD)

    def release_listener(self, name: LockName) -> ReleaseListener:
        return FailoverListener(lambda: self._servers.by_health(name.bucket), name)

    def close(self) -> None:
        for member in self._servers.members:
            member.store.close()

    # -- last runs

    def last_run(self, name: LockName, tick: str = "") -> RunView | None:
        return voting.best_known(self._servers.majority_results(lambda member: member.store.last_run(name, tick)))

    def forget_run(self, name: LockName, tick: str = "", mark: str = "") -> bool:
        return any(self._servers.all_results(lambda member: member.store.forget_run(name, tick, mark)))

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "", mark: str = "") -> bool:
        def resolve(member: MemberServer) -> bool:
            return member.store.resolve_run(name, sent=sent, window_ms=window_ms, tick=tick, mark=mark)

        return any(self._servers.all_results(resolve))

    # -- workers, servers, and messages

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        self._servers.majority_results(lambda member: member.store.mark_done(name, identity, owner, age_us))

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        self._servers.majority_results(lambda member: member.store.save_worker_record(node, worker, text, life_ms))

    def worker_records(self, node: str) -> dict[str, str]:
        # Of each worker, take the longest record. An outdated one does no harm: its leases are released or expired.
        found: dict[str, str] = {}
        for records in self._servers.majority_results(lambda member: member.store.worker_records(node)):
            found.update((worker, text) for worker, text in records.items() if len(text) > len(found.get(worker, "")))
        return found

    def info(self) -> StoreInfo:
        replies = self._servers.ask(lambda member: member.store.info())
        infos: list[StoreInfo] = successful(replies)
        if len(infos) < self._servers.majority:
            raise self._servers.no_majority(replies)
        eviction = next((one.eviction for one in infos if one.eviction != "noeviction"), "noeviction")
        # A server with two names is reported as that, and not as one that did not answer.
        known = {index: "" if isinstance(one, SameServer) else one for index, one in replies.items()}
        silent = self._servers.failures(known)
        cure = next((one.durability_cure for one in infos if not one.durable), "")
        return StoreInfo(cure, eviction, silent, duplicate_servers=_same_server_text(replies))

    def _find_same_server(self, answer: Outcome, replies: Mapping[int, Any], within: float) -> str:
        """Return a text that names two names of one server, or "" if none are known or the lock was refused.

        Such a server has one vote, so a lock that was granted is safe. All servers are checked at the first vote that
        is won, and again while a server has two names.

        Args:
            answer: Outcome of the vote.
            replies: Replies of the vote.
            within: Seconds to wait for the servers, if they are checked.
        """
        if not isinstance(answer, Acquired | NoMajority):
            return ""
        found = _same_server_text(replies)
        if isinstance(answer, Acquired) and not found and not self._identities_checked:
            self._identities_checked = True
            found = _same_server_text(self._check_identities(within))
        if found:
            self._identities_checked = False
        return found

    def _check_identities(self, within: float) -> Mapping[int, Any]:
        """Let all servers report their run id. Wait no longer than for a vote, because the lease runs meanwhile."""

        def refused(replies: Mapping[int, Any]) -> bool:
            # If the servers forbid INFO, do not wait for one that hangs.
            return len(replies) >= self._servers.majority and not successful(replies)

        return self._servers.ask(lambda member: member.store.info(), refused, within, settle=SETTLE)

    # -- a vote

    def _vote(
        self,
        vote: PendingReplies,
        name: LockName,
        acquisition: str,
        ttl_ms: int,
        request: AcquireRequest,
        rollback: ReleaseRequest,
        within: float,
    ) -> tuple[Outcome, Mapping[int, Any]]:
        """Return the outcome of a vote, and the replies that decided it."""
        servers = len(self._servers.members)

        def outcome(replies: Mapping[int, Any]) -> Outcome | None:
            return voting.outcome(successful(replies), servers - len(replies), servers)

        def roll_back(member: MemberServer, reply: Any) -> None:
            if vote.lost and isinstance(reply, Acquired):
                member.release(name, acquisition, rollback)
            elif vote.lost and isinstance(reply, ReplyLost):
                member.queue_release(name, acquisition, rollback)  # the server may still execute the acquire

        for member in self._servers.members:
            member.expect_acquire(acquisition)
        replies = self._servers.ask(
            lambda member: member.acquire(name, acquisition, ttl_ms, request, rollback),
            lambda replies: outcome(replies) is not None,
            within,
            pending=vote,
            on_reply=roll_back,
            on_skipped=lambda member: member.acquire_not_sent(acquisition),
            settle=SETTLE,
        )
        answer = outcome(replies)
        # Not "or": an answer without fields is an empty tuple, which is false.
        return NoMajority() if answer is None else answer, replies

    def _agree(
        self,
        name: LockName,
        acquisition: str,
        won: Acquired,
        request: AcquireRequest,
        within: float,
        replies: Mapping[int, Any],
        *,
        waited: bool,
    ) -> Acquired | None:
        """Return the acquisition that a majority has confirmed, or None if none has."""
        # A server that has not replied yet may hold the lock by now.
        everyone = range(len(self._servers.members))
        holders = [index for index in everyone if index not in replies or isinstance(replies[index], Acquired)]

        def confirmed(seed: str = "") -> bool:
            def enough(replies: Mapping[int, Any]) -> bool:
                return successful(replies).count(True) >= self._servers.majority

            def agree(member: MemberServer) -> bool:
                return member.store.adopt_token(name, acquisition, won.token, seed, request.tick, waited=waited)

            return enough(self._servers.ask(agree, enough, within, holders))

        if not confirmed():
            return None
        if not request.once:
            return won
        seed, written = voting.agreed_seed(won.seed, won.token)
        return won._replace(seed=seed) if confirmed(written) else None

    def _roll_back(
        self, name: LockName, acquisition: str, rollback: ReleaseRequest, replies: Mapping[int, Any], within: float
    ) -> bool:
        """Release the lock on each server that has it, or may have it. Return whether all of them confirmed."""
        holders = [index for index, reply in replies.items() if isinstance(reply, Acquired | ReplyLost)]
        if not holders:
            return True
        released = self._servers.ask(
            lambda member: member.release(name, acquisition, rollback), within=within, indexes=holders
        )
        return len(successful(released)) == len(holders)


def _same_server_text(replies: Mapping[int, Any]) -> str:
    text = next((str(one) for _, one in sorted(replies.items()) if isinstance(one, SameServer)), "")
    return text.removeprefix("the lock store refused: ")


def _rollback_of(request: AcquireRequest) -> ReleaseRequest:
    """Return the release of an acquisition whose body has not started."""
    identity = request.identity.digest if request.identity else ""
    if not request.once:
        return ReleaseRequest(identity=identity, outcome_unknown=True, rolled_back=True)
    return ReleaseRequest(
        identity=identity,
        outcome_unknown=True,
        rolled_back=True,
        once=True,
        tick=request.tick,
        window_ms=request.run_mark_ms,
    )
