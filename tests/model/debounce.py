"""``debounce`` for one lock name, as a state machine: bursts of calls, time, kills, duplicates and lost replies.

Each step is one script of the store, one step of a process outside it, a tick of time, or one fault. Calls arrive in
the order of their numbers, at any time. A rank is the order in which workers received them. The queue's own rules are
explored in `protocol`; here they are as coarse as the rules of debouncing allow.

Rules, each of which a test leaves out:

keep     another delivery of a waiting call changes neither its place nor its due time
max      the due time is at most `MAX` ticks after the first waiting call of the burst
first    a call that replaces a waiter inherits the time of the first waiting call
later    a call is not due before the waiter that it replaces
older    a call that is older than the newest waiter replaces nothing: it is replaced itself
started  a call that is older than the last one that started never starts
itself   a delivery of the newest call is not older than another delivery of that call
touch    a call that was granted the lock is not replaced
over     a replaced waiter stays in the queue until its end is stored; if it is granted meanwhile, that delivery ends it
stay     it stays there also while that delivery ends it
due      the sweeper grants the free lock to the waiter that is due, whichever process parked it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.breadth_first import Verdict
from tests.model.breadth_first import explore as walk

#: Ticks without a newer call; ticks from the first waiting call; ticks until a replaced waiter is looked at again.
DEBOUNCE, MAX, AGAIN = 2, 3, 1
#: crash: a process dies, in any phase. lost: a reply is lost, and the script runs again. redeliver: the broker delivers
#: a message whose delivery is alive. regrant: a grant ends although its copy is on its way. revoke: a user revokes a
#: waiter. slow: a process needs more time to store an end than the store waits. eta: a call has waited for its ETA, so
#: its own quiet time is over when it parks.
EVENTS = ("crash", "lost", "redeliver", "regrant", "revoke", "slow", "eta")
RULES = frozenset(["keep", "max", "first", "later", "older", "started", "itself", "touch", "over", "stay", "due"])
NOBODY = -1
RAN, REVOKED, TWO = 1, 2, 3


class Copy(NamedTuple):
    """A message at the broker. Rank 0: it gets one at receipt. Grant 1: the one that stands; -1: an old one."""

    call: int
    rank: int = 0
    grant: int = 0


class Entry(NamedTuple):
    """A waiter: its rank, the ticks until it is due, whether it was replaced, and which waiter it replaced."""

    rank: int
    left: int
    over: bool = False
    evicted: int = NOBODY


class Delivery(NamedTuple):
    """A delivery and its phase: begin, parked, ending, body, out.

    Args:
        copy: The message, as the broker would deliver it again.
        rank: The rank of its call.
        phase: One of these.
        ends: The waiter whose end this process has to store.
        stored: Its result is stored, but not its done mark.
        took: Its script took the lock, and the reply was lost.
    """

    copy: Copy
    rank: int
    phase: str = "begin"
    ends: int = NOBODY
    stored: bool = False
    took: bool = False


class Lock(NamedTuple):
    """The lock: free, own, dead or grant; its call; whether the grant is published."""

    state: str = "free"
    call: int = NOBODY
    published: bool = False


class Record(NamedTuple):
    """The store's record of a name: newest call and its rank, ticks until it runs anyway, last started rank."""

    newest: int = NOBODY
    rank: int = 0
    left: int = 0
    started: int = 0


class Ghost(NamedTuple):
    """Values that only the check reads: ticks since the last call and since the first one, the last start."""

    quiet: int = DEBOUNCE
    age: int = 0
    last: int = NOBODY
    fault: str = ""


class State(NamedTuple):
    arrived: int
    broker: tuple[Copy, ...]
    deliveries: tuple[Delivery, ...]
    lock: Lock
    entries: tuple[Entry | None, ...]
    done: tuple[bool, ...]
    ends: tuple[int, ...]
    revoked: tuple[bool, ...]
    record: Record
    ghost: Ghost
    budget: tuple[int, ...]


@dataclass(frozen=True)
class Setup:
    """The number of calls, the number of each event, and the rules that are left out."""

    calls: int = 2
    events: tuple[tuple[str, int], ...] = ()
    without: frozenset[str] = field(default=frozenset())
    #: Judge calls by the order in which they were sent, which workers cannot know.
    sent: bool = False

    def has(self, rule: str) -> bool:
        return rule not in self.without


