"""``on_conflict="replace"`` for one lock name, as a state machine: the newest call stops the running one.

`store/redis/scripts/lib/replace.lua` follows it. Each step is one script, one step of a process outside it, or one
fault. Calls arrive in the order of their numbers. The queue's rules are explored in `protocol`, and those of a replaced
waiter in `debounce`.

Rules, each of which a test leaves out:

own      a stop request belongs to one acquisition: it ends with the lock
mark     the script that writes a stop request marks the holder's message. A delivery with this mark ends REVOKED
look     a replaced call leaves an end alone that is stored already: its worker may have died before it acknowledged
older    a call that is older than the waiter or the last call that started replaces nothing and ends REVOKED
over     a replaced waiter stays in the queue until its end is stored; if it is granted meanwhile, it ends itself
late     a granted call that takes the lock although a newer one waits ends REVOKED instead
left     if no body has ended for `MAX` ticks, nothing is replaced. The ticks count from the first start since an end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.breadth_first import Verdict
from tests.model.breadth_first import explore as walk

#: Ticks without an end of a body after which nothing is replaced.
MAX = 2
#: crash: a process dies, in any phase. kill: the pool child of a holder that was asked to stop is
#: killed, and its message is delivered again with a new rank. lost: a
#: reply is lost, and the script runs again. deaf: a body does not stop when it is asked to.
EVENTS = ("crash", "kill", "lost", "deaf")
RULES = frozenset(["own", "mark", "look", "older", "over", "late", "left"])
NOBODY = -1
RAN, REVOKED, TWO = 1, 2, 3


class Delivery(NamedTuple):
    """A delivery and its phase: begin, parked, refused, body, stopped, ended, out.

    Args:
        call: Its call.
        grant: It was published for the grant that stands.
        fresh: It has a new rank, as of the newest call.
        phase: One of these.
        ends: The waiter whose end this process has to store.
        took: Its script took the lock, and the reply was lost.
        deaf: Its body does not stop.
    """

    call: int
    grant: bool = False
    fresh: bool = False
    phase: str = "begin"
    ends: int = NOBODY
    took: bool = False
    deaf: bool = False


class Lock(NamedTuple):
    """The lock: free, own, dead or grant; its call; whether a stop is requested; whether the grant is published."""

    state: str = "free"
    call: int = NOBODY
    stop: bool = False
    published: bool = False


class State(NamedTuple):
    """Everything there is. A waiter is "": none, "waits" or "over". ``age`` counts the ticks since a body ended."""

    arrived: int
    broker: tuple[tuple[int, bool, bool], ...]
    deliveries: tuple[Delivery, ...]
    lock: Lock
    waiters: tuple[str, ...]
    marks: tuple[bool, ...]
    done: tuple[bool, ...]
    ends: tuple[int, ...]
    started: int
    age: int
    stray: bool
    fault: str
    budget: tuple[int, ...]


@dataclass(frozen=True)
class Setup:
    """The number of calls, the number of each event, and the rules that are left out."""

    calls: int = 2
    events: tuple[tuple[str, int], ...] = ()
    without: frozenset[str] = field(default=frozenset())

    def has(self, rule: str) -> bool:
        return rule not in self.without


Step = tuple[str, State]


def first(setup: Setup) -> State:
    n, events = setup.calls, dict(setup.events)
    budget = tuple(events.get(event, 0) for event in EVENTS)
    no = (False,) * n
    return State(0, (), (), Lock(), ("",) * n, no, no, (0,) * n, NOBODY, 0, stray=False, fault="", budget=budget)


def steps(s: State, setup: Setup) -> Iterator[Step]:
    for label, after in _steps(s, setup):
        yield label, after._replace(broker=tuple(sorted(after.broker)), deliveries=tuple(sorted(after.deliveries)))


def _steps(s: State, setup: Setup) -> Iterator[Step]:
    if s.arrived < setup.calls:
        arrived = (*s.deliveries, Delivery(s.arrived))
        yield f"{s.arrived} arrives", s._replace(arrived=s.arrived + 1, deliveries=arrived)
    for copy in dict.fromkeys(s.broker):
        at = s.broker.index(copy)
        rest = s._replace(broker=s.broker[:at] + s.broker[at + 1 :])
        yield f"deliver {copy[0]}", rest._replace(deliveries=(*rest.deliveries, Delivery(*copy)))
    for i, d in enumerate(s.deliveries):
        for label, after in _goes_on(s, i, setup):
            yield f"{d.call} {label}", after
            if d.phase == "begin" and _left(s, "lost") and len(after.deliveries) == len(s.deliveries):
                again = d._replace(took=after.deliveries[i].phase == "body")
                yield f"{d.call} {label}, reply lost", _spent(_with(after, i, again), "lost")
        yield from _faults(s, i)
    yield from _sweeps(s, setup)
    if s.age < MAX and s.lock.state != "free":
        yield "a tick", s._replace(age=s.age + 1)


def _goes_on(s: State, i: int, setup: Setup) -> Iterator[Step]:
    d = s.deliveries[i]
    if d.phase == "begin":
        yield _asks(s, i, setup)
    elif d.phase == "body":
        yield "ends its body", _with(_ended(s, d.call, RAN), i, d._replace(phase="ended"))
        if (s.lock.stop or s.stray) and not d.deaf:
            fault = s.fault or ("" if s.lock.stop else "a body is stopped although no newer call waits")
            yield "is asked to stop", _with(s._replace(fault=fault), i, d._replace(phase="stopped"))
    elif d.phase == "stopped":
        yield "stores its end", _with(_revoked(s, d.call, setup), i, d._replace(phase="ended"))
    elif d.phase == "ended":
        yield "releases", _with(_released(s, d.call, setup), i, d._replace(phase="out"))
    elif d.phase in ("parked", "refused") and d.ends != NOBODY:
        after = _taken_out(_revoked(s, d.ends, setup), d.ends)
        yield f"stores the end of {d.ends}", _with(after, i, d._replace(ends=NOBODY))
    else:
        if s.lock.state == "grant" and not s.lock.published:
            yield "publishes the grant", _published(s)
        yield "is acknowledged", s._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])


def _asks(s: State, i: int, setup: Setup) -> Step:
    """The acquire script."""
    d = s.deliveries[i]
    call, lock = d.call, s.lock
    if d.took:
        return "learns that it holds the lock", _with(s, i, d._replace(phase="body", took=False))
    if s.done[call]:
        return "is done", _with(_taken_out(s, call), i, d._replace(phase="out"))
    if lock.state in ("own", "dead") and lock.call == call:
        rest = s._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])
        return "is put back", rest._replace(broker=(*s.broker, (call, False, d.fresh)))
    return _asks_anew(s, i, setup)


def _asks_anew(s: State, i: int, setup: Setup) -> Step:
    d = s.deliveries[i]
    call, lock = d.call, s.lock
    granted = lock.state == "grant" and lock.call == call
    mine = granted and d.grant
    if s.waiters[call] and not mine:
        over = s.waiters[call] == "over" and not granted
        return "is parked already", _with(s, i, d._replace(phase="parked", ends=call if over else NOBODY))
    newer = s.age < MAX and any(state == "waits" for state in s.waiters[call + 1 :])
    older = not d.fresh and _is_older(s, call) and setup.has("older")
    if s.marks[call] or s.waiters[call] == "over" or older or (mine and newer and setup.has("late")):
        waiters = _put(s.waiters, call, "over" if setup.has("over") else "")
        after = s._replace(waiters=waiters, marks=_put(s.marks, call, value=False), lock=Lock() if mine else lock)
        return "was replaced", _granted(_with(after, i, d._replace(phase="refused", ends=call)))
    if mine or (lock.state == "free" and not any(s.waiters)):
        fault = s.fault or ("a call that has its end starts" if s.ends[call] == REVOKED else "")
        fault = fault or ("a call starts although a newer one waits" if newer else "")
        waiters, started = _put(s.waiters, call, ""), max(s.started, call)
        # Without a grant, no call waited, so no call has stopped another one.
        age = s.age if mine else 0
        took = s._replace(lock=Lock("own", call), waiters=waiters, started=started, fault=fault, age=age)
        return "takes the lock", _with(took, i, d._replace(phase="body"))
    return "parks", _parks(s, i, setup)


def _is_older(s: State, call: int) -> bool:
    """Ranks are the numbers of the calls here."""
    waits = any(state == "waits" for state in s.waiters[call + 1 :]) and not s.waiters[call]
    return call < s.started or waits


def _parks(s: State, i: int, setup: Setup) -> State:
    """It becomes the only waiter, and asks the holder to stop."""
    d, lock = s.deliveries[i], s.lock
    granted = lock.call if lock.state == "grant" else NOBODY
    older = next((call for call, state in enumerate(s.waiters) if state == "waits" and call != granted), NOBODY)
    waiters, ends = _put(s.waiters, d.call, "waits"), NOBODY
    if older != NOBODY:
        ends = older
        waiters = _put(waiters, older, "over" if setup.has("over") else "")
    stops = lock.state in ("own", "dead") and not lock.stop and (s.age < MAX or not setup.has("left"))
    fault = s.fault or ("a body is stopped although none has ended for long" if stops and s.age == MAX else "")
    s = s._replace(waiters=waiters, fault=fault)
    if stops:
        s = s._replace(lock=lock._replace(stop=True), stray=s.stray or not setup.has("own"))
        if setup.has("mark"):
            s = s._replace(marks=_put(s.marks, lock.call, value=True))
    return _with(_granted(s), i, d._replace(phase="parked", ends=ends))


def _granted(s: State) -> State:
    """Grant the free lock to the first waiter. A replaced one is granted it only if no process stores its end."""
    ending = {d.ends for d in s.deliveries}
    ready = (call for call, state in enumerate(s.waiters) if state == "waits" or (state and call not in ending))
    call = next(ready, NOBODY)
    if s.lock.state != "free" or call == NOBODY:
        return s
    broker = tuple((copy, False, fresh) for copy, _, fresh in s.broker)
    deliveries = tuple(d._replace(grant=False) for d in s.deliveries)
    return s._replace(lock=Lock("grant", call), broker=broker, deliveries=deliveries)


def _published(s: State) -> State:
    return s._replace(lock=s.lock._replace(published=True), broker=(*s.broker, (s.lock.call, True, False)))


def _released(s: State, call: int, setup: Setup) -> State:
    marks = _put(s.marks, call, value=False)
    freed = s._replace(lock=Lock(), done=_put(s.done, call, value=True), marks=marks)
    age = 0 if s.ends[call] == RAN else s.age
    return _granted(freed._replace(age=age, stray=s.stray and not setup.has("own")))


def _taken_out(s: State, call: int) -> State:
    """The end of a replaced call is stored."""
    granted = s.lock.state == "grant" and s.lock.call == call
    if s.lock.state in ("own", "dead") and s.lock.call == call:
        return s
    done, marks = _put(s.done, call, value=True), _put(s.marks, call, value=False)
    s = s._replace(waiters=_put(s.waiters, call, ""), done=done, marks=marks)
    return _granted(s._replace(lock=Lock())) if granted else s


def _revoked(s: State, call: int, setup: Setup) -> State:
    return s if s.ends[call] and setup.has("look") else _ended(s, call, REVOKED)


def _ended(s: State, call: int, end: int) -> State:
    return s._replace(ends=_put(s.ends, call, end if s.ends[call] in (0, end) else TWO))


def _faults(s: State, i: int) -> Iterator[Step]:
    d = s.deliveries[i]
    stopped = d.phase == "stopped" or (d.phase == "ended" and s.ends[d.call] == REVOKED)
    for event in ("crash", *(("kill",) if stopped else ())):
        if _left(s, event):
            rest = _spent(s, event)._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])
            if d.phase in ("body", "stopped", "ended") or d.took:
                rest = rest._replace(lock=s.lock._replace(state="dead"))
            fresh = d.fresh or (event == "kill" and not d.grant)
            copy = (d.call, d.grant, fresh)
            yield f"{d.call} dies in {d.phase} ({event})", rest._replace(broker=(*s.broker, copy))
    if d.phase == "body" and not d.deaf and _left(s, "deaf"):
        yield f"{d.call} does not listen", _spent(_with(s, i, d._replace(deaf=True)), "deaf")


def _sweeps(s: State, setup: Setup) -> Iterator[Step]:
    if s.lock.state == "dead":
        yield "the dead holder's lease ends", _granted(s._replace(lock=Lock(), stray=s.stray and not setup.has("own")))
    if s.lock.state == "free" and any(s.waiters):
        after = _granted(s)
        if after.lock != s.lock:
            yield f"a sweep grants {after.lock.call}", after
    if s.lock.state == "grant" and not s.lock.published:
        yield f"a sweep publishes {s.lock.call}", _published(s)


def _put(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]  # of any type
    return (*values[:i], value, *values[i + 1 :])


def _with(s: State, i: int, delivery: Delivery) -> State:
    return s._replace(deliveries=_put(s.deliveries, i, delivery))


def _left(s: State, event: str) -> int:
    return s.budget[EVENTS.index(event)]


def _spent(s: State, event: str) -> State:
    i = EVENTS.index(event)
    return s._replace(budget=_put(s.budget, i, s.budget[i] - 1))


def wrong(s: State, setup: Setup, *, at_rest: bool) -> str:
    if s.fault:
        return s.fault
    if sum(d.phase in ("body", "stopped") for d in s.deliveries) > 1:
        return "two bodies run"
    if TWO in s.ends:
        return "a call has two ends"
    return _wrong_end(s, setup) if at_rest else ""


def _wrong_end(s: State, setup: Setup) -> str:
    if s.lock.state != "free" or any(s.waiters):
        return "a waiter is stuck"
    if 0 in s.ends:
        return "a call is lost"
    return "" if s.ends[setup.calls - 1] == RAN else "the newest call did not run"


def explore(setup: Setup) -> Verdict:
    return walk(first(setup), lambda s: steps(s, setup), lambda s, rest: wrong(s, setup, at_rest=rest))


def setup_of(words: str) -> Setup:
    """Return the setup that words such as "calls=3 crash=1 without=mark" describe."""
    given = dict(word.split("=") for word in words.split())
    without = frozenset(given.pop("without", "").split(",")) & RULES
    return Setup(int(given.pop("calls", 2)), tuple((event, int(number)) for event, number in given.items()), without)
