"""Try every order of everything that can happen, breadth first, so that a counter-example is a shortest one.

As a script it runs what is too big for the suite; all of these hold (states, seconds of a slow core):

    messages=3 crash=1 regrant=1                                            774606   206
    messages=3 redeliver=1 regrant=1                                        401865    95
    messages=2 crash=1 redeliver=1 lease=1                                  348752    66
    messages=2 early=1 crash=1 redeliver=1                                   99527    17
    messages=2 crash=1 redeliver=1                                           60274     9
    messages=2 rare=0 crash=1 redeliver=1                                    39381     6
    messages=3 overflow=1 crash=1                                            29012     5
    messages=1 crash=1 redeliver=1 regrant=1 requeue=1 lease=1                3837     1

    python -m tests.model.explore messages=3 crash=1 regrant=1 [early=1] [rare=0] [overflow=1] [tries=1] [without=zrem]

It checks in every state: one execution in the body (and one more for each live lease that was lost). No message starts
or is ended that has its end already, unless a crash came between its end and the mark of it. No finished message
waits. No waiter is granted the lock before a ready one of a lower rank. In every state where nothing goes on: each
message has its end, or is a dead letter, the lock is free, and no message waits. And from every state, such a state
can be reached without any event.

States that differ only in what nothing can read any more, or in the names of messages, are one: see `symmetry`.
"""

from __future__ import annotations

import gc
import sys
import time
from array import array
from itertools import permutations
from typing import NamedTuple

from tests.model.broker_and_workers import first, steps
from tests.model.state import EVENTS, LETTER, NOW, READY, RULES, SPARE, TOO_MANY, Entry, Setup, State, spent
from tests.model.symmetry import canonical, renamed, trimmed


class Verdict(NamedTuple):
    """The fault and the labels that lead to it, or no fault."""

    fault: str
    path: tuple[str, ...]
    states: int
    ends: int
    seconds: float


def wrong(s: State, setup: Setup) -> str:
    """Check the invariants of every state."""
    if sum(r.phase in {"body", "stale"} for r in s.running) > 1 + spent(s, "lease", setup):
        return "two executions in the body"
    if TOO_MANY in s.need:
        return "a message that has its end starts, or gets another"
    if any(entry and entry.rank <= done for entry, done in zip(s.entries, s.done, strict=True)):
        return "a finished identity waits"
    return ""


def wrong_end(s: State, setup: Setup) -> str:
    """Check the invariants of a state where nothing goes on."""
    letters = [entry is not None and entry.state == LETTER for entry in s.entries]
    if any(need % SPARE and not letter for need, letter in zip(s.need, letters, strict=True)):
        return "a message is lost"
    if s.lock.state != "free":
        return "the lock is stuck"
    if any(entry and not letter for entry, letter in zip(s.entries, letters, strict=True)):
        return "somebody waits for ever"
    return "a dead letter that was not lost" if any(letters) and not spent(s, "crash", setup) else ""


def overtaken(before: State, after: State) -> bool:
    """Is the free lock granted or taken while a waiter of a lower rank is ready? A Lock may take it."""
    m, granted = after.lock.message, after.lock.state == "grant"
    if before.lock[:2] == after.lock[:2] or not (
        granted or (m >= 0 and after.lock.state == "own" and before.lock.state == "free")
    ):
        return False
    entries = (after if granted else before).entries
    mine = entries[m] if m >= 0 else None
    ranks = [r.rank for r in before.running if r.message == m and r.phase == "begin" and not granted]
    rank = min([*ranks, *([place(mine)] if mine else [])], default=NOW)
    return any(e.state == READY and place(e) < rank for x, e in enumerate(after.entries) if e and x != m)


def place(entry: Entry) -> int:
    """Return the rank of an entry. One that began precedes all others."""
    return entry.rank - NOW * entry.began


