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
twin    a waiting copy of the identity that holds is never ended: it may be all that is left when the holder dies
rank    the head is the lowest rank, and parking again restores the rank
keep    who takes the lock takes its entry out, but not if its own delivery may have been given to another, which then
        parked and was acknowledged: the entry may be all that is left
hold    early acknowledgement is held back until the message is parked or holds
due     a sweep claims and publishes what none claimed, puts a grant not taken when due back among the waiters, and
        grants a free lock that has waiters
claim   a try is a claim by a process that will publish; nobody's grant is no try
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.state import (
    FREE,
    LATER,
    LETTER,
    NEVER,
    NOBODY,
    NOTHING,
    NOW,
    READY,
    SPARE,
    TOO_MANY,
    Copy,
    Entry,
    Granted,
    Lock,
    Run,
    Setup,
    State,
    Step,
    put,
    with_entry,
    without,
)


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
    return run.rank <= done if run.kind == "o" else True


def take(s: State, i: int, setup: Setup, *, known: bool) -> State:
    """Run i holds the lock. Word is left where another copy may live, so that the release marks done."""
    run, m = s.running[i], s.running[i].message
    entry = s.entries[m]
    assert entry
    moved = run.tie == "moved"
    word = run.kind != "f" or moved or s.done[m] != NEVER or not setup.rare
    s = with_entry(s, m, Entry(entry.rank, 0, READY) if known and moved and setup.has("keep") else None)
    return s._replace(
        running=put(s.running, i, run._replace(phase="body")),
        lock=Lock("own", m, word),
        need=put(s.need, m, TOO_MANY) if s.need[m] == 0 else s.need,  # it starts although it has its end
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
        yield f"{m} is done: not run", without(s, i)
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
            yield f"{m} acquires", take(after, i, setup, known=entry is not None)
        else:
            word = after.lock.word or s.lock[:2] == ("own", m)
            parked = after._replace(
                running=put(s.running, i, run._replace(phase="parked", grant=grant)),
                lock=after.lock._replace(word=word),
            )
            yield f"{m} parks{granting(grant)}", parked if entry else overflowed(parked, setup)


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