Step = tuple[str, State]


def first(setup: Setup) -> State:
    n, events = setup.calls, dict(setup.events)
    budget = tuple(events.get(event, 0) for event in EVENTS)
    return State(
        0, (), (), Lock(), (None,) * n, (False,) * n, (0,) * n, (False,) * n, Record(), Ghost(), budget
    )  # fmt: skip


def steps(s: State, setup: Setup) -> Iterator[Step]:
    for label, after in _steps(s, setup):
        yield label, _trimmed(after)


def _steps(s: State, setup: Setup) -> Iterator[Step]:
    yield from _deliver(s, setup)
    for i, d in enumerate(s.deliveries):
        for label, after, reply in _goes_on(s, i, setup):
            yield f"{d.copy.call} {label}", after
            if reply and _left(s, "lost") and len(after.deliveries) == len(s.deliveries):
                # The script ran, and runs again: the delivery knows nothing of it.
                took = after.deliveries[i].phase == "body"
                again = d._replace(took=took)
                yield f"{d.copy.call} {label}, reply lost", _spent(_with(after, i, again), "lost")
        yield from _faults(s, i)
    yield from _sweeps(s, setup)
    yield from _revokes(s)
    yield from _ticks(s, setup)


def _deliver(s: State, setup: Setup) -> Iterator[Step]:
    now = _last_rank(s) + 1
    if s.arrived < setup.calls:
        call = s.arrived
        yield f"{call} arrives", s._replace(
            arrived=call + 1, deliveries=(*s.deliveries, Delivery(Copy(call), now))
        )  # fmt: skip
    for copy in dict.fromkeys(s.broker):
        at = s.broker.index(copy)
        rest = s._replace(broker=s.broker[:at] + s.broker[at + 1 :])
        yield f"deliver {copy.call}", rest._replace(deliveries=(*rest.deliveries, Delivery(copy, copy.rank or now)))


def _goes_on(s: State, i: int, setup: Setup) -> Iterator[tuple[str, State, bool]]:
    d = s.deliveries[i]
    call = d.copy.call
    if d.phase == "begin":
        yield from ((label, after, True) for label, after in _asks(s, i, setup))
    elif d.phase in ("parked", "ending"):
        if d.ends == NOBODY:
            yield "is acknowledged", _without(s, i), False
        elif not d.stored:
            yield f"stores the end of {d.ends}", _with(_ended(s, d.ends, REVOKED), i, d._replace(stored=True)), False
        else:
            after = _with(_taken_out(s, d.ends), i, d._replace(ends=NOBODY, stored=False))
            yield f"marks {d.ends} done", after, False
    elif d.phase == "body":
        after = _ended(s, call, RAN)._replace(lock=Lock(), done=_put(s.done, call, value=True))
        yield "ends its body", _with(_granted(after), i, d._replace(phase="out")), False
    elif s.lock.state == "grant" and not s.lock.published:
        yield "publishes the grant and is acknowledged", _published(_without(s, i)), False
    else:
        yield "is acknowledged", _without(s, i), False


def _asks(s: State, i: int, setup: Setup) -> Iterator[Step]:
    """The acquire script."""
    d = s.deliveries[i]
    call, entry = d.copy.call, s.entries[d.copy.call]
    if d.took:
        yield "learns that it holds the lock", _with(s, i, d._replace(phase="body", took=False))
    elif s.done[call]:
        yield "is done", _with(_removed(s, call), i, d._replace(phase="out"))
    elif s.lock.state in ("own", "dead") and s.lock.call == call:
        back = (*s.broker, Copy(call, d.rank))
        yield "is put back", _without(s, i)._replace(broker=back)
    elif entry and s.lock[:2] == ("grant", call) and d.copy.grant == 1:
        yield _uses_grant(s, i, entry, setup)
    elif entry:
        yield _waits_already(s, i, entry, setup)
    else:
        yield from _parks(s, i, setup)


