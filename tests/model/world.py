"""What happens round the lock: the broker delivers, workers run, publish, acknowledge and die; users and time act.

A step is progress, or an event that costs one of its budget:

crash      a process dies, in any phase; also between its script and what it had to publish
redeliver  the broker delivers a message again whose delivery is alive; that delivery is no longer tied to it
regrant    a grant is taken for lost although its copy is on its way
requeue    an execution unwinds without an end: a cold shutdown, Reject(requeue=True)
replace    a body replaces itself
republish  a user publishes an id again that has its end
lease      a live holder loses its lease
expiry     a done mark expires, when no copy of its identity is left
revoke     a user revokes a message
lock       a plain Lock outside any message takes the free lock
elsewhere  who grants cannot publish to the broker of the granted message, so the grant is nobody's claim
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.model.protocol import (
    FREE,
    NEVER,
    NOBODY,
    NOTHING,
    NOW,
    SPARE,
    Copy,
    Lock,
    Run,
    Setup,
    State,
    Step,
    arrive,
    end_waiter,
    granting,
    grants,
    overdue,
    put,
    ran,
    release,
    waiting,
)

EVENTS = ("crash", "redeliver", "regrant", "requeue", "replace", "republish", "lease", "expiry", "revoke", "lock", "elsewhere")


def first(setup: Setup) -> State:
    """Every message is published; a second half of names is for those that replace() makes."""
    n, budget = setup.messages, dict(setup.events)
    names = 2 * n if budget.get("replace") else n
    return State(
        broker=tuple(Copy(m, "f", 0) for m in range(n)),
        running=(),
        lock=FREE,
        entries=(None,) * names,
        done=(NEVER,) * names,
        need=(1,) * n + (0,) * (names - n),
        revoked=(False,) * names,
        budget=tuple(budget.get(event, 0) for event in EVENTS),
    )


def spend(s: State, event: str) -> State:
    i = EVENTS.index(event)
    return s._replace(budget=put(s.budget, i, s.budget[i] - 1))


def left(s: State, event: str) -> int:
    return s.budget[EVENTS.index(event)]


def back(run: Run) -> Copy:
    """The copy that the broker makes of a delivery."""
    return Copy(run.message, "p", run.rank) if run.kind in {"o", "p"} else Copy(run.message, "r", 0)


def helper(grant: Copy) -> tuple[Run, ...]:
    """A process that granted without being a delivery: it still has to publish."""
    return (Run(NOBODY, "", 0, "out", "acked", grant),) if grant.message >= 0 else ()


def without(s: State, i: int) -> State:
    return s._replace(running=s.running[:i] + s.running[i + 1 :])


def in_phase(s: State, i: int, phase: str, **more: str | Copy) -> State:
    return s._replace(running=put(s.running, i, s.running[i]._replace(phase=phase, **more)))


def deliver(s: State, setup: Setup) -> Iterator[Step]:
    for copy in dict.fromkeys(s.broker):
        m = copy.message
        at = s.broker.index(copy)
        rest = s._replace(broker=s.broker[:at] + s.broker[at + 1 :])
        rank = copy.rank if copy.kind in {"o", "p"} else NOW
        run = Run(m, copy.kind, rank, "begin", "acked" if setup.early and not setup.has("hold") else "yes", NOTHING)
        yield f"deliver {copy.kind}{m}", rest._replace(running=(*rest.running, run))
        # A worker that remembers the revocation ends it at receipt, unless it is done or holds.
        holds = s.lock.state in {"own", "dead"} and s.lock.message == m
        if s.revoked[m] and s.done[m] == NEVER and not holds and s.need[m]:
            for after, grant in end_waiter(rest, m, setup):
                revoked = after._replace(running=after.running + helper(grant))
                yield f"{copy.kind}{m} is revoked at receipt{granting(grant)}", revoked


def body(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """A holder ends, or ends badly."""
    run = s.running[i]
    m = run.message
    for after, grant in release(s, i, setup, final=True):
        after = in_phase(ran(after, m) if m >= 0 else after, i, "out", grant=grant)
        yield f"{m} ends ({run.phase}){granting(grant)}", after
    if m >= 0 and left(s, "requeue") and run.tie != "acked":
        for after, grant in release(s, i, setup, final=False):
            yield f"{m} unwinds{granting(grant)}", spend(in_phase(after, i, "unwound", grant=grant), "requeue")
    if left(s, "replace") and 0 <= m < setup.messages:
        new = m + setup.messages if setup.has("nest") else m
        broker, need = (*s.broker, Copy(new, "f", 0)), put(s.need, new, s.need[new] + 1)
        yield f"{m} replaces itself", spend(s, "replace")._replace(broker=broker, need=need)
    if left(s, "lease") and run.phase == "body":
        yield f"live {m} loses its lease", spend(in_phase(s, i, "stale"), "lease")._replace(lock=FREE)
    if setup.early and run.tie != "acked":
        yield f"{m} holds: acknowledged", in_phase(s, i, run.phase, tie="acked")


def leave(s: State, i: int, _setup: Setup) -> Iterator[Step]:
    """After its script: publish what was granted, then acknowledge, or give back what unwound."""
    run = s.running[i]
    if run.grant.message >= 0:
        yield f"publish {run.grant.message}", in_phase(s, i, run.phase, grant=NOTHING)._replace(
            broker=(*s.broker, run.grant)
        )
    else:
        returned = (back(run),) if run.phase == "unwound" and run.tie == "yes" else ()
        yield f"{run.message} leaves ({run.phase})", without(s, i)._replace(broker=s.broker + returned)


PHASES: dict[str, Callable[[State, int, Setup], Iterator[Step]]] = {
    "begin": arrive, "body": body, "stale": body, "parked": leave, "out": leave, "unwound": leave,
}  # fmt: skip


def crash(s: State, i: int, setup: Setup) -> State:
    """The broker gives it back if it still may. Only a crash after the end, with no mark, may make it run again."""
    run = s.running[i]
    m = run.message
    after = without(spend(s, "crash"), i)
    if run.phase == "body":
        after = after._replace(lock=s.lock._replace(state="dead"))
    if run.tie == "yes":
        after = after._replace(broker=(*after.broker, back(run)))
    failed = run.tie == "acked" and run.phase in {"body", "stale"}
    if m < 0 or not (failed or (run.phase == "out" and s.done[m] == NEVER)):
        return after
    need = ran(after, m).need[m] if failed else after.need[m]  # Celery says FAILURE
    return after._replace(need=put(after.need, m, need if need >= SPARE else need + SPARE))


def disturb(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """What can strike any delivery."""
    run = s.running[i]
    if left(s, "crash"):
        yield f"{run.message} crashes in {run.phase}", crash(s, i, setup)
    # Rare marks need the keeper's word: it is early enough but for the moment between release and acknowledgement.
    if left(s, "redeliver") and run.tie == "yes" and (run.phase != "out" or s.done[run.message] != NEVER):
        lock = s.lock._replace(word=True) if run.phase == "body" else s.lock
        moved = spend(in_phase(s, i, run.phase, tie="moved"), "redeliver")
        yield f"live {run.message} is redelivered ({run.phase})", moved._replace(
            lock=lock, broker=(*s.broker, back(run))
        )


def sweeps(s: State, setup: Setup) -> Iterator[Step]:
    """Time passes: dead holders' leases end, free locks are granted, grants fall due."""
    if s.lock.state == "dead":
        yield "the dead holder's lease ends", s._replace(lock=FREE)
    if not setup.has("due"):
        return
    if s.lock.state == "free" and waiting(s, setup):
        for after, grant in grants(s, setup):
            if grant.message >= 0:
                yield f"a sweep grants {grant.message}", after._replace(running=after.running + helper(grant))
    if s.lock.state == "grant" and not s.lock.word:
        m, entry = s.lock.message, s.entries[s.lock.message]
        assert entry
        entries = put(s.entries, m, entry._replace(tries=entry.tries + 1))
        running = s.running + helper(Copy(m, "o", entry.rank))
        yield f"a sweep claims {m}", s._replace(lock=s.lock._replace(word=True), entries=entries, running=running)
    if s.lock.state == "grant" and s.lock.word:
        m = s.lock.message
        coming = any(c.message == m for c in s.broker) or any(
            (r.message == m and r.phase == "begin") or r.grant.message == m for r in s.running
        )
        if not coming or left(s, "regrant"):
            for after, grant in overdue(spend(s, "regrant") if coming else s, setup):
                after = after._replace(running=after.running + helper(grant))
                yield f"the grant of {m} {'seems' if coming else 'is'} lost{granting(grant)}", after


