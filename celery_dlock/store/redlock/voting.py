"""The replies of independent servers, combined into one. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar

from ..holder_model import Holder
from ..model import Acquired, Duplicate, Held, Refusal, Tombstoned, Unknown, Used
from ..operator_model import RunView

__all__ = ["NoMajority", "Outcome", "agreed_seed", "best_known", "majority_holder", "majority_of", "outcome", "renewed"]

T = TypeVar("T")

#: Refusals that one server alone can decide, because a majority wrote their mark. The majority certain comes first.
_FACTS = (Duplicate, Used, Unknown)
_STATES = ("used", "running", "unknown")


class NoMajority(NamedTuple):
    """No owner got a majority of the servers."""


Outcome: TypeAlias = Acquired | Refusal | NoMajority


def majority_of(servers: int) -> int:
    """Return the size of a majority. Any two majorities have a server in common."""
    return servers // 2 + 1


def outcome(answers: Collection[Acquired | Refusal], pending: int, servers: int) -> Outcome | None:
    """Return the outcome of an acquire, or None while the pending replies can still decide it.

    Done marks and run marks are written to a majority. So in every majority, at least one server has them.

    A conflict with a holder needs a majority that names the same holder. A lock on a minority may be left over from an
    owner that lost its vote and died. That lock must not make other calls skip.

    Tombstones on a majority are final: this acquisition can win no more. Tombstones on a minority leave it a majority.

    Args:
        answers: Replies of the servers that answered.
        pending: Number of servers that may still answer.
        servers: Number of all servers.
    """
    majority = majority_of(servers)
    # If one server has two names, both votes have the same token and the same time: count one vote. Equal tokens alone
    # prove nothing: a server whose clock is behind its last token issues the next number, as another server may.
    won = list({(answer.token, answer.since): answer for answer in answers if isinstance(answer, Acquired)}.values())
    if len(won) >= majority:
        return max(won)._replace(
            rank_us=max(one.rank_us for one in won),
            seed=max((one.seed for one in won), key=_agreement_token),
            after_crash=any(one.after_crash for one in won),
        )
    abandoned = sum(isinstance(answer, Tombstoned) for answer in answers)
    if abandoned >= majority:
        return Tombstoned()
    if len(answers) >= majority:
        for kind in _FACTS:
            if facts := [answer for answer in answers if isinstance(answer, kind)]:
                return facts[0]
    refused = [answer for answer in answers if isinstance(answer, Held)]
    holder, named = majority_holder([answer.holder for answer in refused])
    if holder is not None and named >= majority:
        return Held(holder, any(one.same_message for one in refused), max(one.rank_us or 0 for one in refused))
    if pending and (len(answers) < majority or max(len(won), named, abandoned) + pending >= majority):
        return None
    return NoMajority()


def majority_holder(holders: Iterable[Holder]) -> tuple[Holder | None, int]:
    """Return the holder that the most servers name, and the number of these servers."""
    found = list(holders)
    counted = Counter(map(_holder_key, found))
    if not counted:
        return None, 0
    key, count = counted.most_common(1)[0]
    same = [one for one in found if _holder_key(one) == key]
    # A majority has the agreed token. A server that acquired late still has its own token, which is higher.
    tokens = Counter(one.token for one in same)
    elected = min(same, key=lambda one: (-tokens[one.token], one.token or 0))
    life = max(one.expires_in for one in same)
    return replace(elected, expires_in=life, releasing=any(one.releasing for one in same)), count


def renewed(answers: Sequence[bool | None], servers: int) -> bool | None:
    """Return whether a majority renewed a lease, or None if no majority agrees."""
    if answers.count(True) >= majority_of(servers):
        return True
    return False if answers.count(False) >= majority_of(servers) else None


def best_known(uses: Iterable[RunView | None]) -> RunView | None:
    """Return the state of a name's last run. One server that has it is enough."""
    known = [use for use in uses if use is not None]
    return min(known, key=lambda use: _STATES.index(use.state), default=None)


def agreed_seed(seed: str, token: int) -> tuple[str, str]:
    """Return the seed of a run, and the text to write to a majority: this agreement's token and the seed.

    As in Paxos, a seed that a majority may have accepted is proposed again. Of several seeds, it is the one that was
    accepted last.

    The tokens order the agreements, because a majority confirms a token before its seed is written. A later owner has a
    higher token, and its acquire found every seed that a majority had accepted before.

    A seed without a token comes from a single server, in a vote that was lost. No run has used it.

    Args:
        seed: Seed that :func:`outcome` chose.
        token: Token of this agreement.
    """
    _, agreed, earlier = seed.rpartition("/")
    value = (agreed and earlier) or str(token)
    return value, f"{token}/{value}"


def _agreement_token(seed: str) -> int:
    token, slash, _ = seed.partition("/")
    return int(token) if slash else 0


def _holder_key(holder: Holder) -> tuple[str, str, str]:
    return holder.owner, holder.identity, holder.kind