def _uses_grant(s: State, i: int, entry: Entry, setup: Setup) -> Step:
    d = s.deliveries[i]
    call = d.copy.call
    itself = call == s.record.newest and setup.has("itself")
    if not entry.over and not (entry.rank < s.record.started and not itself and setup.has("started")):
        return "takes the lock", _takes(s, i)
    stays = entry._replace(left=AGAIN, over=True) if setup.has("stay") else None
    freed = _no_grant(s)._replace(entries=_put(s.entries, call, stays))
    return "was replaced", _with(_granted(freed), i, _end_of(d, call))


def _waits_already(s: State, i: int, entry: Entry, setup: Setup) -> Step:
    d = s.deliveries[i]
    if entry.over or s.lock[:2] == ("grant", d.copy.call) or setup.has("keep"):
        evicted = entry.evicted if entry.evicted >= 0 and s.entries[entry.evicted] else NOBODY
        return "is parked already", _with(s, i, d._replace(phase="parked", ends=evicted))
    again = _put(s.entries, d.copy.call, entry._replace(left=DEBOUNCE))
    return "is parked again", _with(s._replace(entries=again), i, d._replace(phase="parked"))


def _parks(s: State, i: int, setup: Setup) -> Iterator[Step]:
    d, record = s.deliveries[i], s.record
    call = d.copy.call
    newest = s.entries[record.newest] if record.newest >= 0 else None
    pending = bool(newest and not newest.over)
    is_old = pending and d.rank < record.rank and setup.has("older")
    itself = call == record.newest and setup.has("itself")
    if is_old or (d.rank < record.started and not itself and setup.has("started")):
        stays = _put(s.entries, call, Entry(d.rank, AGAIN, over=True))
        yield "is older than the newest", _with(s._replace(entries=stays), i, _end_of(d, call))
        return
    kinds = [("parks", DEBOUNCE)] + ([("parks after its ETA", 0)] if _left(s, "eta") else [])
    for label, own in kinds:
        spent = s if own else _spent(s, "eta")
        yield label, _parked(spent, i, own, pending=pending, setup=setup)


def _parked(s: State, i: int, own: int, *, pending: bool, setup: Setup) -> State:
    d, record, ghost = s.deliveries[i], s.record, s.ghost
    call, evicted = d.copy.call, NOBODY
    waits = pending and s.lock[:2] != ("grant", record.newest)
    within, wait, entries = MAX, own, s.entries
    if pending and (waits or not setup.has("touch")):
        old = s.entries[record.newest]
        assert old
        evicted = record.newest
        if setup.has("first"):
            within = record.left
        if setup.has("later"):
            wait = max(wait, old.left)
        entries = _put(entries, evicted, old._replace(over=True, left=AGAIN) if setup.has("over") else None)
    if setup.has("max"):
        wait = min(wait, within)
    ghost = ghost._replace(
        quiet=0 if own else (ghost.quiet if waits else DEBOUNCE), age=ghost.age if waits else 0
    )  # fmt: skip
    s = s._replace(
        entries=_put(entries, call, Entry(d.rank, wait, evicted=evicted)),
        record=Record(call, d.rank, within, record.started),
        ghost=ghost,
    )
    return _with(_granted(s), i, d._replace(phase="parked", ends=evicted))


def _end_of(d: Delivery, call: int) -> Delivery:
    return d._replace(phase="ending", ends=call)


def _takes(s: State, i: int) -> State:
    d, record = s.deliveries[i], s.record
    call, entry = d.copy.call, s.entries[d.copy.call]
    assert entry
    older = entry.rank < record.started and call != s.ghost.last
    fault = s.ghost.fault or ("an older call starts after a newer one" if older else "")
    fault = fault or ("a call that has its end starts" if s.ends[call] else "")
    s = _no_grant(s)._replace(
        lock=Lock("own", call),
        entries=_put(s.entries, call, None),
        record=record._replace(started=max(record.started, entry.rank)),
        ghost=s.ghost._replace(last=call, fault=fault),
    )
    # The store keeps the rank: a copy that is delivered again after a crash carries it.
    return _with(s, i, d._replace(phase="body", copy=Copy(call, entry.rank, -1)))


