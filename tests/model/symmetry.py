"""Equal states: those that differ only in what nothing can read any more, or in the names of messages."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model.state import NEVER, Copy, Lock, Run, Setup, State, left


def legible(run: Run) -> Run:
    """After its first script, a delivery's kind and rank matter only for the copy that would be delivered again."""
    if run.phase == "begin":
        return run
    kind = "" if run.tie != "yes" else "p" if run.kind in {"o", "p"} else "r"
    rank, turn = (run.rank, run.turn) if kind == "p" else (0, 0)
    return run if (kind, rank, turn) == (*run[1:3], run.turn) else run._replace(kind=kind, rank=rank, turn=turn)


def with_turns(s: State) -> State:
    """The turn that stands is 1; copies of all others are alike."""
    m, now = s.lock.message, s.lock.turn

    def of(copy: Copy | Run) -> int:
        return 1 if copy.turn and copy.turn == now and copy.message == m else 0

    lock = s.lock if now in {0, 1} else s.lock._replace(turn=1)
    if not (now or any(c.turn for c in s.broker) or any(r.turn or r.grant.turn for r in s.running)):
        return s
    broker = tuple([c if c.turn == of(c) else c._replace(turn=of(c)) for c in s.broker])
    running = tuple([
        r._replace(turn=of(r), grant=r.grant._replace(turn=of(r.grant)))
        if r.turn != of(r) or r.grant.turn != of(r.grant) else r
        for r in s.running
    ])  # fmt: skip
    return State(broker, running, lock, *s[3:])


def trimmed(s: State) -> State:
    """Without what nothing reads any more, and ranks counted from 1."""
    s = with_turns(s)
    running = tuple([legible(run) for run in s.running])
    ranks: dict[int, set[int]] = {m: set() for m in range(len(s.entries))}
    there = {r.message for r in running} | {m for m, entry in enumerate(s.entries) if entry}
    for c in (*s.broker, *[r.grant for r in running if r.grant.message >= 0]):
        there.add(c.message)
        ranks[c.message].add(c.rank)
    for r in running:
        if r.message >= 0:
            ranks[r.message].add(r.rank)
    for m, entry in enumerate(s.entries):
        if entry:
            ranks[m].add(entry.rank)
    names = {rank: i for i, rank in enumerate(sorted(set().union({0}, *ranks.values())))}
    reused = left(s, "republish")
    # A mark matters by the ranks of its own identity that it covers, and not at all where no copy is left.
    done = [
        max([0, *(names[r] for r in ranks[m] if r <= mark)]) if mark != NEVER and (m in there or reused) else NEVER
        for m, mark in enumerate(s.done)
    ]
    broker, entries = s.broker, s.entries
    if any(rank != name for rank, name in names.items()):
        broker = tuple([c._replace(rank=names[c.rank]) for c in broker])
        running = tuple([
            r._replace(rank=names[r.rank], grant=r.grant._replace(rank=names.get(r.grant.rank, 0))) for r in running
        ])  # fmt: skip
        entries = tuple([e and e._replace(rank=names[e.rank]) for e in entries])
    revocable = bool(left(s, "revoke"))
    revoked = tuple([flag and (m in there or revocable) for m, flag in enumerate(s.revoked)])
    return State(broker, running, s.lock, entries, tuple(done), s.need, revoked, s.budget)


def canonical(s: State, setup: Setup) -> State:
    """One state for all that differ in names only: all steps treat all messages alike, so any renaming is sound.

    Messages are sorted by what is known about each. Where two look alike, one of both orders is taken. This may keep
    two equal states apart, but never merges two different ones. A message and its replacement are renamed together.
    """
    s = trimmed(s)
    n, total = setup.messages, len(s.entries)

    def stands(m: int) -> tuple[object, ...]:
        return s.need[m], s.done[m], s.revoked[m], s.entries[m] or (), s.lock.message == m

    def looks(m: int) -> tuple[object, ...]:
        return (
            *stands(m),
            sorted([c[1:] for c in s.broker if c.message == m]),
            sorted([(*r[1:5], r.turn) for r in s.running if r.message == m]),
            sorted([(r.phase, r.grant.turn) for r in s.running if r.grant.message == m]),
        )

    standing = [stands(m) for m in range(n)]
    if len(set(standing)) == n:
        return renamed(s, sorted(range(n), key=standing.__getitem__))  # the rest of their looks is not needed
    return renamed(s, sorted(range(n), key=lambda m: [looks(x) for x in range(m, total, n)]))


def renamed(s: State, order: Sequence[int]) -> State:
    """Message order[i] is called i; its replacement with it."""
    n = len(order)
    if all(m == i for i, m in enumerate(order)):
        return State(tuple(sorted(s.broker)), tuple(sorted(s.running)), *s[2:])
    old = [m + x for x in range(0, len(s.entries), n) for m in order]
    new = {m: i for i, m in enumerate(old)} | {-1: -1}
    return State(
        tuple(sorted([Copy(new[c.message], *c[1:]) for c in s.broker])),
        tuple(sorted([
            Run(new[r.message], *r[1:5], Copy(new[r.grant.message], *r.grant[1:]), r.turn)
            for r in s.running
        ])),
        Lock(s.lock.state, new[s.lock.message], *s.lock[2:]),
        tuple([s.entries[m] for m in old]),
        tuple([s.done[m] for m in old]),
        tuple([s.need[m] for m in old]),
        tuple([s.revoked[m] for m in old]),
        s.budget,
    )  # fmt: skip
