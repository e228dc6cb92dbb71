"""Events around the lock: the broker delivers, workers run, publish, acknowledge and die.

The rest is in `environment_steps`.

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
elsewhere  who grants cannot publish to the broker of the granted message, so that a sweep has to
away       the store does not answer a message that arrives, so that its copy is published again without a rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.model.environment_steps import sweeps, users
from tests.model.protocol import arrive, end_waiter, ended, granting, in_phase, ran, release, unanswered
from tests.model.state import (
    EVENTS,
    FREE,
    NEVER,
    NEXT,
    NOTHING,
    NOW,
    SPARE,
    Copy,
    Run,
    Setup,
    State,
    Step,
    helped,
    left,
    put,
    spend,
    spent,
    without,
)


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


def back(run: Run) -> Copy:
    """The copy that the broker makes of a delivery."""
    return Copy(run.message, "p", run.rank, run.turn) if run.kind in {"o", "p"} else Copy(run.message, "r", 0)


def tied(s: State, i: int, tie: str) -> State:
    return s._replace(running=put(s.running, i, s.running[i]._replace(tie=tie)))


def deliver(s: State, setup: Setup) -> Iterator[Step]:
    for copy in dict.fromkeys(s.broker):
        m = copy.message
        at = s.broker.index(copy)
        rest = s._replace(broker=s.broker[:at] + s.broker[at + 1 :])
        rank = copy.rank if copy.kind in {"o", "p"} else NOW
        tie = "acked" if setup.early and not setup.has("hold") else "yes"
        run = Run(m, copy.kind, rank, "begin", tie, NOTHING, copy.turn)
        yield f"deliver {copy.kind}{m}", rest._replace(running=(*rest.running, run))
        # A worker that remembers the revocation ends it at receipt, unless it is done or holds.
        holds = s.lock.state in {"own", "dead"} and s.lock.message == m
        if s.revoked[m] and s.done[m] == NEVER and not holds and s.need[m]:
            for after, grant in end_waiter(rest, m, setup):
                yield f"{copy.kind}{m} is revoked at receipt{granting(grant)}", helped(after, grant)


def counted(s: State, run: Run, setup: Setup) -> State:
    """A holder's end is the only one, unless a lost lease let another execution run beside it."""
    return ran(s, run.message) if spent(s, "lease", setup) else ended(s, run.message)


def begin(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """A message reaches its lock, or a store that does not answer."""
    yield from arrive(s, i, setup)
    run = s.running[i]
    if left(s, "away"):
        yield f"{run.message} meets no store", spend(in_phase(s, i, "parked", unanswered(run, setup)), "away")


def body(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """A holder ends, or ends badly."""
    run = s.running[i]
    m = run.message
    for after, grant in release(s, i, setup, final=True):
        over = counted(after, run, setup) if m >= 0 else after
        yield f"{m} ends ({run.phase}){granting(grant)}", in_phase(over, i, "out", grant)
    if m >= 0 and left(s, "requeue") and run.tie != "acked":
        for after, grant in release(s, i, setup, final=False):
            yield f"{m} unwinds{granting(grant)}", spend(in_phase(after, i, "unwound", grant), "requeue")
    if left(s, "replace") and 0 <= m < setup.messages:
        new = m + setup.messages if setup.has("nest") else m
        broker, need = (*s.broker, Copy(new, "f", 0)), put(s.need, new, s.need[new] + 1)
        yield f"{m} replaces itself", spend(s, "replace")._replace(broker=broker, need=need)
    if left(s, "lease") and run.phase == "body":
        yield f"live {m} loses its lease", spend(in_phase(s, i, "stale"), "lease")._replace(lock=FREE)
    if setup.early and run.tie != "acked":
        yield f"{m} holds: acknowledged", tied(s, i, "acked")


def leave(s: State, i: int, _setup: Setup) -> Iterator[Step]:
    """After its script: publish what was granted, then acknowledge, or return the message after an exception."""
    run = s.running[i]
    if run.grant.message == run.message >= 0 and not run.grant.turn:
        # At once: were it to stay, its copy could be put back while it stays, and so on without an end.
        yield f"publish {run.message} and leave", without(published(s, run), i)
    elif run.grant.message >= 0:
        yield f"publish {run.grant.message}", noted(published(s, run), run.grant, i)
    else:
        returned = (back(run),) if run.phase == "unwound" and run.tie == "yes" else ()
        yield f"{run.message} leaves ({run.phase})", without(s, i)._replace(broker=s.broker + returned)


def published(s: State, run: Run) -> State:
    return s._replace(broker=(*s.broker, run.grant))


def noted(s: State, grant: Copy, i: int) -> State:
    """It is known to be published, also where this was for an earlier turn: the note names the message alone."""
    known = grant.turn and s.lock[:2] == ("grant", grant.message)
    s = s._replace(lock=s.lock._replace(word=True)) if known else s
    return in_phase(s, i, s.running[i].phase)


PHASES: dict[str, Callable[[State, int, Setup], Iterator[Step]]] = {
    "begin": begin, "body": body, "stale": body, "parked": leave, "out": leave, "unwound": leave,
}  # fmt: skip


def crash(s: State, i: int) -> State:
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


def disturb(s: State, i: int) -> Iterator[Step]:
    """Yield the events that can strike any delivery."""
    run = s.running[i]
    if left(s, "crash"):
        yield f"{run.message} crashes in {run.phase}", crash(s, i)
        if run.grant.message >= 0:
            yield f"{run.message} publishes {run.grant.message} and crashes", published(crash(s, i), run)
    # Rare marks are set by the watchdog. It is early enough, except between release and acknowledgement.
    if left(s, "redeliver") and run.tie == "yes" and (run.phase != "out" or s.done[run.message] != NEVER):
        lock = s.lock._replace(word=True) if run.phase == "body" else s.lock
        moved = spend(tied(s, i, "moved"), "redeliver")
        yield (
            f"live {run.message} is redelivered ({run.phase})",
            moved._replace(lock=lock, broker=(*s.broker, back(run))),
        )


def unclaimed(after: State) -> Iterator[Step]:
    """The same step by a process that cannot publish what it granted."""
    m = after.lock.message
    if not (after.lock.state == "grant" and after.lock.turn == NEXT and left(after, "elsewhere")):
        return
    running = [r._replace(grant=NOTHING) if r.grant[::3] == (m, NEXT) else r for r in after.running]
    yield (
        "(elsewhere)",
        spend(after, "elsewhere")._replace(
            running=tuple(r for r in running if r.message >= 0 or r.grant.message >= 0 or r.phase != "out")
        ),
    )


def steps(s: State, setup: Setup) -> Iterator[Step]:
    """Everything that can happen next."""
    for label, after in granting_steps(s, setup):
        yield label, after
        for how, other in unclaimed(after):
            yield f"{label} {how}", other
    yield from sweeps(s, setup)


def granting_steps(s: State, setup: Setup) -> Iterator[Step]:
    yield from deliver(s, setup)
    for i, run in enumerate(s.running):
        yield from PHASES[run.phase](s, i, setup)
        yield from disturb(s, i)
    yield from users(s, setup)