class Search:
    """All states by number in the order they were found, which step led to each, and who leads where by progress."""

    def __init__(self, setup: Setup, *, reduced: bool = True) -> None:
        self.setup = setup
        self.reduced = reduced
        self.states: dict[State, int] = {}
        self.parents = array("l")
        self.edges = array("l")  # pairs: from, to
        self.ends: list[int] = []
        self.shared: dict[object, object] = {}
        #: What was found for the same state on this level, where most ways to one meet.
        self.named: dict[State, State] = {}

    def name(self, s: State) -> State:
        known = self.named.get(s)
        if known is None:
            known = self.named[s] = canonical(s, self.setup) if self.reduced else trimmed(s)
        return known

    def explore(self, limit: int | None = None) -> Verdict:
        """Until a fault is found, or all is seen, or there are too many states."""
        gc.disable()  # all that is made stays
        try:
            return self.search(limit or sys.maxsize)
        finally:
            gc.enable()

    def search(self, limit: int) -> Verdict:
        start = time.process_time()
        level = [self.name(first(self.setup))]
        self.states[level[0]] = 0
        self.parents.append(-1)
        while level:
            following: list[State] = []
            self.named.clear()
            for s in level:
                fault = wrong(s, self.setup) or self.expand(s, following)
                if fault or len(self.states) >= limit:
                    return self.verdict(fault or "gave up", s, start)
            level = following
        stuck = self.unreached()
        return self.verdict("this can never come to rest" if stuck else "", stuck, start)

    def expand(self, s: State, following: list[State]) -> str:
        """Note where s leads, and judge the steps."""
        here, rest = self.states[s], True
        for label, after in steps(s, self.setup):
            if overtaken(s, after):
                return f"an elder is overtaken: {label}"
            known = self.name(after)
            there = self.states.get(known)
            if there is None:
                there = len(self.states)
                self.states[self.share(known)] = there
                self.parents.append(here)
                following.append(known)
            if s.budget == after.budget:
                rest = False
                self.edges.extend((here, there))
        if rest:
            self.ends.append(here)
        return wrong_end(s, self.setup) if rest else ""

    def share(self, s: State) -> State:
        """Equal parts of many states are kept once."""
        share = self.shared.setdefault
        parts = [share(part, part) for part in s]
        return State(*parts)  # type: ignore[arg-type]  # they are the same parts

    def unreached(self) -> State | None:
        """A state from which progress alone never comes to rest."""
        count = len(self.states)
        heads, links = array("l", [-1]) * count, array("l")
        for at in range(0, len(self.edges), 2):
            links.append(heads[self.edges[at + 1]])
            heads[self.edges[at + 1]] = at // 2
        reaches, todo = bytearray(count), list(self.ends)
        while todo:
            there = todo.pop()
            if reaches[there]:
                continue
            reaches[there] = 1
            link = heads[there]
            while link >= 0:
                todo.append(self.edges[2 * link])
                link = links[link]
        missing = reaches.find(0)
        return None if missing < 0 else next(s for s, i in self.states.items() if i == missing)

    def verdict(self, fault: str, s: State | None, start: float) -> Verdict:
        path = self.path(s) if fault and s and fault != "gave up" else ()
        return Verdict(fault, path, len(self.states), len(self.ends), time.process_time() - start)

    def path(self, s: State) -> tuple[str, ...]:
        """The labels of a shortest way to s, walked anew with the same names all the way."""
        by_number, way, labels = list(self.states), [], []
        at = self.states[s]
        while at > 0:
            way.append(by_number[at])
            at = self.parents[at]
        here = first(self.setup)
        for known in reversed(way):
            label, here = next((x, after) for x, after in steps(here, self.setup) if known in self.names(after))
            here = trimmed(here)
            labels.append(label)
        return tuple(labels)

    def names(self, s: State) -> set[State]:
        """Every state that s may have been noted as."""
        orders = permutations(range(self.setup.messages))
        return {self.name(renamed(s, order)) for order in orders} | {self.name(s)}


def setup_of(words: list[str]) -> Setup:
    """The setup that a command line tells."""
    told = dict(word.split("=") for word in words)
    return Setup(
        messages=int(told.pop("messages", 2)),
        early=told.pop("early", "0") == "1",
        rare=told.pop("rare", "1") == "1",
        overflow=int(told.pop("overflow", 0)),
        tries=int(told.pop("tries", 2)),
        without=frozenset(told.pop("without", "").split(",")) & RULES,
        events=tuple((event, int(told.pop(event))) for event in EVENTS if event in told),
    )


if __name__ == "__main__":
    verdict = Search(setup_of(sys.argv[1:])).explore()
    print(f"{verdict.fault or 'holds'}: {verdict.states} states, {verdict.ends} ends, {verdict.seconds:.1f} s")  # noqa: T201  # a script
    print(*verdict.path, sep="\n  ")  # noqa: T201  # a script
