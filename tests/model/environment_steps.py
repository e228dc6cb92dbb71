"""Events outside of any delivery: time passes, sweeps run, users act."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import end_waiter, granting, grants, overdue
from tests.model.state import (
    FREE,
    NEVER,
    NOBODY,
    NOTHING,
    SPARE,
    Copy,
    Lock,
    Run,
    Setup,
    State,
    Step,
    helped,
    left,
    put,
    spend,
)


def sweeps(s: State, setup: Setup) -> Iterator[Step]:
    """Time passes: dead holders' leases end, free locks are granted, grants fall due."""
    if s.lock.state == "dead":
        yield "the dead holder's lease ends", s._replace(lock=FREE)
    if not setup.has("due"):
        return
    if s.lock.state == "free":
        for after, grant in grants(s, setup):
            if grant.message >= 0:
                yield f"a sweep grants {grant.message}", helped(after, grant)
    if s.lock.state == "grant":
        yield from (due(s, setup) if s.lock.word or not setup.has("claim") else again(s))


def again(s: State) -> Iterator[Step]:
    """It is not known to be published: the next sweep publishes it, for the same grant. An event where another will."""
    m, entry = s.lock.message, s.entries[s.lock.message]
    assert entry
    coming = any(r.grant[::3] == (m, s.lock.turn) for r in s.running)
    if not coming or left(s, "regrant"):
        yield (
            f"a sweep hands out the turn of {m}",
            helped(spend(s, "regrant") if coming else s, Copy(m, "o", entry.rank, s.lock.turn)),
        )


def due(s: State, setup: Setup) -> Iterator[Step]:
    """Time alone tells that a turn was lost: it is no event where it was, and one where its copy is coming."""
    m, turn = s.lock.message, s.lock.turn
    copies = [(c.message, c.turn) for c in (*s.broker, *[r.grant for r in s.running])]
    copies += [(r.message, r.turn) for r in s.running if r.phase == "begin"]
    coming = any(x == m and (its == turn or not setup.has("turn")) for x, its in copies)
    if not coming or left(s, "regrant"):
        for after, grant in overdue(spend(s, "regrant") if coming else s, setup):
            yield f"the turn of {m} {'seems' if coming else 'is'} lost{granting(grant)}", helped(after, grant)


def users(s: State, setup: Setup) -> Iterator[Step]:
    """A Lock without a message; revocations; an id used again."""
    if left(s, "lock") and s.lock.state == "free":  # past all who wait
        run = Run(NOBODY, "", 0, "body", "acked", NOTHING)
        lock = Lock("own", NOBODY, word=False)
        yield "a Lock takes it", spend(s, "lock")._replace(lock=lock, running=(*s.running, run))
    for m in range(len(s.entries)):
        if left(s, "revoke") and not s.revoked[m] and s.need[m] % SPARE:
            yield from revoke(s, m, setup)
        if not s.need[m] % SPARE:
            yield from reuse(s, m, setup)


def revoke(s: State, m: int, setup: Setup) -> Iterator[Step]:
    """The control command ends a waiter at once; workers remember it, for a while."""
    known = spend(s, "revoke")._replace(revoked=put(s.revoked, m, value=True))
    for after, grant in end_waiter(known, m, setup) if s.entries[m] else [(known, NOTHING)]:
        yield f"{m} is revoked{granting(grant)}", helped(after, grant)


def reuse(s: State, m: int, setup: Setup) -> Iterator[Step]:
    """It has its end: its id may be used again, and where no copy of it is left its mark may expire."""
    mine = [run.phase for run in s.running if run.message == m]
    if left(s, "republish") and m < setup.messages and not {"body", "stale"}.intersection(mine):
        again = spend(s, "republish")._replace(broker=(*s.broker, Copy(m, "f", 0)))
        yield f"{m} is published again", again._replace(need=put(s.need, m, s.need[m] + 1))
    copies = [c for c in (*s.broker, *[r.grant for r in s.running]) if c.message == m]
    if left(s, "expiry") and s.done[m] != NEVER and not (mine or copies or s.entries[m]):
        yield f"the mark of {m} expires", spend(s, "expiry")._replace(done=put(s.done, m, NEVER))
