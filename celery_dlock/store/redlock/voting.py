"""What independent servers answered, as one answer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from ..model import Acquired, Duplicate, Held, Holder, LastRun, NoMajority, Refusal, Unknown, Used

__all__ = ["agreed_seed", "best_known", "majority_holder", "majority_of", "outcome", "renewed", "seed_of"]

T = TypeVar("T")

#: What is known of a name's end, the surest first: one server that knows it is enough.
_FACTS = (Duplicate, Used, Unknown)
_STATES = ("used", "running", "unknown")


def majority_of(servers: int) -> int:
    """How many of so many servers decide: of any two majorities one server is in both."""
    return servers // 2 + 1


def outcome(answers: Collection[Acquired | Refusal], pending: int, servers: int) -> Acquired | Refusal | None:
    """What became of an acquire; None while those who have not answered can still decide it.

    What was written down for good (an end, a use) was written to a majority, and so every majority has one that knows.
    A refusal because of a holder needs a majority that names the same one: what a minority holds may be the remnant of
    somebody who lost the vote and died, and that must not make everybody skip.

    Args:
        answers: Of those who answered.
        pending: How many may still answer.
        servers: All of them.
    """
    most = majority_of(servers)
    # One server under two names gives an acquisition one token and one time twice: that is one vote. The token alone
    # does not tell: servers whose clocks are behind their last token give the next one, and so the same.
    won = list({(answer.token, answer.since): answer for answer in answers if isinstance(answer, Acquired)}.values())
    if len(won) >= most:
        return max(won)._replace(
            rank_us=max(one.rank_us for one in won),
            seed=max((one.seed for one in won), key=_ballot),
            after_crash=any(one.after_crash for one in won),
        )
    if len(answers) >= most:
        for kind in _FACTS:
            if facts := [answer for answer in answers if isinstance(answer, kind)]:
                return facts[0]
    refused = [answer for answer in answers if isinstance(answer, Held)]
    holder, alike = majority_holder([answer.holder for answer in refused])
    if holder is not None and alike >= most:
        return Held(holder, any(one.same_message for one in refused), max(one.rank_us for one in refused))
    if pending and (len(answers) < most or max(len(won), alike) + pending >= most):
        return None
    return NoMajority()


def majority_holder(holders: Iterable[Holder]) -> tuple[Holder | None, int]:
    """Whom most of them name, and how many that are."""
    found = list(holders)
    counted = Counter(map(_who, found))
    if not counted:
        return None, 0
    who, count = counted.most_common(1)[0]
    same = [one for one in found if _who(one) == who]
    # Most have the token that they agreed on; one that came late has its own still, which is a later one.
    tokens = Counter(one.token for one in same)
    elected = min(same, key=lambda one: (-tokens[one.token], one.token or 0))
    life = max(one.expires_in for one in same)
    return replace(elected, expires_in=life, left=any(one.left for one in same)), count


def renewed(answers: Sequence[bool | None], servers: int) -> bool | None:
    """Was a lease renewed by a majority? None where no majority says either."""
    if answers.count(True) >= majority_of(servers):
        return True
    return False if answers.count(False) >= majority_of(servers) else None


def best_known(uses: Iterable[LastRun | None]) -> LastRun | None:
    """What became of a name's last run: one that knows is enough."""
    known = [use for use in uses if use is not None]
    return min(known, key=lambda use: _STATES.index(use.state), default=None)


def agreed_seed(seed: str, token: int) -> tuple[str, str]:
    """The seed of a run, and as it is to be written to a majority with the token of its agreement.

    As in Paxos a seed that a majority may have accepted is proposed again, of several the one that was accepted last.
    The tokens order the agreements, because each is confirmed by a majority before its seed is written: so whoever took
    the lock later has a higher one, and his acquire saw what a majority had accepted before. A seed without one was
    made by a server alone, in a vote that was lost; nobody has read it.

    Args:
        seed: As :func:`outcome` chose it.
        token: Of this agreement.
    """
    earlier = seed_of(seed) if "/" in seed else ""
    value = earlier or str(token)
    return value, f"{token}/{value}"


def seed_of(seed: str) -> str:
    """The seed alone."""
    return seed.rpartition("/")[2]


def _ballot(seed: str) -> int:
    token, slash, _ = seed.partition("/")
    return int(token) if slash else 0


def _who(holder: Holder) -> tuple[str, str, bool, bool]:
    return holder.owner, holder.identity, holder.kept, holder.retries
