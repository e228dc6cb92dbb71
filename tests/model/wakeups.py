"""The wake-up of callers that wait in their thread or worker slot, as a state machine: one wake-up per release.

A release pushes one entry to the list of its lock name, if a caller that was refused has marked the lock. A waiter
blocks on that list (BLPOP), which serves waiters in the order in which they came. A waiter that takes the lock marks
it too, so its own release wakes the next one.

Each step is one script, one BLPOP, or one fault. :func:`explore` walks every order of the steps, breadth first. A slow
poll is taken only where no other step is left. The faults in ``POLLED`` may cost one slow poll each, and nothing else
may cost any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

#: Faults that may cost one slow poll each: a process dies, a lease or the list expires.
POLLED = ("die", "expire")
#: Faults after which no waiter needs the slow poll.
#: leave: its time is over. interrupt: an exception strikes while it waits or was just woken. cut: the reply of its
#: BLPOP is lost. refuse: its acquire ends without the lock, although the lock is free (its message is done).
FREE_OF_COST = ("leave", "interrupt", "cut", "refuse")
#: Other steps with a budget. barge: a caller that does not wait takes the free lock. keep: a release keeps the lock
#: for a while (min_hold). successor: the lock is kept for a retry (keep_on_retry), which takes it.
EVENTS = (*POLLED, *FREE_OF_COST, "barge", "keep", "successor")
#: mark: a refused waiter marks the lock. carry: a waiter that takes the lock marks it. list: a wake-up without a
#: waiter stays in the list. one: the list has one entry at most. pass: a woken waiter that ends without the lock pushes
#: the entry again. look: a waiter whose reply was lost asks. kept: also a release that keeps the lock wakes a waiter.
#: inherit: the retry that takes a kept lock takes its mark too.
RULES = frozenset(["mark", "carry", "list", "one", "pass", "look", "kept", "inherit"])

FREE, KEPT, SUCCESSOR, DEAD, BARGER = "free", "kept", "successor", "dead", "barger"


class Waiter(NamedTuple):
    """A waiter: new, refused, blocked, woken (it asks next), body, gone.

    Args:
        phase: One of these.
        waited: It has blocked, so that others may wait behind it.
        knows: It knows when the kept lock expires, and blocks no longer than that.
        due: That time has come.
        owes: It was woken, or knows of a kept lock. No lock is marked whose release would wake the next waiter.
    """

    phase: str = "new"
    waited: bool = False
    knows: bool = False
    due: bool = False
    owes: bool = False


class State(NamedTuple):
    """Everything there is: the holder and its mark, the list, the waiters, who blocks in which order, the budgets."""

    holder: str | int
    marked: bool
    entries: int
    waiters: tuple[Waiter, ...]
    line: tuple[int, ...]
    budget: tuple[int, ...]
    polls: int


@dataclass(frozen=True)
class Setup:
    """The number of waiters, the number of each event, and the rules that are left out."""

    waiters: int = 2
    events: tuple[tuple[str, int], ...] = ()
    without: frozenset[str] = field(default=frozenset())

    def has(self, rule: str) -> bool:
        return rule not in self.without


class Verdict(NamedTuple):
    """The fault, the steps that lead to it by the shortest way, and the numbers of states and of ends."""

    fault: str
    path: tuple[str, ...]
    states: int
    ends: int


Step = tuple[str, State]


def first(setup: Setup) -> State:
    events = dict(setup.events)
    return State(BARGER, False, 0, (Waiter(),) * setup.waiters, (), tuple(events.get(e, 0) for e in EVENTS), 0)


def steps(s: State, setup: Setup) -> Iterator[Step]:
    """Every step but the slow poll."""
    yield from _of_the_lock(s, setup)
    for w, waiter in enumerate(s.waiters):
        if waiter.phase in ("new", "woken"):
            yield from ((f"{w} {label}", after) for label, after in _asks(s, w, setup))
        elif waiter.phase == "refused":
            yield f"{w} blocks", _blocks(s, w)
        elif waiter.phase == "body":
            yield f"{w} releases", _with(_freed(s, setup), w, Waiter("gone"))
        elif waiter.due:
            yield f"{w} has waited until the kept lock expired", _with(s, w, waiter._replace(phase="woken", due=False))
        yield from ((f"{w} {label}", after) for label, after in _faults(s, w, setup))


def _of_the_lock(s: State, setup: Setup) -> Iterator[Step]:
    """Steps of callers that do not wait, and of time."""
    if s.holder == BARGER:
        yield "the other releases", _freed(s, setup)
        for kept, event in ((KEPT, "keep"), (SUCCESSOR, "successor")):
            if _left(s, event):
                after = _spent(s, event)._replace(holder=kept)
                yield f"the other releases, {event}", _woken(after, setup) if s.marked and setup.has("kept") else after
    if s.holder == FREE and _left(s, "barge"):
        yield "another takes the lock", _spent(s, "barge")._replace(holder=BARGER, marked=False)
    if s.holder == SUCCESSOR:
        yield "the retry takes the lock", s._replace(holder=BARGER, marked=s.marked and setup.has("inherit"))
    yield from _expiries(s)


def _expiries(s: State) -> Iterator[Step]:
    freed = s._replace(holder=FREE, marked=False)
    if s.holder in (KEPT, SUCCESSOR):
        yield "the kept lock expires", freed._replace(waiters=tuple(w._replace(due=w.knows) for w in s.waiters))
    if s.holder == DEAD:
        yield "the lease expires", freed
    if s.entries and _left(s, "expire"):
        yield "the list expires", _spent(s, "expire")._replace(entries=0)


def _asks(s: State, w: int, setup: Setup) -> Iterator[Step]:
    """The acquire of a waiter."""
    waiter = s.waiters[w]
    if s.holder == FREE:
        taken = s._replace(holder=w, marked=waiter.waited and setup.has("carry"))
        yield "takes the lock", _with(taken, w, Waiter("body"))
        if waiter.waited and _left(s, "refuse"):
            over = _with(_spent(s, "refuse"), w, Waiter("gone"))
            yield "is refused for good", _passed_on(over, setup) if waiter.owes else over
        return
    kept = s.holder in (KEPT, SUCCESSOR)
    refused = s._replace(marked=s.marked or setup.has("mark"))
    # A kept lock has no release that would wake the next one.
    yield "is refused", _with(refused, w, Waiter("refused", True, kept, owes=kept))
    if _left(s, "leave"):
        left = _with(_spent(refused, "leave"), w, Waiter("gone"))
        yield "is refused and leaves", _passed_on(left, setup) if kept else left


def _blocks(s: State, w: int) -> State:
    waiter = s.waiters[w]._replace(phase="blocked")
    if s.entries:
        return _with(s._replace(entries=s.entries - 1), w, waiter._replace(phase="woken", owes=True))
    return _with(s._replace(line=(*s.line, w)), w, waiter)


def _faults(s: State, w: int, setup: Setup) -> Iterator[Step]:
    phase, waiter = s.waiters[w].phase, s.waiters[w]
    if phase in ("blocked", "woken"):
        if _left(s, "die"):
            yield "dies", _with(_spent(s, "die"), w, Waiter("gone"))
        if _left(s, "interrupt"):
            # The reply may be on its way: it cannot know whether it was woken.
            yield "is interrupted", _passed_on(_with(_spent(s, "interrupt"), w, Waiter("gone")), setup)
    if phase == "blocked" and _left(s, "cut"):
        yield "loses its connection", _with(_spent(s, "cut"), w, waiter._replace(phase="woken", owes=True))
    if phase == "woken" and _left(s, "cut"):
        # The entry was popped, and its reply was lost.
        after = waiter if setup.has("look") else waiter._replace(phase="refused")
        yield "loses the reply", _with(_spent(s, "cut"), w, after)
    if phase == "body" and _left(s, "die"):
        yield "dies in its body", _with(_spent(s, "die")._replace(holder=DEAD), w, Waiter("gone"))


def _freed(s: State, setup: Setup) -> State:
    freed = s._replace(holder=FREE, marked=False)
    return _woken(freed, setup) if s.marked else freed


def _woken(s: State, setup: Setup) -> State:
    """Push an entry. The server gives it to the waiter that has blocked for the longest time."""
    if s.line:
        return _with(s, s.line[0], s.waiters[s.line[0]]._replace(phase="woken", owes=True))
    if not setup.has("list"):
        return s
    return s._replace(entries=1 if setup.has("one") else s.entries + 1)


def _passed_on(s: State, setup: Setup) -> State:
    return _woken(s, setup) if setup.has("pass") else s


def _with(s: State, w: int, waiter: Waiter) -> State:
    line = s.line if waiter.phase == "blocked" else tuple(other for other in s.line if other != w)
    return s._replace(waiters=(*s.waiters[:w], waiter, *s.waiters[w + 1 :]), line=line)


def _left(s: State, event: str) -> int:
    return s.budget[EVENTS.index(event)]


def _spent(s: State, event: str) -> State:
    i = EVENTS.index(event)
    return s._replace(budget=(*s.budget[:i], s.budget[i] - 1, *s.budget[i + 1 :]))


def _polled(s: State) -> Iterator[Step]:
    for w in s.line:
        yield f"{w} polls", _with(s, w, s.waiters[w]._replace(phase="woken"))._replace(polls=s.polls + 1)


def _wrong(s: State, setup: Setup, *, at_rest: bool) -> str:
    if s.entries > 1:
        return "the list grows"
    if at_rest and (s.holder != FREE or any(waiter.phase != "gone" for waiter in s.waiters)):
        return "a waiter is stuck"
    spent = sum(number - _left(s, event) for event, number in setup.events if event in POLLED)
    return "a wake-up is lost" if s.polls > spent else ""


def explore(setup: Setup) -> Verdict:
    """Walk every order of the steps until a fault is found, or all states are known."""
    start = first(setup)
    came: dict[State, tuple[str, State]] = {start: ("", start)}
    level, ends = [start], 0
    while level:
        following: list[State] = []
        for s in level:
            moves = _moves(s, setup)
            ends += not moves
            if fault := _wrong(s, setup, at_rest=not moves):
                return Verdict(fault, _path(came, s), len(came), ends)
            for label, after in moves:
                if after not in came:
                    came[after] = (label, s)
                    following.append(after)
        level = following
    return Verdict("", (), len(came), ends)


def _moves(s: State, setup: Setup) -> list[Step]:
    moves = list(steps(s, setup))
    # Faults need not happen. If only faults lead on, time passes until a waiter polls.
    if all(after.budget != s.budget for _, after in moves):
        moves += _polled(s)
    return moves


def _path(came: dict[State, tuple[str, State]], s: State) -> tuple[str, ...]:
    labels: list[str] = []
    while came[s][0]:
        label, s = came[s]
        labels.append(label)
    return tuple(reversed(labels))


def setup_of(words: str) -> Setup:
    """Return the setup that words such as "waiters=3 die=1 without=carry" describe."""
    given = dict(word.split("=") for word in words.split())
    without = frozenset(given.pop("without", "").split(",")) & RULES
    return Setup(int(given.pop("waiters", 2)), tuple((event, int(number)) for event, number in given.items()), without)