def users(s: State, setup: Setup) -> Iterator[Step]:
    """Revoke, publish again, take the lock without a message; marks expire."""
    if left(s, "lock") and s.lock.state == "free" and not waiting(s, setup):
        run = Run(NOBODY, "", 0, "body", "acked", NOTHING)
        lock = Lock("own", NOBODY, word=False)
        yield "a Lock takes it", spend(s, "lock")._replace(lock=lock, running=(*s.running, run))
    for m, entry in enumerate(s.entries):
        mine = [run for run in s.running if run.message == m]
        holds = s.lock.state in {"own", "dead"} and s.lock.message == m and setup.has("twin")
        if left(s, "revoke") and not s.revoked[m] and s.need[m] % SPARE:
            after = spend(s, "revoke")._replace(revoked=put(s.revoked, m, value=True))
            for later, grant in end_waiter(after, m, setup) if entry and not holds else [(after, NOTHING)]:
                yield f"{m} is revoked{granting(grant)}", later._replace(running=later.running + helper(grant))
        if left(s, "republish") and not s.need[m] % SPARE and all(r.phase not in {"body", "stale"} for r in mine):
            again = spend(s, "republish")._replace(broker=(*s.broker, Copy(m, "f", 0)))
            yield f"{m} is published again", again._replace(need=put(s.need, m, s.need[m] + 1))
        if left(s, "expiry") and s.done[m] != NEVER and not (mine or entry):
            if all(c.message != m for c in s.broker) and all(r.grant.message != m for r in s.running):
                yield f"the mark of {m} expires", spend(s, "expiry")._replace(done=put(s.done, m, NEVER))


