"""The queue policy's hand-over for one lock name: what its scripts do, as pure steps over a small immutable state.

Every function here is one script of the store: it reads and writes the lock atomically. What happens round the lock
(broker, workers, crashes) is in `world`; `explore` tries every order of all of it.

A rank stands for server time. Only the order of ranks matters, so `NOW` is simply later than all others, and
`explore` counts them anew after each step. Each rule has a name; `Setup.without` leaves one out, which shows what it
is good for:

final   only an end that is acknowledged and stored marks the identity done; a requeued message must run again
nest    replace() makes a new identity
gen     a fresh copy is a duplicate only if its rank is not after the mark
zrem    whoever marks an identity done takes its waiting entry out and ends its grant; so nothing done ever waits, and
        the head can be granted without reading the marks of others
stale   an end that lost its lease marks done too
end     an end the store gives a waiter (revoked, expired, dropped) marks it done: copies of it may be on their way
clear   who starts takes an old mark of its identity away, and leaves word: a reused id is not done any more
carry   a copy that carries its rank is judged by that alone; the redelivered flag speaks for those without
twin    a waiting copy of the identity that holds is never ended: it may be all that is left when the holder dies
rank    the head is the lowest rank, and parking again restores the rank
entry   a mark is owed also for who was parked before: its copies live
hold    early acknowledgement is held back until the message is parked or holds
due     a sweep claims and publishes what none claimed, puts a grant not taken when due back among the waiters, and
        grants a free lock that has waiters
claim   a try is a claim by a process that will publish; nobody's grant is no try
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

RULES = frozenset(
    ["final", "nest", "gen", "zrem", "stale", "end", "clear", "carry", "twin", "rank", "entry", "hold", "due", "claim"]
)
NOW = 99
NEVER = -1
NOBODY = -1  # a plain Lock, a sweeper, a control command: no message
READY, LATER, LETTER = 0, 1, 2  # may be granted; not before; a dead letter
SPARE = 10  # added to what a message needs: it may run again, for it crashed after its end
TOO_MANY = -SPARE


class Copy(NamedTuple):
    """A copy in the broker: f fresh, r redelivered, o published by us, p ours and redelivered; o and p carry a rank."""

    message: int
    kind: str
    rank: int


class Run(NamedTuple):
    """A delivery. Its phase: begin, body, stale (in the body without the lock), parked, out, unwound.

    Its tie to the broker: yes (it comes back if this dies), moved (another delivery has it), acked.
    """

    message: int
    kind: str
    rank: int
    phase: str
    tie: str
    grant: Copy  # to be published by this process, before it acknowledges


class Entry(NamedTuple):
    """A message in the store: waiting, granted (if the lock says so) or a dead letter."""

    rank: int
    tries: int  # claims to publish its grant since a copy of it came
    state: int


class Lock(NamedTuple):
    """Free, own, dead (its holder is) or grant.

    The word of a holder: its release has to mark the identity done. Of a grant: a process claimed its publication.
    """

    state: str
    message: int
    word: bool


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
    """What to explore: how many messages, which events how often, and the options of the task."""

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
Granted = tuple[State, Copy]


def put(values: tuple[object, ...], index: int, value: object) -> tuple:  # type: ignore[type-arg]  # any of State's
    return (*values[:index], value, *values[index + 1 :])


def with_entry(s: State, m: int, entry: Entry | None) -> State:
    return s._replace(entries=put(s.entries, m, entry))


def marked(s: State, m: int, setup: Setup) -> State:
    """Done is set, and what waited or was granted under this identity is over: see `zrem`."""
    s = s._replace(done=put(s.done, m, NOW))
    return with_entry(s, m, None) if setup.has("zrem") else s


def ran(s: State, m: int) -> State:
    """An execution came to its end."""
    return s._replace(need=put(s.need, m, s.need[m] - bool(s.need[m] % SPARE)))


def ended(s: State, m: int) -> State:
    """The store gave it an end without running it, which must be its only end."""
    return s._replace(need=put(s.need, m, TOO_MANY)) if s.need[m] == 0 else ran(s, m)


def waiting(s: State, setup: Setup) -> list[tuple[int, int]]:
    """(Rank, message) of those in the queue, first to last."""
    granted = s.lock.message if s.lock.state == "grant" else NOBODY
    queue = [(e.rank, m) for m, e in enumerate(s.entries) if e and e.state != LETTER and m != granted]
    return sorted(queue, reverse=not setup.has("rank"))


def grants(s: State, setup: Setup) -> Iterator[Granted]:
    """Hand the free lock to the head, claimed by who will publish it: only a claim is a try.

    Whether a "not before" is over is left open: both may be.
    """
    queue = waiting(s, setup)
    ready = [m for _, m in queue if s.entries[m] and s.entries[m].state == READY]  # type: ignore[union-attr]
    for m in {m for _, m in queue[:1]} | set(ready[:1]):
        entry = s.entries[m]
        assert entry
        claimed = with_entry(s, m, entry._replace(tries=entry.tries + 1))
        yield claimed._replace(lock=Lock("grant", m, word=True)), Copy(m, "o", entry.rank)
    if not ready:
        yield s, NOTHING


def duplicate(s: State, run: Run, setup: Setup) -> bool:
    """Is it a copy of a finished identity?"""
    done = s.done[run.message]
    if done == NEVER:
        return False
    if run.kind == "f":
        return run.rank <= done and setup.has("gen")
    return run.rank <= done if run.kind == "o" or (run.kind == "p" and setup.has("carry")) else True


def take(s: State, i: int, setup: Setup, *, known: bool) -> State:
    """Run i holds the lock. Word is left where another copy may live, so that the release marks done."""
    run = s.running[i]
    m = run.message
    had_mark = s.done[m] != NEVER
    word = run.kind != "f" or run.tie == "moved" or had_mark or (known and setup.has("entry"))
    need = put(s.need, m, TOO_MANY) if s.need[m] == 0 else s.need  # it starts although it ended
    return with_entry(s, m, None)._replace(
        running=put(s.running, i, run._replace(phase="body")),
        lock=Lock("own", m, word or not setup.rare),
        need=need,
        done=put(s.done, m, NEVER) if setup.has("clear") else s.done,
    )


def overflowed(s: State, setup: Setup) -> State:
    """Only the latest may wait: keep_latest where that is one, drop_oldest where it is more."""
    twin = s.lock.message if s.lock.state in {"own", "dead"} and setup.has("twin") else NOBODY
    queue = sorted(pair for pair in waiting(s, setup) if pair[1] != twin)
    for _, m in queue[: -setup.overflow] if setup.overflow else ():
        s = with_entry(ended(s, m), m, None)
        s = marked(s, m, setup) if setup.has("end") else s
    return s


def arrive(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """A message comes to its lock: a duplicate, or it takes its grant or the free lock, or it parks."""
    run = s.running[i]
    m = run.message
    if duplicate(s, run, setup):
        yield f"{m} is done: not run", s._replace(running=s.running[:i] + s.running[i + 1 :])
        return
    entry = s.entries[m]
    if s.lock.state == "grant" and s.lock.message == m:
        yield f"{m} takes its grant", take(s, i, setup, known=True)
        return
    # A copy came, so its tries and its "not before" are over, and so is being a dead letter.
    rank = entry.rank if entry and setup.has("rank") else run.rank
    aside = with_entry(s, m, Entry(rank, 0, READY))
    for after, grant in grants(aside, setup) if s.lock.state == "free" else [(aside, NOTHING)]:
        if grant.message == m:
            yield f"{m} acquires", take(after, i, setup, known=bool(entry))
        else:
            after = after._replace(running=put(s.running, i, run._replace(phase="parked", grant=grant)))
            if s.lock.state == "own" and s.lock.message == m:
                after = after._replace(lock=s.lock._replace(word=True))
            yield f"{m} parks{granting(grant)}", overflowed(after, setup) if not entry else after


def granting(grant: Copy) -> str:
    return f", grants {grant.message}" if grant.message >= 0 else ""


def release(s: State, i: int, setup: Setup, *, final: bool) -> Iterator[Granted]:
    """End run i's execution: mark, free and grant, all at once. Gives the state, and what its process publishes."""
    run = s.running[i]
    m = run.message
    owner = run.phase == "body"
    if m >= 0 and (final or not setup.has("final")):
        if (s.lock.word or not setup.rare) if owner else setup.has("stale"):
            was_granted = s.lock[:2] == ("grant", m)
            s = marked(s, m, setup)
            owner = owner or (was_granted)
        elif setup.has("zrem"):
            s = with_entry(s, m, None) if owner else s
    yield from grants(s._replace(lock=FREE), setup) if owner else [(s, NOTHING)]


def end_waiter(s: State, m: int, setup: Setup) -> Iterator[Granted]:
    """Revoked or expired: a waiter gets its end, and never blocks those behind it."""
    granted = s.lock[:2] == ("grant", m)
    s = with_entry(ended(s, m), m, None)
    s = marked(s, m, setup) if setup.has("end") else s
    yield from grants(s._replace(lock=FREE), setup) if granted else [(s, NOTHING)]


def overdue(s: State, setup: Setup) -> Iterator[Granted]:
    """A claimed grant nobody came for: back at its old rank, or to the dead letters; and the next one is granted."""
    m = s.lock.message
    entry = s.entries[m]
    assert entry
    state = LATER if entry.tries < setup.tries else LETTER
    yield from grants(with_entry(s, m, entry._replace(state=state))._replace(lock=FREE), setup)
