"""The queue of a store against a model written from the laws, in every order that Hypothesis can think of.

Two lock names of one bucket. Time passes by the client's hand: it moves due times into the past instead of waiting.
"""

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, precondition, rule, run_state_machine_as_test

from celery_dlock.store.model import Identity
from tests.contract.queue_helpers import TURN, entry_of
from tests.contract.queue_invariants import Laws
from tests.contract.queue_state_machine import PEOPLE, told
from tests.contract.queue_values import PAST, Ask, Granted, Held
from tests.contract.stateful_targets import TARGETS
from tests.support.servers import Server
from tests.support.stores import name_in

name = st.sampled_from([0, 0, 0, 1])
person = st.sampled_from(PEOPLE)
flag = st.booleans()
seldom = st.sampled_from([False, False, False, True])


class Scripts(Laws):
    asks = Bundle("asks")

    @initialize(waiters=st.integers(0, 4), seed=st.integers(0, 999))
    def begin(self, *, waiters: int, seed: int) -> None:
        self.set_up(random.Random(seed))
        # To begin with a queue saves many steps on the way to one.
        self.send(0, Ask("o.0", queues=False))
        for who in PEOPLE[:waiters]:
            task_id = f"{who}0"
            self.send(0, Ask(f"{who}.0", Identity(task_id).digest, task_id, entry=entry_of(task_id)))

    # Arrivals

    @rule(
        target=asks,
        name=name,
        who=person,
        redelivered=seldom,
        republished=seldom,
        carries=st.none() | st.integers(0, 30),
        after=st.none() | st.integers(0, 30),
        parks=flag,
        limit=st.sampled_from([0, 1, 2]),
        evicts=flag,
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
            # A dead letter was delivered before: whatever still arrives of it is a copy.
            **{**facts, "republished": facts["republished"] or identity in queue.dead},
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

    @precondition(lambda self: any(queue.entries or queue.dead for queue in self.queues))
    @rule(target=asks, pick=name, who=st.integers(0, 5), carries=flag, limit=st.sampled_from([0, 1]))
    def a_copy_of_a_waiter_arrives(self, *, pick: int, who: int, carries: bool, limit: int) -> Ask:
        name = pick if self.queues[pick].entries or self.queues[pick].dead else 1 - pick
        queue = self.queues[name]
        found = sorted({*queue.entries, *queue.dead})
        identity = found[who % len(found)]
        rank = queue.waiting.get(identity) if carries else None
        task_id, number = self.task_id(identity), f"o.{next(self.numbers)}"
        ask = Ask(number, identity, task_id, not carries, carries, rank, entry=entry_of(task_id), limit=limit)
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

    @rule(ask=asks, name=name, final=flag, by_watchdog=flag)
    def release(self, *, ask: Ask, name: int, final: bool, by_watchdog: bool) -> None:
        if self.is_of(ask, name):
            self.end(name, ask, final=final, queue=ask.queues and not by_watchdog)

    @precondition(lambda self: self.any_lock(Held))
    @rule(pick=name, final=flag, by_watchdog=seldom)
    def the_holder_releases(self, *, pick: int, final: bool, by_watchdog: bool) -> None:
        name, lock = self.with_lock(pick, Held)
        assert isinstance(lock, Held)
        self.end(name, lock.ask, final=final, queue=lock.ask.queues and not by_watchdog)

    @precondition(lambda self: self.any_lock(Granted))
    @rule(pick=name, by_watchdog=flag)
    def a_run_that_lost_its_lease_ends_while_its_copy_has_the_turn(self, *, pick: int, by_watchdog: bool) -> None:
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        ask = Ask(f"lost.{next(self.numbers)}", lock.identity, self.task_id(lock.identity))
        self.end(name, ask, final=True, queue=not by_watchdog)

    @precondition(lambda self: self.any_lock(Held))
    @rule(pick=name)
    def the_lease_ends(self, *, pick: int) -> None:
        """The holder died, with all that it knew."""
        self.last = None
        name, _ = self.with_lock(pick, Held)
        self.queues[name].lock = None
        self.target.expire_lock(name_in(self.keys[name]))
        self.target.visit(name_in(self.keys[name]))

    @precondition(lambda self: any(queue.entries or queue.dead for queue in self.queues))
    @rule(name=name, who=person, dead_letter=seldom, ended=seldom)
    def a_waiter_is_taken_out(self, *, name: int, who: str, dead_letter: bool, ended: bool) -> None:
        identity, granter = Identity(f"{who}{name}").digest, f"t.{next(self.numbers)}"

        def once() -> object:
            queue, name_ = self.queues[name], name_in(self.keys[name])
            expected, taken = self.both(
                lambda: queue.take_out(identity, granter, self.now(), dead_letter=dead_letter, ended=ended),
                lambda: self.store.remove_waiter(name_, identity, granter, dead_letter=dead_letter, ended=ended),
            )
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

    @precondition(lambda self: self.any_lock(Granted))
    @rule(pick=name, who=st.none() | st.none() | person)
    def the_message_is_published(self, *, pick: int, who: str | None) -> None:
        self.last = None
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        identity = Identity(f"{who}{name}").digest if who else lock.identity
        expected = self.queues[name].publish(identity, self.now())
        assert self.store.confirm_publish(name_in(self.keys[name]), identity, TURN) == expected

    @precondition(lambda self: self.any_lock(Granted))
    @rule(pick=name)
    def a_turn_passes(self, *, pick: int) -> None:
        self.last = None
        name, lock = self.with_lock(pick, Granted)
        assert isinstance(lock, Granted)
        lock.due = PAST
        self.target.end_grant_time(name_in(self.keys[name]))

    @precondition(lambda self: any(queue.later for queue in self.queues))
    @rule(pick=st.integers(0, 3))
    def the_time_between_turns_passes(self, *, pick: int) -> None:
        self.last = None
        for queue, keys in zip(self.queues, self.keys, strict=True):
            if queue.later:
                identity = sorted(queue.later)[pick % len(queue.later)]
                queue.later[identity] = PAST
                self.target.end_delay(name_in(keys), identity)
                if not isinstance(queue.lock, Granted):
                    self.target.visit(name_in(keys))

    # Others

    @precondition(lambda self: self.last is not None)
    @rule(forgotten=seldom)
    def the_last_command_arrives_twice(self, *, forgotten: bool) -> None:
        if forgotten:
            self.target.forget_scripts()
        assert self.last
        self.last()


@pytest.mark.invariant("queue-protocol-is-explored")
@pytest.mark.core
@pytest.mark.timeout(300)  # to make a failing example small takes time
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("times", [0.5, pytest.param(3, marks=pytest.mark.slow)])
def test_the_scripts_of_the_queue_do_what_the_laws_say_in_every_order(
    clean_server: Server, times: float, target: str
) -> None:
    examples = round(times * settings.default.max_examples)

    class Bound(Scripts):
        make_target = partial(TARGETS[target], clean_server)

    run_state_machine_as_test(Bound, settings=settings(stateful_step_count=50, max_examples=examples))
