"""Which states are one: those that differ only in what nothing can read any more, or in the names of messages."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model.state import NEVER, Copy, Lock, Run, Setup, State, left


def legible(run: Run) -> Run:
    """After its first script a delivery's kind and rank matter only for the copy that would come back."""
    if run.phase == "begin":
        return run
    kind = "" if run.tie != "yes" else "p" if run.kind in {"o", "p"} else "r"
    rank = run.rank if kind == "p" else 0
    return run if (kind, rank) == run[1:3] else run._replace(kind=kind, rank=rank)


def trimmed(s: State) -> State:
    """Without what nothing reads any more, and ranks counted from 1."""
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
    if any(rank != name for rank, name in names.items()):
        broker = tuple([c._replace(rank=names[c.rank]) for c in s.broker])
        running = tuple([
            r._replace(rank=names[r.rank], grant=r.grant._replace(rank=names.get(r.grant.rank, 0))) for r in running
        ])  # fmt: skip
        s = s._replace(broker=broker, entries=tuple([e and e._replace(rank=names[e.rank]) for e in s.entries]))
    revoked = tuple([flag and (m in there or bool(left(s, "revoke"))) for m, flag in enumerate(s.revoked)])
    return s._replace(running=running, done=tuple(done), revoked=revoked)


def canonical(s: State, setup: Setup) -> State:
    """One state for all that differ in names only: all steps treat all messages alike, so any renaming is sound.

    Messages are sorted by what is known about each; where two look alike one of both orders is taken, which may keep
    two states apart that are one but never makes one of two. A message and its replacement are renamed together.
    """
    s = trimmed(s)
    n, total = setup.messages, len(s.entries)

    def looks(m: int) -> tuple[object, ...]:
        return (
            s.need[m], s.done[m], s.revoked[m], s.entries[m] or (), s.lock.message == m,
            sorted([c[1:] for c in s.broker if c.message == m]),
            sorted([r[1:5] for r in s.running if r.message == m]),
            [r.phase for r in s.running if r.grant.message == m],
        )  # fmt: skip

    return renamed(s, sorted(range(n), key=lambda m: [looks(x) for x in range(m, total, n)]))


def renamed(s: State, order: Sequence[int]) -> State:
    """Message order[i] is called i; its replacement with it."""
    n = len(order)
    old = [m + x for x in range(0, len(s.entries), n) for m in order]
    new = {m: i for i, m in enumerate(old)} | {-1: -1}
    return State(
        tuple(sorted([Copy(new[c.message], c.kind, c.rank) for c in s.broker])),
        tuple(sorted([
            Run(new[r.message], *r[1:5], r.grant if r.grant.message < 0 else Copy(new[r.grant.message], *r.grant[1:]))
            for r in s.running
        ])),
        Lock(s.lock.state, new[s.lock.message], s.lock.word),
        tuple([s.entries[m] for m in old]),
        tuple([s.done[m] for m in old]),
        tuple([s.need[m] for m in old]),
        tuple([s.revoked[m] for m in old]),
        s.budget,
    )  # fmt: skip
