"""The queue's scripts against a model written from the laws, in every order that Hypothesis can think of.

Two lock names of one bucket. Time passes by the client's hand: it moves due times into the past instead of waiting.
"""

import itertools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_dlock import records
from celery_dlock.keys import LockKeys
from celery_dlock.names import LockName
from celery_dlock.records import By, Claim, Identity, Place
from celery_dlock.store import Ending
from celery_dlock.stores.redis import RedisStore
from tests.contract.queue_kit import SECOND, TTL, TURN, entry_of, now_us
from tests.contract.queue_model import ANY, PAST, Ask, Bucket, Granted, Held, Queue, Stamp
from tests.servers import Server

BUCKET = 7
NAMES = [LockName("n:x", BUCKET), LockName("n:y", BUCKET)]
PEOPLE = ["a", "b", "c", "d"]

name = st.sampled_from([0, 0, 0, 1])
person = st.sampled_from(PEOPLE)
flag = st.booleans()
seldom = st.sampled_from([False, False, False, True])


class Scripts(RuleBasedStateMachine):
    server: Server
    asks = Bundle("asks")

    @initialize(waiters=st.integers(0, 4))
    def begin(self, *, waiters: int) -> None:
        self.store = RedisStore(self.server.url(), timeout=5)
        self.client: redis.Redis = self.server.client()
        self.prefix = uuid.uuid4().hex
        self.keys = [LockKeys.of(self.prefix, each) for each in NAMES]
        self.bucket = Bucket()
        self.queues = [Queue(self.bucket) for _ in NAMES]
        self.numbers = itertools.count(1)
        #: What the server called the times of the model's steps, and when each of them began.
        self.called: dict[int, int] = {-1: 1}
        self.starts: list[int] = []
        #: Ranks that copies may carry, and turns that were given, of each name.
        self.ranks: list[Stamp] = []
        self.turns: dict[str, list[Stamp]] = {}
        #: Who was told that it is parked, and has heard of no end since.
        self.owed: list[set[str]] = [set(), set()]
        self.last: Callable[[], object] | None = None
        # To begin with a queue saves many steps on the way to one.
        self.send(0, Ask("o.0", queues=False))
        for who in PEOPLE[:waiters]:
            task_id = f"{who}0"
            self.send(0, Ask(f"{who}.0", Identity(task_id).digest, task_id, entry=entry_of(task_id)))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.client.close()

    # Arrivals

    @rule(
        target=asks,
        name=name,
        who=person,
        redelivered=seldom,
        copied=seldom,
        carries=st.none() | st.integers(0, 30),
        after=st.none() | st.integers(0, 30),
        parks=flag,
        limit=st.sampled_from([0, 1, 2]),
        ousts=flag,
        turn=st.sampled_from(["right", "old", "none"]),
        unsure=seldom,
    )
    def a_message_arrives(self, *, name: int, who: str, carries: int | None, after: int | None, **facts: Any) -> Ask:
        queue, task_id = self.queues[name], f"{who}{name}"
        identity = Identity(task_id).digest
        parks, turn = facts.pop("parks"), facts.pop("turn")
        ask = Ask(
            f"o.{next(self.numbers)}",
            identity,
            task_id,
            rank=self.pick(self.ranks, carries),
            after=self.pick(self.ranks, after),
            entry=entry_of(task_id) if parks else "",
            turn=self.turn_of(queue, identity, turn),
            # Who was buried was delivered before: whatever still arrives of it is a copy.
            **{**facts, "copied": facts["copied"] or identity in queue.dead},
        )
        self.send(name, ask)
        return ask

    @precondition(lambda self: self.any_lock(Granted))
    @rule(target=asks, pick=name, parks=flag, unsure=seldom)
    def the_copy_that_was_published_arrives(self, *, pick: int, parks: bool, unsure: bool) -> Ask:
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        task_id = self.task_id(lock.identity)
        entry = entry_of(task_id) if parks else ""
        number = f"o.{next(self.numbers)}"
        ask = Ask(number, lock.identity, task_id, False, True, lock.rank, entry=entry, turn=lock.turn, unsure=unsure)
        self.send(name, ask)
        return ask

    @rule(target=asks, name=name, who=st.sampled_from(["", "p"]), waits=flag, unsure=seldom)
    def somebody_else_comes(self, *, name: int, who: str, waits: bool, unsure: bool) -> Ask:
        """A ``Lock``, or a task of another policy that shares the name."""
        identity = Identity(f"{who}{name}").digest if who else ""
        task_id = f"{who}{name}" if who else ""
        ask = Ask(f"o.{next(self.numbers)}", identity, task_id, queues=False, waits=waits, unsure=unsure)
        self.send(name, ask)
        return ask

    @rule(ask=asks, name=name)
    def a_late_copy_of_an_acquire_arrives(self, *, ask: Ask, name: int) -> None:
        if ask.unsure and self.is_of(ask, name):
            self.send(name, ask)

    # Ends

    @rule(ask=asks, name=name, final=flag, by_keeper=flag)
    def release(self, *, ask: Ask, name: int, final: bool, by_keeper: bool) -> None:
        if self.is_of(ask, name):
            self.end(name, ask, final=final, queue=ask.queues and not by_keeper)

    @precondition(lambda self: self.any_lock(Held))
    @rule(pick=name, final=flag, by_keeper=seldom)
    def the_holder_releases(self, *, pick: int, final: bool, by_keeper: bool) -> None:
        name, lock = self.with_lock(pick, Held)
        assert isinstance(lock, Held)
        self.end(name, lock.ask, final=final, queue=lock.ask.queues and not by_keeper)

    @precondition(lambda self: self.any_lock(Held))
    @rule(pick=name)
    def the_lease_ends(self, *, pick: int) -> None:
        """The holder died, with all that it knew."""
        self.last = None
        name, _ = self.with_lock(pick, Held)
        self.queues[name].lock = None
        keys = self.keys[name]
        self.client.pexpire(keys.lock, -1)
        self.client.zadd(keys.queue()[3], {keys.name: 1}, xx=True)

    @precondition(lambda self: any(queue.entries or queue.dead for queue in self.queues))
    @rule(name=name, who=person, bury=seldom, ended=seldom)
    def a_waiter_is_taken_out(self, *, name: int, who: str, bury: bool, ended: bool) -> None:
        identity, granter = Identity(f"{who}{name}").digest, f"t.{next(self.numbers)}"

        def once() -> object:
            expected = self.queues[name].take_out(identity, granter, self.now(), bury=bury, ended=ended)
            taken = self.store.take_out(self.keys[name], identity, granter, bury=bury, ended=ended)
            self.same((taken.entry, told(taken.granted)), expected)
            if ended:
                self.owed[name].discard(identity)
            return taken.granted if ended else taken

        self.twice(once)

    # Turns

    @precondition(lambda self: any(queue.lock or queue.entries for queue in self.queues))
    @rule(name=name, tries=st.integers(1, 3))
    def sweep(self, *, name: int, tries: int) -> None:
        self.look_after(name, tries)

    @precondition(lambda self: self.any_lock(Granted))
    @rule(pick=name, tries=st.integers(1, 3), published=st.sampled_from([True, True, True, False]))
    def a_turn_is_lost(self, *, pick: int, tries: int, published: bool) -> None:
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        if published:
            self.the_message_is_published(pick=pick, who=None)
        self.a_turn_passes(pick=pick)
        self.look_after(name, tries)

    def look_after(self, name: int, tries: int) -> None:
        granter = f"s.{next(self.numbers)}"

        def once() -> object:
            expected = self.queues[name].sweep(granter, self.now(), tries)
            taken = self.store.sweep(self.keys[name], granter, TURN, tries)
            self.same((told(taken.granted), taken.buried), expected)
            return taken.granted

        self.twice(once)

    @precondition(lambda self: self.any_lock(Granted))
    @rule(pick=name, who=st.none() | st.none() | person)
    def the_message_is_published(self, *, pick: int, who: str | None) -> None:
        self.last = None
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        identity = Identity(f"{who}{name}").digest if who else lock.identity
        expected = self.queues[name].publish(identity, self.now())
        assert self.store.published(self.keys[name], identity, TURN) == expected

    @precondition(lambda self: self.any_lock(Granted))
    @rule(pick=name)
    def a_turn_passes(self, *, pick: int) -> None:
        self.last = None
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        lock.due, keys = PAST, self.keys[name]
        self.client.hset(keys.lock, "due", "1")
        self.client.zadd(keys.queue()[3], {keys.name: 1})

    @precondition(lambda self: any(queue.later for queue in self.queues))
    @rule(pick=st.integers(0, 3))
    def the_time_between_turns_passes(self, *, pick: int) -> None:
        self.last = None
        for queue, keys in zip(self.queues, self.keys, strict=True):
            if queue.later:
                identity = sorted(queue.later)[pick % len(queue.later)]
                queue.later[identity] = PAST
                self.client.zadd(keys.queue()[2], {identity: 1}, xx=True)
                if not isinstance(queue.lock, Granted):
                    self.client.zadd(keys.queue()[3], {keys.name: 1}, xx=True)

    # Others

    @precondition(lambda self: self.last is not None)
    @rule(forgotten=seldom)
    def the_last_command_arrives_twice(self, *, forgotten: bool) -> None:
        if forgotten:
            self.client.script_flush()
        assert self.last
        self.last()

    # How

    def send(self, name: int, ask: Ask) -> None:
        keys = self.keys[name]
        claim = Claim(
            By("t", ask.task_id, "n", "1"),
            Identity(ask.task_id) if ask.identity else None,
            ask.redelivered,
            ask.copied,
            rank_us=None if ask.rank is None else self.number(ask.rank),
            waits=ask.waits,
            place=self.place(ask) if ask.queues else None,
        )

        def once() -> object:
            expected = self.queues[name].arrive(ask, self.now())
            answer = self.store.acquire(keys, ask.acquisition, TTL, claim)
            self.same(answered(answer), expected)
            self.learn(name, ask, answer, expected)
            return answer

        self.twice(once, repeats=ask.rank is not None or not ask.entry)

    def end(self, name: int, ask: Ask, *, final: bool, queue: bool) -> None:
        ending = Ending(final, ask.identity, unsure=ask.unsure, queue=queue)

        def once() -> object:
            expected = self.queues[name].release(ask, self.now(), self.now(), final=final, queue=queue)
            answer = self.store.release(self.keys[name], ask.acquisition, ending)
            self.same((answer.ours, answer.word, told(answer.granted)), expected)
            if final and ask.identity in self.bucket.done:
                self.owed[name].discard(ask.identity)
            return answer.granted

        self.twice(once)

    def twice(self, once: Callable[[], object], *, repeats: bool = True) -> None:
        """Carry it out, and keep it to be carried out again: a reply may be lost."""
        first = once()

        def again() -> None:
            second = once()
            if isinstance(first, records.Queued | records.Held):
                # A holder's remaining time is told, and who asks only has no rank to keep.
                assert type(second) is type(first)
            elif isinstance(first, records.Acquired):
                assert isinstance(second, records.Acquired)
                assert second.token == first.token
            else:
                assert second == first

        self.last = again if repeats else None

    def place(self, ask: Ask) -> Place:
        after = 0 if ask.after is None else self.number(ask.after)
        turn = "" if ask.turn is None else str(self.number(ask.turn))
        return Place(ask.entry, ask.limit, ask.ousts, after, turn)

    def learn(self, name: int, ask: Ask, answer: object, expected: tuple[Any, ...]) -> None:
        owed = self.owed[name]
        if isinstance(answer, records.Acquired | records.Queued | records.Parked | records.Held):
            rank = expected[1] if expected[0] == "parked" else expected[2]
            self.ranks = sorted({*self.ranks, *([] if rank is ANY else [rank])})
        if isinstance(answer, records.Acquired | records.Duplicate):
            owed.discard(ask.identity)
        if isinstance(answer, records.Parked) and not (answer.ousted and answer.ousted.identity == ask.identity):
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
        return not ask.task_id or ask.task_id.endswith(str(name))

    @staticmethod
    def pick(stamps: list[Stamp], number: int | None) -> Stamp | None:
        return stamps[number % len(stamps)] if stamps and number is not None else None

    def turn_of(self, queue: Queue, identity: str, which: str) -> Stamp | None:
        given = self.turns.setdefault(identity, [])
        lock = queue.lock
        if isinstance(lock, Granted) and lock.identity == identity and lock.turn not in given:
            given.append(lock.turn)
        return None if which == "none" or not given else given[-1] if which == "right" else given[0]

    # Times

    def now(self) -> Stamp:
        """The time of the command that follows."""
        step = len(self.starts)
        self.starts.append(now_us(self.client))
        return Stamp(step)

    def number(self, stamp: Stamp) -> int:
        return self.called[stamp.step] + (0 if stamp == PAST else stamp.plus)

    def same(self, seen: Any, expected: Any) -> None:
        """Are they alike? A stamp of an unknown time is whatever was seen, if that was then."""
        if isinstance(expected, Stamp):
            seen = int(seen)
            if expected.step not in self.called:
                assert self.starts[expected.step] <= seen - expected.plus <= now_us(self.client), (
                    seen,
                    expected,
                    self.starts[expected.step],
                    now_us(self.client),
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

    # After each step

    @invariant()
    def after_each_step(self) -> None:
        if not hasattr(self, "queues"):
            return
        self.look()
        self.the_server_holds_what_the_model_holds()
        self.all_keys_carry_one_hash_tag()
        self.a_grant_has_no_expiry_and_a_lease_has_one()
        self.who_waits_has_an_entry_and_every_entry_waits()
        self.nobody_is_lost()
        self.a_sweep_will_look_at_every_lock_with_waiters_in_time()

    def the_server_holds_what_the_model_holds(self) -> None:
        index = self.keys[0].queue()[3]
        self.same({key: value for key, value in self.held.items() if key != index}, self.expected())

    def all_keys_carry_one_hash_tag(self) -> None:
        assert all(key.startswith(f"{self.prefix}:{{{BUCKET:03x}}}:") for key in self.held)

    def a_grant_has_no_expiry_and_a_lease_has_one(self) -> None:
        for queue, keys in self.each():
            if queue.lock:
                life = self.lives[keys.lock]
                assert life == -1 if isinstance(queue.lock, Granted) else 0 < life <= TTL

    def who_waits_has_an_entry_and_every_entry_waits(self) -> None:
        for _, keys in self.each():
            waiting, parked, later, _ = keys.queue()
            places = [*self.held.get(waiting, ()), *self.held.get(later, ())]
            places += [self.held[keys.lock]["identity"]] if "due" in self.held.get(keys.lock, {}) else []
            assert sorted(places) == sorted(field for field in self.held.get(parked, ()) if ":" not in field)

    def nobody_is_lost(self) -> None:
        for owed, (_, keys) in zip(self.owed, self.each(), strict=True):
            assert owed <= {*self.held.get(keys.queue()[1], ()), *self.held.get(keys.dead(), ())}

    def a_sweep_will_look_at_every_lock_with_waiters_in_time(self) -> None:
        for queue, keys in self.each():
            look = self.held.get(keys.queue()[3], {}).get(keys.name)
            if isinstance(queue.lock, Granted):
                # A life is told in whole milliseconds.
                assert int(self.held[keys.lock]["due"]) - 1000 <= look <= int(self.held[keys.lock]["due"])
            elif queue.waiting:
                assert look is not None
                assert look <= self.looked + (self.lives[keys.lock] * 1000 + SECOND if queue.lock else 0)
            elif queue.later and not queue.lock:
                assert look is not None
                assert look <= min(self.number(until) for until in queue.later.values())

    def each(self) -> list[tuple[Queue, LockKeys]]:
        return list(zip(self.queues, self.keys, strict=True))

    def look(self) -> None:
        """All that the server holds, in three round trips."""
        found = list(self.client.scan_iter(f"{self.prefix}:*", count=10_000))
        with self.client.pipeline(transaction=False) as pipe:
            for key in found:
                pipe.type(key)
            types = pipe.execute()
        with self.client.pipeline(transaction=False) as pipe:
            pipe.time()
            for key, kind in zip(found, types, strict=True):
                pipe.pttl(key)
                if kind == "zset":
                    pipe.zrange(key, 0, -1, withscores=True)
                else:
                    pipe.hgetall(key) if kind == "hash" else pipe.get(key)
            (seconds, micros), *facts = pipe.execute()
        self.looked = int(seconds) * 1_000_000 + int(micros)
        self.lives: dict[str, int] = dict(zip(found, facts[::2], strict=True))
        self.held: dict[str, Any] = {
            key: dict(value) if kind == "zset" else value
            for key, kind, value in zip(found, types, facts[1::2], strict=True)
        }

    def expected(self) -> dict[str, object]:
        keys = self.keys[0]
        found: dict[str, object] = {keys.tombstone(acquisition): "1" for acquisition in self.bucket.gone}
        found |= {keys.done(identity): at for identity, at in self.bucket.done.items()}
        found |= {keys.last: self.bucket.last} if self.bucket.last else {}
        for queue, keys in self.each():
            waiting, parked, later, _ = keys.queue()
            lost = {f"{who}:rank": rank for who, (rank, _) in queue.lost.items()}
            lost |= {f"{who}:tries": str(tries) for who, (_, tries) in queue.lost.items()}
            lost |= {f"{who}:ousts": whom for who, whom in queue.ousted.items()}
            places: dict[str, Mapping[str, object]] = {
                waiting: queue.waiting,
                parked: {**queue.entries, **lost},
                later: queue.later,
                keys.dead(): queue.dead,
                keys.lock: self.lock_fields(queue),
            }
            found |= {key: dict(value) for key, value in places.items() if value}
        return found

    def lock_fields(self, queue: Queue) -> dict[str, object]:
        lock = queue.lock
        if lock is None:
            return {}
        fields: dict[str, object]
        if isinstance(lock, Held):
            fields = {"acq": lock.ask.acquisition, "identity": lock.ask.identity, "token": lock.token, "count": "1"}
            fields |= {"task": "t", "id": lock.ask.task_id, "node": "n", "pid": "1"}
            fields |= {name: "1" for name in ("word", "wake") if getattr(lock, name)}
            return fields | ({"queue": "1"} if lock.crowded else {})
        fields = {"acq": f"grant:{lock.identity}", "identity": lock.identity, "token": "0", "count": "0"}
        fields |= {"task": "app.post", "id": self.task_id(lock.identity), "node": "", "pid": "0"}
        fields |= {"queue": "1", "granter": lock.granter, "since": lock.turn, "due": lock.due, "rank": lock.rank}
        fields |= {"buried": lock.buried} if lock.buried else {}
        return fields | {name: "1" for name in ("published", "wake") if getattr(lock, name)}


def told(grant: records.Grant | None) -> tuple[object, ...] | None:
    return None if grant is None else (grant.identity, grant.entry, grant.turn)


def answered(answer: object) -> tuple[object, ...]:
    """In the model's words."""
    match answer:
        case records.Acquired(token, since, rank):
            assert round(since * 1e6) == token
            return ("acquired", token, rank)
        case records.Tombstoned():
            return ("gone",)
        case records.Duplicate(granted):
            return ("done", told(granted))
        case records.Held(_, twin, rank):
            return ("held", twin, rank)
        case records.Queued(count, rank, holder):
            return ("queue", count, rank, holder is not None)
        case records.Parked(rank, position, granted, ousted):
            return ("parked", rank, position, told(granted), ousted and (ousted.identity, ousted.entry))
    raise AssertionError(answer)


@pytest.mark.core
def test_the_scripts_of_the_queue_do_what_the_laws_say_in_every_order(clean_server: Server) -> None:
    class Bound(Scripts):
        server = clean_server

    run_state_machine_as_test(Bound, settings=settings(max_examples=80, stateful_step_count=40))