def unclaimed(s: State, after: State, setup: Setup) -> Iterator[Step]:
    """The same step by a process that cannot publish what it granted."""
    entry = after.entries[after.lock.message] if after.lock.state == "grant" and after.lock != s.lock else None
    if not (entry and after.lock.word and left(s, "elsewhere")):
        return
    m = after.lock.message
    running = [r._replace(grant=NOTHING) if r.grant.message == m and r not in s.running else r for r in after.running]
    yield "(elsewhere)", spend(after, "elsewhere")._replace(
        lock=after.lock._replace(word=not setup.has("claim")),
        entries=put(after.entries, m, entry._replace(tries=entry.tries - setup.has("claim"))),
        running=tuple(r for r in running if r.message >= 0 or r.grant.message >= 0 or r.phase != "out"),
    )


def steps(s: State, setup: Setup) -> Iterator[Step]:
    """Everything that can happen next."""
    for label, after in granting_steps(s, setup):
        yield label, after
        for how, other in unclaimed(s, after, setup):
            yield f"{label} {how}", other
    yield from sweeps(s, setup)


def granting_steps(s: State, setup: Setup) -> Iterator[Step]:
    yield from deliver(s, setup)
    for i, run in enumerate(s.running):
        yield from PHASES[run.phase](s, i, setup)
        yield from disturb(s, i, setup)
    yield from users(s, setup)
