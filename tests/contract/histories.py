"""Random histories: every verb of the store contract, with resends, for four lock names of one bucket."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from celery_dlock.keys.lock_name import LockName, one_seat
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.claim_model import ClaimExtension, ClaimRequest
from celery_dlock.store.model import (
    IN_PLACE,
    RETRY,
    Acquired,
    AcquireRequest,
    Debounce,
    Grant,
    Held,
    Identity,
    Parked,
    Queued,
    QueueRequest,
    Renewal,
    Replace,
    Requester,
)
from tests.contract.queue_helpers import entry_of
from tests.contract.two_stores import TwoStores

__all__ = ["History", "steps"]

TTL, TURN, DAY = 60_000, 60_000, 24 * 3600 * 1000
BUCKET = 7
#: They end like digests, as the store's operators expect.
NAMES = [LockName(f"n:{letter * 32}", BUCKET) for letter in "1234"]
#: The number of the name with seats, and the limits of the workers that use it.
SEATED, LIMITS = 2, [2, 2, 3, 2, 4, 2, 3, 1]
PEOPLE = ["a", "b", "c", "d"]
#: The number of the name with ``on_conflict="replace"``; ``replace_max`` in milliseconds, and ``is_retry``.
REPLACED = 3
REPLACES = [*3 * [Replace(20_000)], Replace(20_000, IN_PLACE), Replace(0)]
#: ``debounce`` and its longest delay in milliseconds.
DEBOUNCES = [Debounce(5_000, 20_000), Debounce(0, 20_000), Debounce(7_000, 7_000)]
#: Microseconds that pass, for each step of the history that is no command.
TIMES = [1, 1, 7_000_000, 7_000_000, 61_000_000, 3_700_000_000]


class Step(NamedTuple):
    """A step of a history. Each verb reads its choices from the bits."""

    verb: str
    name: int
    who: int
    pick: int
    bits: int

    def flag(self, place: int) -> bool:
        return bool(self.bits >> place & 1)

    def seldom(self, place: int) -> bool:
        """One in four."""
        return self.flag(place) and self.flag(place + 1)


class Ask(NamedTuple):
    """One acquisition, as its owner sent it."""

    acquisition: str
    identity: Identity | None
    name: int
    queue: bool


class History:
    """One history on both stores.

    Args:
        stores: The stores.
    """

    def __init__(self, stores: TwoStores) -> None:
        self.stores = stores
        self.asks: list[Ask] = []
        self.ranks: list[int] = [0]
        self.grants: list[Grant] = []
        self.granters = 0
        self.people: dict[str, Identity] = {}
        self.last: Callable[[Any], Any] | None = None

    def take(self, step: Step) -> None:
        self.stores.travel(1)
        command = getattr(self, step.verb)(step)
        if command is not None:
            self.last = command
            self.learn(self.stores.do(command))

    def learn(self, answer: Any) -> None:
        if isinstance(answer, Acquired | Parked | Queued | Held):
            self.ranks.append(answer.rank_us)
        granted = getattr(answer, "granted", None)
        if granted is not None:
            self.grants.append(granted)

    def granter(self) -> str:
        self.granters += 1
        return f"g.{self.granters}"

    @staticmethod
    def named(step: Step, number: int | None = None, *, of_seat: bool = False) -> LockName:
        """Return a lock name, as one of the workers or operators knows it.

        Args:
            step: The step.
            number: The number of the name; None: that of the step.
            of_seat: The command of an operator is for one lock, so it names one seat.
        """
        number = step.name if number is None else number
        name = NAMES[number]
        if number != SEATED:
            return name
        if of_seat:
            seat = step.who % 4
            return one_seat(name, seat) if seat else name
        return name._replace(seats=LIMITS[step.bits >> 26 & 7])

    def swept(self, step: Step) -> LockName:
        """Return a lock name, as the sweeper knows it."""
        name = NAMES[step.name]
        return name._replace(seats=0) if step.name == SEATED and not step.seldom(13) else name

    # -- verbs of locks

    def request(self, step: Step) -> AcquireRequest:
        # A message of each person, its retry, or a Lock.
        person = PEOPLE[step.who]
        identity = None if step.seldom(0) else Identity(f"{person}{step.name}", int(step.seldom(2)))
        by = Requester.of("t", identity and identity.task_id, "n", 1)
        carries, republished = step.seldom(8), step.seldom(6)
        return AcquireRequest(
            by,
            identity,
            redelivered=step.seldom(4),
            republished=republished,
            age_us=1000 * (step.pick % 3),
            doubt_us=60_000_000 * (republished and step.seldom(5)),
            rank_us=self.ranks[step.pick % len(self.ranks)] if carries else None,
            once=step.flag(10) and step.name != SEATED,
            tick="" if step.flag(11) else "f" * 32,
            run_mark_ms=DAY,
            hold_if_unknown=step.flag(12),
            notify=step.seldom(13),
            waited=step.flag(15),
            min_hold_ms=100_000 if step.seldom(16) else 0,
        )

    def send(self, step: Step, request: AcquireRequest) -> Callable[[Any], Any]:
        ask = Ask(f"o.{len(self.asks)}", request.identity, step.name, request.queue is not None)
        earlier = [one for one in self.asks if one.name == step.name]
        if earlier and step.seldom(20):
            # A late copy of an earlier acquire, as far as it can be one.
            ask = earlier[step.pick % len(earlier)]
        else:
            self.asks.append(ask)
        return lambda store: store.acquire(self.named(step), ask.acquisition, TTL, request)

    def acquire(self, step: Step) -> Callable[[Any], Any]:
        return self.send(step, self.request(step))

    def acquire_debounced(self, step: Step, published: Grant | None = None) -> Callable[[Any], Any]:
        # Without the bits that make a retry or an old copy: a retry is not debounced, and an old copy is seldom one.
        bits = step.bits & ~(1 << 2 | (1 << 20 if published else 0))
        return self.acquire_queued(step._replace(bits=bits), DEBOUNCES[step.pick % len(DEBOUNCES)], published)

    def acquire_replacing(self, step: Step, published: Grant | None = None) -> Callable[[Any], Any]:
        # Without the bits of the rank after another message, and of an old copy for a published one.
        bits = step.bits & ~(3 << 25 | (1 << 20 if published else 0))
        replace = REPLACES[step.pick % len(REPLACES)]
        return self.acquire_queued(step._replace(bits=bits, name=REPLACED), None, published, replace)

    def acquire_queued(
        self,
        step: Step,
        debounce: Debounce | None = None,
        published: Grant | None = None,
        replace: Replace | None = None,
    ) -> Callable[[Any], Any]:
        request = self.request(step)
        identity = request.identity or Identity(f"{PEOPLE[step.who]}{step.name}")
        granted = [one.identity for one in self.grants if self.people[one.identity].task_id.endswith(str(step.name))]
        if published or (granted and step.seldom(17)):
            # The copy that was published for a grant.
            identity = self.people[published.identity if published else granted[-1]]
        self.people[identity.digest] = identity
        grants = [grant.grant_id for grant in self.grants if grant.identity == identity.digest]
        newest = published or step.flag(27)
        place = QueueRequest(
            entry="" if step.seldom(22) else entry_of(identity.task_id, body=f'{{"rank": {self.ranks[-1]}}}'),
            limit=[0, 0, 1, 2][step.pick % 4],
            evict_oldest=step.flag(24),
            after_us=self.ranks[step.pick % len(self.ranks)] if step.seldom(25) else 0,
            grant_id=grants[-1] if grants and newest else grants[0] if grants and step.flag(28) else "",
            debounce=None if identity.retries or step.name == SEATED else debounce,
            replace=replace._replace(repeats=RETRY) if replace and identity.retries else replace,
            sent_us=0 if debounce or replace else self.sent(step),
            park_duplicate=step.flag(29) and not (debounce or replace or step.name == SEATED),
        )
        by = Requester.of("t", identity.task_id, "n", 1)
        return self.send(step, request._replace(requester=by, identity=identity, queue=place, notify=False))

    def sent(self, step: Step) -> int:
        """Return when a message was published: near a known rank, far from it, or 0."""
        near = self.ranks[step.bits % len(self.ranks)] + 1000 * (step.pick % 3 - 1)
        return max(0, [0, 0, near, near - 60_000_000 * step.who][step.bits >> 3 & 3])

    def ask(self, step: Step) -> Ask | None:
        # Of the names that keep more than a lock, mostly one that holds it. Otherwise one of the newest.
        if step.name in (SEATED, REPLACED) and not step.seldom(27):
            held = self.stores.memory.data(NAMES[step.name]).head.locks.values()
            holders = {one.record.acquisition for one in held}
            if asks := [ask for ask in self.asks if ask.acquisition in holders and ask.name == step.name]:
                return asks[step.pick % len(asks)]
        return self.asks[-1 - step.pick % min(len(self.asks), 4 + step.who * 4)] if self.asks else None

    def release(self, step: Step) -> Callable[[Any], Any] | None:
        ask = self.ask(step)
        if ask is None:
            return None
        identity = ask.identity
        reserves = identity is not None and step.seldom(0) and ask.name != REPLACED
        retry = identity._replace(retries=identity.retries + 1).digest if identity and reserves else ""
        ending = ReleaseRequest(
            final=step.flag(2),
            identity=identity.digest if identity else "",
            used_ms=DAY if identity and step.seldom(3) and ask.name != SEATED else 0,
            requester=Requester.of("t", identity and identity.task_id, "n", 1).text,
            outcome_unknown=step.seldom(5),
            queue=ask.queue or step.seldom(7),
            once=step.flag(9) and ask.name != SEATED,
            tick="" if step.flag(10) else "f" * 32,
            seed="seed",
            window_ms=DAY,
            reserved_for=retry,
            reserved_ms=TTL if reserves else 0,
            rolled_back=step.flag(12),
            replace=["", "ended", "ended", "stopped"][step.bits >> 24 & 3],
        )
        return lambda store: store.release(self.named(step, ask.name), ask.acquisition, ending)

    def renew(self, step: Step) -> Callable[[Any], Any] | None:
        ask = self.ask(step)
        if ask is None:
            return None
        retry = ask.identity._replace(retries=ask.identity.retries + 1).digest if ask.identity else "r"
        facts = [(), (("count", "2"),), (("releasing", "1"),), (("dup", "1"),), (("reserved_for", retry),)][
            step.bits % 5
        ]
        renewal = Renewal(
            self.named(step, ask.name), ask.acquisition, TTL * (1 + step.flag(9)), facts, stoppable=step.flag(10)
        )
        return lambda store: store.renew([renewal])

    def inspect(self, step: Step) -> Callable[[Any], Any]:
        return lambda store: store.inspect(self.named(step))

    def mark_done(self, step: Step) -> Callable[[Any], Any] | None:
        ask = self.ask(step)
        if ask is None or ask.identity is None:
            return None
        digest = ask.identity.digest
        return lambda store: store.mark_done(
            self.named(step, ask.name), digest, "o" if step.flag(0) else "p", 10 * step.pick
        )

    # -- verbs of runs

    def last_run(self, step: Step) -> Callable[[Any], Any]:
        return lambda store: store.last_run(NAMES[step.name], "" if step.flag(0) else "f" * 32)

    def settle(self, step: Step) -> Callable[[Any], Any]:
        name, tick = NAMES[step.name], "" if step.flag(0) else "f" * 32
        run = self.stores.local.describe(name, tick).run
        # A shown mark can be a random command id, which differs between the two stores.
        shown = run.mark if run and run.mark.startswith(("o.", "at:")) else ""
        mark = "o.0" if step.seldom(3) else shown if step.flag(4) else ""
        if step.flag(1):
            return lambda store: store.forget_run(name, tick, mark)
        return lambda store: store.resolve_run(name, sent=step.flag(2), window_ms=DAY, tick=tick, mark=mark)

    # -- verbs of claims

    def claim(self, step: Step) -> Callable[[Any], Any]:
        task_id = f"{PEOPLE[step.who]}{step.name}"
        by = Requester.of("t", task_id, "n", 1)
        attempt = f"try{step.name}{step.pick % 3}"
        request = ClaimRequest(task_id, step.pick % 2, TTL, step.flag(0), by, attempt)
        return lambda store: store.claim([(NAMES[step.name], request)])

    def end_claim(self, step: Step) -> Callable[[Any], Any]:
        name, task_id = NAMES[step.name], f"{PEOPLE[step.who]}{step.name}"
        if step.flag(0):
            return lambda store: store.extend_claims([ClaimExtension(name, task_id, 2 * TTL)])
        attempt = f"try{step.name}{step.pick % 3}" if step.flag(1) else ""
        return lambda store: store.release_claim(name, task_id, step.pick % 2, attempt)

    # -- verbs of queues

    def grant(self, step: Step) -> Grant | None:
        return self.grants[-1 - step.pick % min(len(self.grants), 3)] if self.grants else None

    def sweep(self, step: Step) -> Callable[[Any], Any]:
        name, granter = self.swept(step), self.granter()
        tries, foreign_ms = 1 + step.pick % 3, 1000 if step.flag(0) else 300_000
        pause_ms = 15_000 if step.seldom(1) and step.name != SEATED else 0
        return lambda store: store.sweep(name, granter, TURN, tries, foreign_ms, pause_ms)

    def publish(self, step: Step) -> Callable[[Any], Any] | None:
        grant, name = self.grant(step), self.swept(step)
        if grant is None:
            return None
        if step.seldom(0):
            return lambda store: store.decline_grant(name, grant, foreign=step.flag(2), present=step.seldom(3))
        return lambda store: store.confirm_publish(name, grant.identity, TURN)

    def lose_grant(self, step: Step) -> Callable[[Any], Any] | None:
        """The granted message is published, its grant times out, and a sweep comes."""
        name = self.swept(step)
        waiting = [view for view in self.stores.local.list_waiters(name, 1).waiters if view.state == "granted"]
        if not waiting:
            return None
        self.stores.do(lambda store: store.confirm_publish(name, waiting[0].identity, TURN))
        self.stores.travel(TURN * 1000 * 8)
        return self.sweep(step)

    def start_due(self, step: Step) -> Callable[[Any], Any] | None:
        """The debounced calls of a name become due, a sweep grants one the lock, and its copy arrives."""
        self.stores.travel((2 * DAY if step.seldom(20) else DEBOUNCES[0].last_ms) * 1000)
        swept = self.stores.do(self.sweep(step))
        if swept.granted is None or swept.granted.identity not in self.people:
            return None
        self.learn(swept)
        return self.acquire_debounced(step, swept.granted)

    def start_granted(self, step: Step) -> Callable[[Any], Any] | None:
        """A granted message is published, and arrives."""
        grant = self.grant(step)
        if grant is None or grant.identity not in self.people:
            return None
        name = step._replace(name=int(self.people[grant.identity].task_id[1:]))
        self.stores.do(lambda store: store.confirm_publish(self.swept(name), grant.identity, TURN))
        return self.acquire_replacing(name, grant) if name.name == REPLACED else self.acquire_queued(name, None, grant)

    def remove(self, step: Step) -> Callable[[Any], Any]:
        name, granter = self.swept(step), self.granter()
        identity = Identity(f"{PEOPLE[step.who]}{step.name}").digest
        dead, ended = step.flag(0), step.flag(1)
        return lambda store: store.remove_waiter(name, identity, granter, dead_letter=dead, ended=ended)

    def read_queue(self, step: Step) -> Callable[[Any], Any]:
        name = self.swept(step)
        reads: list[Callable[[Any], Any]] = [
            lambda store: store.list_waiters(name, 1 + step.pick % 3),
            # Two of them may be due at the same time, but for the time that a step needs.
            lambda store: sorted(store.list_due_queues([BUCKET], 5, -3.3)),
            lambda store: store.seats(name),
        ]
        return reads[step.bits % 3]

    # -- verbs of operators

    def describe(self, step: Step) -> Callable[[Any], Any]:
        return lambda store: store.describe(self.named(step, of_seat=True), "f" * 32 if step.seldom(0) else "")

    def lists(self, step: Step) -> Callable[[Any], Any]:
        if step.flag(0):
            return lambda store: sorted(store.dead_letters(), key=str)
        return lambda store: sorted(store.unsettled_runs(), key=lambda run: (run.name, run.tick))

    def free(self, step: Step) -> Callable[[Any], Any] | None:
        name = self.named(step, of_seat=True)
        view = self.stores.local.describe(name).holder
        if view is None:
            return None
        shown = view.acquisition if not step.seldom(0) else "o.0"
        return lambda store: store.free(name, shown, force=step.flag(2))

    def hold(self, step: Step) -> Callable[[Any], Any]:
        name = self.named(step, of_seat=True)
        if step.seldom(0):
            view = self.stores.local.describe(name).holder
            holder, hold = (view.acquisition, view.hold) if view and not step.seldom(1) else ("o.0", "")
            return lambda store: store.cancel_hold(name, holder, hold if step.flag(2) else "operator:you@host@1")
        return lambda store: store.hold(name, "operator:me@host", 90_000, "why")

    def requeue(self, step: Step) -> Callable[[Any], Any]:
        identity = Identity(f"{PEOPLE[step.who]}{step.name}").digest
        return lambda store: store.requeue(self.swept(step), identity)

    # -- others

    def resend(self, _step: Step) -> Callable[[Any], Any] | None:
        """The last command arrives twice."""
        return self.last

    def time_passes(self, step: Step) -> None:
        self.stores.travel(TIMES[step.pick % len(TIMES)])


_DEBOUNCE = {"acquire_debounced", "start_due"}
_RUNS = {"settle", "last_run", "claim", "end_claim"}
#: How often each verb comes.
_VERBS = {
    "acquire": 6, "acquire_queued": 14, "acquire_debounced": 10, "start_due": 5, "start_granted": 5,
    "acquire_replacing": 10,
    "release": 10, "renew": 3, "inspect": 1, "mark_done": 1, "last_run": 1,
    "settle": 2, "claim": 3, "end_claim": 1, "sweep": 5, "publish": 4, "lose_grant": 3, "remove": 2,
    "read_queue": 1, "describe": 1, "lists": 1, "free": 1, "hold": 1, "requeue": 1, "resend": 6, "time_passes": 5,
}  # fmt: skip

#: How often the verbs come that are not as usual, in histories of a name with seats, and with ``replace``.
_OF_SEATS = {"acquire": 14, "acquire_queued": 24, "renew": 6} | dict.fromkeys(
    _DEBOUNCE | _RUNS | {"acquire_replacing"}, 0
)
_OF_REPLACE = {"acquire_replacing": 30, "acquire": 1, "acquire_queued": 3} | dict.fromkeys(_DEBOUNCE | _RUNS, 0)
_BITS = st.integers(0, 2**15 - 1)


def _steps_on(names: list[int], others: dict[str, int] | None = None) -> st.SearchStrategy[Step]:
    weights = _VERBS | (others or {})
    return st.builds(
        Step,
        st.sampled_from([verb for verb, times in weights.items() for _ in range(times)]),
        st.sampled_from(names),
        st.integers(0, len(PEOPLE) - 1),
        st.integers(0, 11),
        # Of a range of more than 24 bits, Hypothesis mostly draws small numbers.
        st.builds(lambda low, high: high << 15 | low, _BITS, _BITS),
    )


#: Most histories concern names of one kind, so that they reach states which need many commands.
_STEPS = [
    _steps_on([0, 0, 0, 1], {"acquire_replacing": 0}),
    _steps_on([SEATED], _OF_SEATS),
    _steps_on([REPLACED], _OF_REPLACE),
    _steps_on([0, 0, 1, SEATED, SEATED, REPLACED]),
]


def steps(most: int) -> st.SearchStrategy[list[Step]]:
    """Return a strategy of histories with at most so many steps."""
    # By itself, Hypothesis mostly draws lists of about ten.
    return st.tuples(st.sampled_from(_STEPS), st.integers(1, most)).flatmap(
        lambda drawn: st.lists(drawn[0], min_size=drawn[1], max_size=drawn[1])
    )