def _granted(s: State) -> State:
    """Grant the free lock to the first waiter that is due."""
    if s.lock.state != "free":
        return s
    ready = [(entry.rank, call) for call, entry in enumerate(s.entries) if entry and entry.left == 0]
    if not ready:
        return s
    call = min(ready)[1]
    entry, ghost = s.entries[call], s.ghost
    assert entry
    if call == s.record.newest and not entry.over and ghost.quiet < DEBOUNCE and ghost.age < MAX:
        ghost = ghost._replace(fault=ghost.fault or "it does not wait until the calls have stopped")
    return s._replace(lock=Lock("grant", call), ghost=ghost)


def _no_grant(s: State) -> State:
    """The grant is over: the copies that were published for it can take nothing."""
    broker = tuple(copy._replace(grant=-1) if copy.grant else copy for copy in s.broker)
    deliveries = tuple(
        d._replace(copy=d.copy._replace(grant=-1)) if d.copy.grant else d for d in s.deliveries
    )  # fmt: skip
    return s._replace(lock=Lock(), broker=broker, deliveries=deliveries)


def _published(s: State) -> State:
    call = s.lock.call
    entry = s.entries[call]
    assert entry
    return s._replace(lock=s.lock._replace(published=True), broker=(*s.broker, Copy(call, entry.rank, 1)))


def _removed(s: State, call: int) -> State:
    """Take a waiter out. Its grant goes to the next one."""
    granted = s.lock[:2] == ("grant", call)
    s = s._replace(entries=_put(s.entries, call, None))
    return _granted(_no_grant(s)) if granted else s


def _taken_out(s: State, call: int) -> State:
    if s.lock.state in ("own", "dead") and s.lock.call == call:
        return s
    return _removed(s._replace(done=_put(s.done, call, value=True)), call)


def _ended(s: State, call: int, end: int) -> State:
    """Note the end of a call. The same end twice is one end."""
    now = end if s.ends[call] in (0, end) else TWO
    return s._replace(ends=_put(s.ends, call, now))


def _faults(s: State, i: int) -> Iterator[Step]:
    d = s.deliveries[i]
    back = (*s.broker, d.copy)
    if _left(s, "crash"):
        after = _spent(_without(s, i), "crash")._replace(broker=back)
        if d.phase == "body" or d.took:
            after = after._replace(lock=s.lock._replace(state="dead"))
        yield f"{d.copy.call} crashes in {d.phase}", after
    if _left(s, "redeliver"):
        yield f"live {d.copy.call} is redelivered ({d.phase})", _spent(s, "redeliver")._replace(broker=back)
    entry = s.entries[d.ends] if d.ends >= 0 else None
    if entry and entry.left and _left(s, "slow"):
        late = s._replace(entries=_put(s.entries, d.ends, entry._replace(left=0)))
        yield f"{d.copy.call} is slow to end {d.ends}", _spent(late, "slow")


def _sweeps(s: State, setup: Setup) -> Iterator[Step]:
    lock = s.lock
    if lock.state == "dead":
        yield "the dead holder's lease ends", _granted(s._replace(lock=Lock()))
    if lock.state == "free" and setup.has("due"):
        after = _granted(s)
        if after.lock.state == "grant":
            yield f"a sweep grants {after.lock.call}", _published(after)
            if _left(s, "crash"):
                yield f"a sweep grants {after.lock.call} and crashes", _spent(after, "crash")
    if lock.state == "grant" and not lock.published:
        yield f"a sweep publishes {lock.call}", _published(s)
    if lock.state == "grant" and lock.published and _left(s, "regrant"):
        entry = s.entries[lock.call]
        assert entry
        lost = _no_grant(s)._replace(entries=_put(s.entries, lock.call, entry._replace(left=AGAIN)))
        yield f"the grant of {lock.call} seems lost", _spent(_granted(lost), "regrant")


def _revokes(s: State) -> Iterator[Step]:
    for call, entry in enumerate(s.entries):
        if _left(s, "revoke") and entry and not entry.over:
            after = _taken_out(_ended(s, call, REVOKED), call)
            yield f"{call} is revoked", _spent(after, "revoke")._replace(revoked=_put(s.revoked, call, value=True))


