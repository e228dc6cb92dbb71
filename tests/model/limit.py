"""``limit=N`` for one lock name, as a state machine: N locks (seats) that share one queue.

The scripts in `store/redis/scripts/seats` follow it. Each step is one script, one step of a process outside it, or one
fault. Calls are alike and have no order here: the order of waiters is explored in `protocol`. The code cannot see that
the last worker with a larger limit has ended. It waits until no acquisition or renewal has had that limit for a minute.

Rules, each of which a test leaves out:

own     a release frees the seat of its own acquisition only, also if it is sent twice
every   a call looks for its own message at every seat, also at those above its worker's limit
stored  the store keeps the largest limit of the workers: a worker with a smaller one uses it too
grow    the script that raises the limit grants the new seats to waiters
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.breadth_first import Verdict
from tests.model.breadth_first import explore as walk

#: crash: a process dies, in any phase. again: a release is sent twice, the second copy late. redeliver: the broker
#: delivers a message whose delivery is alive. grown: the limit of a worker that starts now is larger. shrunk: the last
#: worker with the larger limit has ended.
EVENTS = ("crash", "again", "redeliver", "grown", "shrunk")
RULES = frozenset(["own", "every", "stored", "grow"])
NOBODY = -1


class Delivery(NamedTuple):
    """A delivery: its call, the limit of its worker, the seat granted to it or held by it, and its phase."""

    call: int
    limit: int
    seat: int = NOBODY
    phase: str = "begin"


class Seat(NamedTuple):
    """A seat: free, own, dead or grant; its call; whether its grant is published."""

    state: str = "free"
    call: int = NOBODY
    published: bool = False


class State(NamedTuple):
    """Everything there is. A copy at the broker has its call and the seat that was granted to it."""

    arrived: int
    broker: tuple[tuple[int, int], ...]
    deliveries: tuple[Delivery, ...]
    seats: tuple[Seat, ...]
    waiting: tuple[int, ...]
    done: tuple[bool, ...]
    ran: tuple[int, ...]
    #: The limit of workers that start now, and the one that the store keeps.
    limit: int
    stored: int
    #: Seats that a late copy of a release will free.
    late: tuple[tuple[int, int], ...]
    budget: tuple[int, ...]


@dataclass(frozen=True)
class Setup:
    """The numbers of calls and seats, the number of each event, and the rules that are left out."""

    calls: int = 3
    limit: int = 2
    events: tuple[tuple[str, int], ...] = ()
    without: frozenset[str] = field(default=frozenset())

    def has(self, rule: str) -> bool:
        return rule not in self.without


Step = tuple[str, State]


def first(setup: Setup) -> State:
    n, events = setup.calls, dict(setup.events)
    budget = tuple(events.get(event, 0) for event in EVENTS)
    seats = (Seat(),) * (setup.limit + (1 if events.get("grown") else 0))
    return State(0, (), (), seats, (), (False,) * n, (0,) * n, setup.limit, setup.limit, (), budget)


def steps(s: State, setup: Setup) -> Iterator[Step]:
    for label, after in _steps(s, setup):
        ordered = after._replace(broker=tuple(sorted(after.broker)), deliveries=tuple(sorted(after.deliveries)))
        yield label, ordered


def _steps(s: State, setup: Setup) -> Iterator[Step]:
    if s.arrived < setup.calls:
        arrived = (*s.deliveries, Delivery(s.arrived, s.limit))
        yield f"{s.arrived} arrives", s._replace(arrived=s.arrived + 1, deliveries=arrived)
    for copy in dict.fromkeys(s.broker):
        at = s.broker.index(copy)
        rest = s._replace(broker=s.broker[:at] + s.broker[at + 1 :])
        delivered = (*rest.deliveries, Delivery(copy[0], s.limit, copy[1]))
        yield f"deliver {copy[0]}", rest._replace(deliveries=delivered)
    for i, d in enumerate(s.deliveries):
        for label, after in _goes_on(s, i, setup):
            yield f"{d.call} {label}", after
        yield from _faults(s, i)
    yield from _outside(s, setup)


def _goes_on(s: State, i: int, setup: Setup) -> Iterator[Step]:
    d = s.deliveries[i]
    if d.phase == "begin":
        yield _asks(s, i, setup)
    elif d.phase == "body":
        ran = _put(s.ran, d.call, min(2, s.ran[d.call] + 1))
        ended = _with(s._replace(ran=ran, done=_put(s.done, d.call, value=True)), i, d._replace(phase="out"))
        freed = _freed(ended, d.seat, d.call, setup)
        yield "releases", freed
        if _left(s, "again"):
            yield "releases, sent twice", _spent(freed, "again")._replace(late=(*s.late, (d.seat, d.call)))
    else:
        yield "is acknowledged", s._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])


def _asks(s: State, i: int, setup: Setup) -> Step:
    """The acquire script."""
    d = s.deliveries[i]
    call = d.call
    grown = d.limit > s.stored
    s = s._replace(stored=max(s.stored, d.limit))
    limit = s.stored if setup.has("stored") else d.limit
    if grown and setup.has("grow"):
        s = _granted(s, limit)
    looked = s.seats if setup.has("every") else s.seats[: d.limit]
    if s.done[call]:
        return "is done", _with(_without_waiter(s, call, limit), i, d._replace(phase="out"))
    if any(seat.call == call and seat.state in ("own", "dead") for seat in looked):
        rest = s._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])
        return "is put back", rest._replace(broker=(*s.broker, (call, NOBODY)))
    if d.seat != NOBODY and s.seats[d.seat] == Seat("grant", call, published=True):
        return "takes its grant", _takes(s, i, d.seat)
    granted = any(seat.call == call and seat.state == "grant" for seat in s.seats)
    if call in s.waiting or granted:
        return "is parked already", _with(_granted(s, limit), i, d._replace(phase="out"))
    free = [place for place, seat in enumerate(s.seats[:limit]) if seat.state == "free"]
    if len(s.waiting) < len(free):
        return "takes a seat", _takes(s, i, free[len(s.waiting)])
    parked = s._replace(waiting=(*s.waiting, call))
    return "parks", _with(_granted(parked, limit), i, d._replace(phase="out"))


def _takes(s: State, i: int, place: int) -> State:
    d = s.deliveries[i]
    return _with(_seated(s, place, Seat("own", d.call)), i, d._replace(phase="body", seat=place))


def _granted(s: State, limit: int) -> State:
    """Grant free seats to the first waiters. The reply names one of them, and a sweep publishes the others."""
    for place, seat in enumerate(s.seats[:limit]):
        if seat.state == "free" and s.waiting:
            s = _seated(s._replace(waiting=s.waiting[1:]), place, Seat("grant", s.waiting[0]))
    return s


def _freed(s: State, place: int, call: int, setup: Setup) -> State:
    if s.seats[place].call != call and setup.has("own"):
        return s
    return _granted(_seated(s, place, Seat()), s.stored)


def _without_waiter(s: State, call: int, limit: int) -> State:
    """A call that is done leaves the queue, and its grant goes to the next waiter."""
    for place, seat in enumerate(s.seats):
        if seat.state == "grant" and seat.call == call:
            s = _seated(s, place, Seat())
    return _granted(s._replace(waiting=tuple(other for other in s.waiting if other != call)), limit)


def _faults(s: State, i: int) -> Iterator[Step]:
    d = s.deliveries[i]
    back = (*s.broker, (d.call, d.seat if d.phase == "begin" else NOBODY))
    if _left(s, "crash"):
        rest = _spent(s, "crash")._replace(deliveries=s.deliveries[:i] + s.deliveries[i + 1 :])
        if d.phase == "body":
            rest = _seated(rest, d.seat, s.seats[d.seat]._replace(state="dead"))
        yield f"{d.call} dies in {d.phase}", rest._replace(broker=back)
    if _left(s, "redeliver"):
        yield f"live {d.call} is redelivered ({d.phase})", _spent(s, "redeliver")._replace(broker=back)


def _outside(s: State, setup: Setup) -> Iterator[Step]:
    """Time, sweeps, and workers that start and end."""
    for place, seat in enumerate(s.seats):
        if seat.state == "dead":
            yield f"the lease of seat {place} ends", _seated(s, place, Seat())
        if seat.state == "grant" and not seat.published:
            published = _seated(s, place, seat._replace(published=True))
            yield f"the grant of {seat.call} is published", published._replace(broker=(*s.broker, (seat.call, place)))
    after = _granted(s, s.stored)
    if after != s:
        yield "a sweep grants", after
    for place, call in s.late:
        late = tuple(copy for copy in s.late if copy != (place, call))
        yield f"the second release of {call} arrives", _freed(s._replace(late=late), place, call, setup)
    if _left(s, "grown"):
        yield "the limit grows", _spent(s, "grown")._replace(limit=s.limit + 1)
    if s.limit > setup.limit and _left(s, "shrunk") and all(d.limit <= setup.limit for d in s.deliveries):
        yield "the limit shrinks", _spent(s, "shrunk")._replace(limit=setup.limit, stored=setup.limit)


def _seated(s: State, place: int, seat: Seat) -> State:
    return s._replace(seats=_put(s.seats, place, seat))


def _put(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]  # of any type
    return (*values[:i], value, *values[i + 1 :])


def _with(s: State, i: int, delivery: Delivery) -> State:
    return s._replace(deliveries=_put(s.deliveries, i, delivery))


def _left(s: State, event: str) -> int:
    return s.budget[EVENTS.index(event)]


def _spent(s: State, event: str) -> State:
    i = EVENTS.index(event)
    return s._replace(budget=_put(s.budget, i, s.budget[i] - 1))


def _calm(s: State, setup: Setup) -> bool:
    """No event has happened after which only a sweep can grant."""
    events = dict(setup.events)
    return all(_left(s, event) == events.get(event, 0) for event in ("crash", "shrunk"))


def wrong(s: State, setup: Setup, *, at_rest: bool) -> str:
    bodies = [d.call for d in s.deliveries if d.phase == "body"]
    if len(bodies) > (s.stored if _left(s, "shrunk") == dict(setup.events).get("shrunk", 0) else len(s.seats)):
        return "more bodies than seats"
    if len(set(bodies)) < len(bodies):
        return "one message runs twice at once"
    if s.waiting and _calm(s, setup) and any(seat.state == "free" for seat in s.seats[: s.stored]):
        return "a seat is idle while a call waits"
    if not at_rest:
        return ""
    if s.waiting or any(seat.state != "free" for seat in s.seats):
        return "a waiter is stuck"
    return "" if all(s.ran) else "a call is lost"


def explore(setup: Setup) -> Verdict:
    return walk(first(setup), lambda s: steps(s, setup), lambda s, rest: wrong(s, setup, at_rest=rest))


def setup_of(words: str) -> Setup:
    """Return the setup that words such as "calls=3 limit=2 crash=1 without=every" describe."""
    given = dict(word.split("=") for word in words.split())
    without = frozenset(given.pop("without", "").split(",")) & RULES
    calls, limit = int(given.pop("calls", 3)), int(given.pop("limit", 2))
    return Setup(calls, limit, tuple((event, int(number)) for event, number in given.items()), without)
