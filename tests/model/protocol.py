"""The queue policy's hand-off for one lock name: what its scripts do, as pure steps over a small immutable state.

Every function here is one script of the store: it reads and writes the lock atomically. What happens round the lock
(broker, workers, crashes) is in `broker_and_workers`; `explore` tries every order of all of it.

A rank stands for server time. Only the order of ranks matters, so `NOW` is simply later than all others, and
`explore` counts them anew after each step. Each rule has a name; `Setup.without` leaves one out, which shows what it
is good for:

final   only an end that is acknowledged and stored marks the identity done; a requeued message must run again
nest    replace() makes a new identity
gen     a fresh copy is a duplicate only if its rank is not after the mark
zrem    a script that marks an identity done removes its waiting entry and ends its grant. So nothing done ever
        waits, and the head can be granted without reading the marks of others
stale   an end that lost its lease marks done too
end     an end the store gives a waiter (revoked, expired, dropped) marks it done: copies of it may be on their way
clear   who starts takes an old mark of its identity away, and leaves word: a reused id is not done any more
copy    a copy of the identity that holds is parked, and is no waiter: it is neither evicted nor ended meanwhile. Its
        end would be stored over that of the running one. The release drops it with the mark
ahead   a copy that came while its message held precedes all waiters: if the holder dies, it is the next to run
rank    the head is the lowest rank, and parking again restores the rank
turn    a grant is taken by the copy that was published for it, and a parked message takes no free lock. Another copy's
        delivery may be lost, and with its entry the last trace of the message would be gone
hold    early acknowledgement is held back until the message is parked or holds
due     a sweep publishes what is not known to be published, and returns a late grant to the waiters. It grants a
        free lock that has waiters
claim   only a turn that was published can be lost
first   a message that the store did not answer is republished with the time of its first receipt, and is judged by that
        time. A copy that was flagged as redelivered keeps the flag

This model is separate from `tests/contract/queue_model.py` on purpose. This one is written from the design, without any
code, and shows that the design holds. The scripts are compared with the other one. If one model did both, a mistake in
it would hide in the design and in the scripts.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.state import (
    FREE,
    LATER,
    LETTER,
    NEVER,
    NEXT,
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
    """(Rank, message) of those in the queue, first to last. Who began comes first, as if its rank were below all."""
    granted = s.lock.message if s.lock.state == "grant" else NOBODY
    ahead = setup.has("ahead")
    queue = [
        (e.rank - NOW * (e.began and ahead), m)
        for m, e in enumerate(s.entries)
        if e and e.state != LETTER and m != granted
    ]
    return sorted(queue, reverse=not setup.has("rank"))


def holds(s: State, m: int) -> bool:
    """Does the message run, or did it die and its lease has not ended?"""
    return s.lock[:2] in {("own", m), ("dead", m)}


def grants(s: State, setup: Setup) -> Iterator[Granted]:
    """Grant the free lock to the head. The caller that learns of the grant publishes it.

    Whether a "not before" is over is left open: both may be.
    """
    queue = waiting(s, setup)
    ready = [m for _, m in queue if s.entries[m] and s.entries[m].state == READY]  # type: ignore[union-attr]
    for m in {m for _, m in queue[:1]} | set(ready[:1]):
        entry = s.entries[m]
        assert entry
        yield s._replace(lock=Lock("grant", m, word=False, turn=NEXT)), Copy(m, "o", entry.rank, NEXT)
    if not ready:
        yield s, NOTHING


def duplicate(s: State, run: Run, setup: Setup) -> bool:
    """Is it a copy of a finished identity?"""
    done = s.done[run.message]
    if done == NEVER:
        return False
    if run.kind == "f":
        return run.rank <= done and setup.has("gen")
    return run.rank <= done if run.kind in {"o", "p"} else True


def unanswered(run: Run, setup: Setup) -> Copy:
    """The copy that a worker publishes of a message for which the store gave no rank."""
    if run.kind in {"o", "p"}:
        return Copy(run.message, "o", run.rank, run.turn)
    if run.kind == "f" and setup.has("first"):
        return Copy(run.message, "o", run.rank)
    return Copy(run.message, run.kind, 0)


def take(s: State, i: int, setup: Setup) -> State:
    """Run i holds the lock. Word is left where another copy may live, so that the release marks done."""
    run, m = s.running[i], s.running[i].message
    word = run.kind != "f" or run.tie == "moved" or s.done[m] != NEVER or not setup.rare
    return with_entry(s, m, None)._replace(
        running=put(s.running, i, run._replace(phase="body")),
        lock=Lock("own", m, word),
        need=put(s.need, m, TOO_MANY) if s.need[m] == 0 else s.need,  # it starts although it has its end
        done=put(s.done, m, NEVER) if setup.has("clear") else s.done,
    )


def overflowed(s: State, setup: Setup) -> State:
    """Only the latest may wait: drop_oldest."""
    queue = sorted(
        (rank, m)
        for rank, m in waiting(s, setup)
        if not (s.entries[m].began and setup.has("copy"))  # type: ignore[union-attr]
    )
    for _, m in queue[: -setup.overflow] if setup.overflow else ():
        s = with_entry(ended(s, m), m, None)
        s = marked(s, m, setup) if setup.has("end") else s
    return s


def arrive(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """A message reaches its lock: a duplicate, a copy of the holder, its own grant, the free lock, or it parks."""
    run = s.running[i]
    m = run.message
    if duplicate(s, run, setup):
        yield f"{m} is done: not run", without(s, i)
        return
    entry = s.entries[m]
    if s.lock.state == "grant" and s.lock.message == m:
        if run.turn == s.lock.turn or not setup.has("turn"):
            yield f"{m} takes its turn", take(s, i, setup)
        else:
            yield f"{m} leaves its turn to its copy", in_phase(s, i, "parked", NOTHING)
        return
    if holds(s, m) and setup.has("copy"):
        worded = s._replace(lock=s.lock._replace(word=True))
        yield (
            f"{m} waits for its own end",
            in_phase(with_entry(worded, m, Entry(run.rank, 0, READY, began=True)), i, "parked"),
        )
        return
    known = entry is not None and entry.state != LETTER
    rank = min(entry.rank, run.rank) if entry and known and setup.has("rank") else run.rank
    began = holds(s, m) or bool(entry and known and entry.began)
    ahead = any(e and x != m and e.state == READY and (e.began or e.rank < rank) for x, e in enumerate(s.entries))
    if s.lock.state == "free" and not ahead and not (known and setup.has("turn")):
        yield f"{m} acquires", take(s, i, setup)
        return
    # A copy came, so the turns that it lost and its "not before" are over, and so is being a dead letter.
    aside = with_entry(s, m, Entry(rank, 0, READY, began))
    aside = aside if known else overflowed(aside, setup)
    for after, grant in grants(aside, setup) if s.lock.state == "free" else [(aside, NOTHING)]:
        word = after.lock.word or s.lock[:2] == ("own", m)
        parked = after._replace(lock=after.lock._replace(word=word))
        yield f"{m} parks{granting(grant)}", in_phase(parked, i, "parked", grant)


def in_phase(s: State, i: int, phase: str, grant: Copy = NOTHING) -> State:
    """Run i goes on, with what it has to publish."""
    return s._replace(running=put(s.running, i, s.running[i]._replace(phase=phase, grant=grant)))


def granting(grant: Copy) -> str:
    return f", grants {grant.message}" if grant.message >= 0 else ""


def release(s: State, i: int, setup: Setup, *, final: bool) -> Iterator[Granted]:
    """End run i's execution: mark, free and grant, all at once. Gives the state, and what its process publishes."""
    run = s.running[i]
    m = run.message
    owner = run.phase == "body"
    if m < 0:
        yield s._replace(lock=FREE), NOTHING  # a Lock knows no queue: a sweep grants
        return
    if final or not setup.has("final"):
        if (s.lock.word or not setup.rare) if owner else setup.has("stale"):
            was_granted = s.lock[:2] == ("grant", m)
            s = marked(s, m, setup)
            owner = owner or (was_granted)
        elif setup.has("zrem"):
            s = with_entry(s, m, None) if owner else s
    yield from grants(s._replace(lock=FREE), setup) if owner else [(s, NOTHING)]


def end_waiter(s: State, m: int, setup: Setup) -> Iterator[Granted]:
    """Revoked or expired: a waiter gets its end, and never blocks those behind it."""
    if holds(s, m) and setup.has("copy"):
        yield s, NOTHING  # it runs, and will have its end
        return
    granted = s.lock[:2] == ("grant", m)
    s = with_entry(ended(s, m), m, None)
    s = marked(s, m, setup) if setup.has("end") else s
    yield from grants(s._replace(lock=FREE), setup) if granted else [(s, NOTHING)]


def overdue(s: State, setup: Setup) -> Iterator[Granted]:
    """A grant that no worker took: the waiter keeps its rank or becomes a dead letter, and the next one is granted."""
    m = s.lock.message
    entry = s.entries[m]
    assert entry
    tries = entry.tries + 1
    moved = entry._replace(tries=tries, state=LATER if tries < setup.tries else LETTER)
    yield from grants(with_entry(s, m, moved)._replace(lock=FREE), setup)
