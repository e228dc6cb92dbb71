"""A command of the stateful test of the queue's scripts: sent to the server and to the model, and compared."""

import itertools
import random
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store import model as records
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Identity, QueueRequest, Requester
from celery_dlock.store.redis.keys import LockKeys
from tests.contract.queue_helpers import TTL, TURN
from tests.contract.queue_model import Queue
from tests.contract.queue_values import ANY, PAST, Ask, Bucket, Granted, Held, Stamp
from tests.contract.stateful_targets import Target
from tests.support.stores import name_in

T = TypeVar("T")

BUCKET = 7
NAMES = [LockName("n:x", BUCKET), LockName("n:y", BUCKET)]
PEOPLE = ["a", "b", "c", "d", "e", "f"]
#: Share of the commands that arrive twice at once.
DOUBLED = 0.2


class Machine(RuleBasedStateMachine):
    """Two lock names of one bucket, in the store and in the model."""

    make_target: Callable[[], Target]

    def set_up(self, rng: random.Random) -> None:
        self.random = rng
        self.target = type(self).make_target()
        self.prefix, self.store = self.target.prefix, self.target.store
        self.keys = [LockKeys.of(self.prefix, each) for each in NAMES]
        self.bucket = Bucket()
        self.queues = [Queue(self.bucket) for _ in NAMES]
        self.numbers = itertools.count(1)
        #: What the server called the times of the model's steps, and when each of them began.
        self.called: dict[int, int] = {-1: 1}
        self.starts: list[int] = []
        #: Set while the model repeats a step: the time when the step began.
        self.began: int | None = None
        #: Ranks that copies may carry, and turns that were given, of each name.
        self.ranks: list[Stamp] = []
        self.turns: dict[str, list[Stamp]] = {}
        #: The messages whose worker knows that they are parked, and does not know of an end.
        self.owed: list[set[str]] = [set(), set()]
        self.last: Callable[[], object] | None = None
        #: The name that each acquisition is of.
        self.sent: dict[str, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "target"):
            self.target.close()

    def both(self, step: Callable[[], tuple[Any, ...]], command: Callable[[], T]) -> tuple[tuple[Any, ...], T]:
        """Do a step in the model and in the store. If the store lost a reply, it sent the command twice.

        Returns:
            What the model expects, and the answer.
        """
        before, began = self.target.losses(), self.target.now_us()
        expected, answer = step(), command()
        if self.target.losses() > before:
            self.began = began
            expected = step()
            self.began = None
        return expected, answer

    # Commands

    def send(self, name: int, ask: Ask) -> None:
        self.sent.setdefault(ask.acquisition, name)
        keys = self.keys[name]
        request = AcquireRequest(
            Requester("t", ask.task_id, "n", "1"),
            Identity(ask.task_id) if ask.identity else None,
            ask.redelivered,
            ask.republished,
            rank_us=None if ask.rank is None else self.number(ask.rank),
            notify=ask.waits,
            queue=self.place(ask) if ask.queues else None,
        )

        def once() -> object:
            expected, answer = self.both(
                lambda: self.queues[name].arrive(ask, self.now()),
                lambda: self.store.acquire(name_in(keys), ask.acquisition, TTL, request),
            )
            self.same(answered(answer), expected)
            self.learn(name, ask, answer, expected)
            return answer

        self.twice(once)

    def end(self, name: int, ask: Ask, *, final: bool, queue: bool) -> None:
        ending = ReleaseRequest(final, ask.identity, outcome_unknown=ask.unsure, queue=queue)

        def once() -> object:
            before = self.target.losses()
            expected, answer = self.both(
                lambda: self.queues[name].release(ask, self.now(), self.now(), final=final, queue=queue),
                lambda: self.store.release(name_in(self.keys[name]), ask.acquisition, ending),
            )
            ours = expected[0] or self.target.losses() > before  # after a lost reply, this is unknown
            self.same((answer.ours, answer.duplicate_seen, told(answer.granted)), (ours, *expected[1:]))
            if final and ask.identity in self.bucket.done:
                self.owed[name].discard(ask.identity)
            return answer.granted

        self.twice(once)

    def twice(self, once: Callable[[], object]) -> None:
        """Carry it out, and keep it to be carried out again: a reply may be lost."""
        first = once()

        def again() -> None:
            second = once()
            if isinstance(first, records.Queued | records.Held):
                # The answer has the holder's remaining time, too.
                assert type(second) is type(first)
            elif isinstance(first, records.Acquired):
                assert isinstance(second, records.Acquired)
                assert second.token == first.token
            elif isinstance(first, records.Parked):
                # Its rank is the time's where it carries none.
                assert isinstance(second, records.Parked)
                assert second[1:] == first[1:], (second, first)
            else:
                assert second == first, (second, first)

        self.last = again
        if self.random.random() < DOUBLED:
            again()

    def place(self, ask: Ask) -> QueueRequest:
        after = 0 if ask.after is None else self.number(ask.after)
        turn = "" if ask.turn is None else str(self.number(ask.turn))
        return QueueRequest(ask.entry, ask.limit, ask.evicts, after, turn)

    def learn(self, name: int, ask: Ask, answer: object, expected: tuple[Any, ...]) -> None:
        owed = self.owed[name]
        if isinstance(answer, records.Acquired | records.Queued | records.Parked | records.Held):
            rank = expected[1] if expected[0] == "parked" else expected[2]
            self.ranks = sorted({*self.ranks, *([] if rank is ANY else [rank])})
        if isinstance(answer, records.Acquired | records.Duplicate):
            owed.discard(ask.identity)
        if isinstance(answer, records.Parked) and not (answer.evicted and answer.evicted.identity == ask.identity):
            owed.add(ask.identity)

    def any_lock(self, kind: type) -> bool:
        return any(isinstance(queue.lock, kind) for queue in self.queues)

    def with_lock(self, pick: int, kind: type) -> tuple[int, Held | Granted | None]:
        """One of the names whose lock is of this kind."""
        number = pick if isinstance(self.queues[pick].lock, kind) else 1 - pick
        return number, self.queues[number].lock

    @staticmethod
    def task_id(identity: str) -> str:
        return next(f"{who}{n}" for n in (0, 1) for who in PEOPLE if Identity(f"{who}{n}").digest == identity)

    def is_of(self, ask: Ask, name: int) -> bool:
        """An acquisition is of one name, so no other name's lock is released with it."""
        return self.sent[ask.acquisition] == name

    @staticmethod
    def pick(stamps: list[Stamp], number: int | None) -> Stamp | None:
        return stamps[number % len(stamps)] if stamps and number is not None else None

    def turn_of(self, queue: Queue, identity: str, which: str) -> Stamp | None:
        given = self.turns.setdefault(identity, [])
        lock = queue.lock
        if isinstance(lock, Granted) and lock.identity == identity and lock.turn not in given:
            given.append(lock.turn)
        return None if which == "none" or not given else given[-1] if which == "right" else given[0]

    def look_after(self, name: int, tries: int) -> None:
        granter = f"s.{next(self.numbers)}"

        def once() -> object:
            expected, taken = self.both(
                lambda: self.queues[name].sweep(granter, self.now(), tries),
                lambda: self.store.sweep(name_in(self.keys[name]), granter, TURN, tries),
            )
            self.same((told(taken.granted), taken.dead_letter), expected)
            return taken.granted

        self.twice(once)

    # Times

    def now(self) -> Stamp:
        """The time of the command that follows."""
        step = len(self.starts)
        self.starts.append(self.target.now_us() if self.began is None else self.began)
        return Stamp(step)

    def number(self, stamp: Stamp) -> int:
        return self.called[stamp.step] + (0 if stamp == PAST else stamp.plus)

    def same(self, seen: Any, expected: Any) -> None:
        """Are they alike? A stamp of an unknown time is whatever was seen, if that was then."""
        if isinstance(expected, Stamp):
            seen = int(seen)
            if expected.step not in self.called:
                assert self.starts[expected.step] <= seen - expected.plus <= self.target.now_us(), (
                    seen,
                    expected,
                    self.starts[expected.step],
                    self.target.now_us(),
                )
                self.called[expected.step] = seen - expected.plus
            assert seen == self.number(expected), (seen, expected, self.number(expected))
        elif isinstance(expected, tuple | list):
            assert len(seen) == len(expected), (seen, expected)
            for one, other in zip(seen, expected, strict=True):
                self.same(one, other)
        elif isinstance(expected, dict):
            assert seen.keys() == expected.keys(), (seen, expected)
            for key, value in expected.items():
                self.same(seen[key], value)
        elif expected is not ANY:
            assert seen == expected, (seen, expected)


def told(grant: records.Grant | None) -> tuple[object, ...] | None:
    return None if grant is None else (grant.identity, grant.entry, grant.grant_id)


def answered(answer: object) -> tuple[object, ...]:
    """In the model's words."""
    match answer:
        case records.Acquired(token, since, rank):
            assert round(since * 1e6) == token
            return ("acquired", token, rank)
        case records.Tombstoned():
            return ("tombstoned",)
        case records.Duplicate(granted):
            return ("done", told(granted))
        case records.Held(_, duplicate, rank):
            return ("held", duplicate, rank)
        case records.Queued(count, rank, holder):
            return ("queue", count, rank, holder is not None)
        case records.Parked(rank, position, granted, ousted):
            return ("parked", rank, position, told(granted), ousted and (ousted.identity, ousted.entry))
    raise AssertionError(answer)
