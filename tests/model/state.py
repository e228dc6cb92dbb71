"""One lock name and all that is round it, as small immutable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

EVENTS = (
    "crash",
    "redeliver",
    "regrant",
    "requeue",
    "replace",
    "republish",
    "lease",
    "expiry",
    "revoke",
    "lock",
    "elsewhere",
    "away",
)
RULES = frozenset(
    [
        "final",
        "nest",
        "gen",
        "zrem",
        "stale",
        "end",
        "clear",
        "copy",
        "ahead",
        "rank",
        "turn",
        "hold",
        "due",
        "claim",
        "first",
    ]
)
NOW = 99
NEVER = -1
NOBODY = -1  # a plain Lock, a sweeper, a control command: no message
READY, LATER, LETTER = 0, 1, 2  # may be granted; not before; a dead letter
NEXT = 2  # the turn of a new grant: the one that stands is 1, and all before it are 0
SPARE = 10  # added to what a message needs: it may run again, for it crashed after its end
TOO_MANY = -SPARE


class Copy(NamedTuple):
    """A copy in the broker: f fresh, r redelivered, o published by us, p ours and redelivered.

    o and p carry a rank, and the turn for which they were published, or 0.
    """

    message: int
    kind: str
    rank: int
    turn: int = 0


class Run(NamedTuple):
    """A delivery. Its phase: begin, body, stale (in the body without the lock), parked, out, unwound.

    Its tie to the broker: yes (delivered again if this dies), moved (another delivery has it), acked.
    """

    message: int
    kind: str
    rank: int
    phase: str
    tie: str
    grant: Copy  # to be published by this process, before it acknowledges
    turn: int = 0


class Entry(NamedTuple):
    """A message in the store: waiting, granted (if the lock says so) or a dead letter."""

    rank: int
    tries: int  # turns that it lost since a copy of it came
    state: int
    began: bool = False  # it came while its message held the lock


class Lock(NamedTuple):
    """Free, own, dead (its holder is) or grant.

    The word of a holder: its release has to mark the identity done. Of a grant: it is known to be published.
    """

    state: str
    message: int
    word: bool
    turn: int = 0


class State(NamedTuple):
    """Everything there is; the last fields have one value for each message."""

    broker: tuple[Copy, ...]
    running: tuple[Run, ...]
    lock: Lock
    entries: tuple[Entry | None, ...]
    done: tuple[int, ...]
    need: tuple[int, ...]  # ends still owed to the publisher, or TOO_MANY
    revoked: tuple[bool, ...]
    budget: tuple[int, ...]


NOTHING = Copy(NOBODY, "", 0)
FREE = Lock("free", NOBODY, word=False)


@dataclass(frozen=True)
class Setup:
    """The space to explore: how many messages, which events how often, and the options of the task."""

    messages: int = 2
    events: tuple[tuple[str, int], ...] = ()
    early: bool = False
    rare: bool = True  # marks only where word was left, else always
    overflow: int = 0  # so many may wait: the latest; 0: no limit
    tries: int = 2
    without: frozenset[str] = field(default=frozenset())

    def has(self, rule: str) -> bool:
        return rule not in self.without


Step = tuple[str, State]
Granted = tuple[State, Copy]  # and what the caller's process has to publish


def put(values: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def with_entry(s: State, m: int, entry: Entry | None) -> State:
    return s._replace(entries=put(s.entries, m, entry))


def without(s: State, i: int) -> State:
    """Run i is over."""
    return s._replace(running=s.running[:i] + s.running[i + 1 :])


def spend(s: State, event: str) -> State:
    i = EVENTS.index(event)
    return s._replace(budget=put(s.budget, i, s.budget[i] - 1))


def left(s: State, event: str) -> int:
    return s.budget[EVENTS.index(event)]


def spent(s: State, event: str, setup: Setup) -> int:
    return dict(setup.events).get(event, 0) - left(s, event)


def helped(s: State, grant: Copy) -> State:
    """A process that granted without being a delivery still has to publish."""
    run = Run(NOBODY, "", 0, "out", "acked", grant)
    return s._replace(running=(*s.running, run)) if grant.message >= 0 else s