def _ticks(s: State, setup: Setup) -> Iterator[Step]:
    """Time passes, unless something is due at once."""
    if not any(s.entries) or (s.lock.state == "grant" and not s.lock.published):
        return
    if s.lock.state == "free" and any(entry and entry.left == 0 for entry in s.entries) and setup.has("due"):
        return
    ghost, newest = s.ghost, s.entries[s.record.newest] if s.record.newest >= 0 else None
    due = newest and not newest.over and (ghost.quiet == DEBOUNCE or ghost.age == MAX)
    if s.lock.state == "free" and due and _left(s, "regrant") == dict(setup.events).get("regrant", 0):
        ghost = ghost._replace(fault=ghost.fault or "it waits for too long")
    after = s._replace(
        entries=tuple(entry and entry._replace(left=_sooner(s, call, entry)) for call, entry in enumerate(s.entries)),
        record=s.record._replace(left=max(0, s.record.left - 1)),
        ghost=ghost._replace(quiet=min(DEBOUNCE, ghost.quiet + 1), age=min(MAX, ghost.age + 1)),
    )
    if after != s:
        yield "a tick", after


def _sooner(s: State, call: int, entry: Entry) -> int:
    """Return the ticks that are left. A process that lives stores an end in time, or it is an event (slow)."""
    in_time = entry.over and any(d.ends == call for d in s.deliveries)
    return entry.left if in_time else max(0, entry.left - 1)


def _trimmed(s: State) -> State:
    """Count ranks anew, and sort what has no order. A delivery that has asked has no use for its rank."""
    deliveries = [d if d.phase == "begin" else d._replace(rank=0) for d in s.deliveries]
    ranks = {0, s.record.rank, s.record.started}
    ranks.update(copy.rank for copy in s.broker)
    ranks.update(rank for d in deliveries for rank in (d.rank, d.copy.rank))
    ranks.update(entry.rank for entry in s.entries if entry)
    name = {rank: i for i, rank in enumerate(sorted(ranks))}
    return s._replace(
        broker=tuple(sorted(copy._replace(rank=name[copy.rank]) for copy in s.broker)),
        deliveries=tuple(
            sorted(d._replace(rank=name[d.rank], copy=d.copy._replace(rank=name[d.copy.rank])) for d in deliveries)
        ),
        entries=tuple(entry and entry._replace(rank=name[entry.rank]) for entry in s.entries),
        record=s.record._replace(rank=name[s.record.rank], started=name[s.record.started]),
    )


def _last_rank(s: State) -> int:
    ranks = [s.record.rank, s.record.started, *(d.rank for d in s.deliveries), *(copy.rank for copy in s.broker)]
    return max([*ranks, *(d.copy.rank for d in s.deliveries), *(entry.rank for entry in s.entries if entry)])


def _put(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]  # of any type
    return (*values[:i], value, *values[i + 1 :])


def _with(s: State, i: int, delivery: Delivery) -> State:
    return s._replace(deliveries=_put(s.deliveries, i, delivery))


def _without(s: State, i: int) -> State:
    return s._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])


def _left(s: State, event: str) -> int:
    return s.budget[EVENTS.index(event)]


def _spent(s: State, event: str) -> State:
    i = EVENTS.index(event)
    return s._replace(budget=_put(s.budget, i, s.budget[i] - 1))


def wrong(s: State, setup: Setup, *, at_rest: bool) -> str:
    if s.ghost.fault:
        return s.ghost.fault
    if sum(d.phase == "body" for d in s.deliveries) > 1:
        return "two bodies run"
    if TWO in s.ends:
        return "a call has two ends"
    return _wrong_end(s, setup) if at_rest else ""


def _wrong_end(s: State, setup: Setup) -> str:
    if s.lock.state != "free" or any(s.entries):
        return "a waiter is stuck"
    if 0 in s.ends:
        return "a call is lost"
    newest = setup.calls - 1 if setup.sent else s.record.newest
    return "the newest call did not run" if s.ends[newest] != RAN and not any(s.revoked) else ""


def explore(setup: Setup) -> Verdict:
    return walk(first(setup), lambda s: steps(s, setup), lambda s, rest: wrong(s, setup, at_rest=rest))


def setup_of(words: str) -> Setup:
    """Return the setup that words such as "calls=3 crash=1 without=over" describe."""
    given = dict(word.split("=") for word in words.split())
    without = frozenset(given.pop("without", "").split(",")) & RULES
    calls, sent = int(given.pop("calls", 2)), given.pop("sent", "0") == "1"
    return Setup(calls, tuple((event, int(number)) for event, number in given.items()), without, sent)
