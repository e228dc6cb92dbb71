"""The renewal schedule finds what a look at every record finds, at the same tick, and looks at few."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_dlock.errors import ReplyLost, StoreRefused
from celery_dlock.locking import renewal_schedule
from celery_dlock.locking.lease import drift_margin
from celery_dlock.locking.lease_table import LeaseRecord, LeaseState
from celery_dlock.locking.renewal_schedule import IN_TURN, TURN_FRACTION, RenewalSchedule
from celery_dlock.locking.watchdog import TICK
from celery_dlock.runtime import PATIENT_TIMEOUTS
from celery_dlock.store.base import ReleaseRequest
from tests.unit.fakes import FakeSource, Kept, WatchdogScene, a_name

TTLS = (1.0, 1.5, 3.0, 9.0, 30.0)


class ScannedSource(FakeSource):
    """The same process without a schedule: the watchdog looks at every record in every tick."""

    def due_records(self, now: float, until: float) -> Sequence[LeaseRecord]:
        return self.records()

    def first_deadline(self) -> float:
        return min((record.deadline for record in self.held()), default=float("inf"))


class Twin:
    """One process with its watchdog. The test does the same to two of them."""

    def __init__(self, source: FakeSource) -> None:
        self.scene = WatchdogScene(patient=PATIENT_TIMEOUTS, source=source)
        self.slots: list[LeaseRecord] = []

    def do(self, step: str, index: int, number: float) -> None:
        if step == "open":
            self.open(TTLS[index % len(TTLS)])
        elif step == "tick":
            self.scene.clock.now += TICK * (1 + index % 3 if number > 10 else 1)
            self.scene.watchdog.tick()
        elif step in {"away", "back"}:
            self.scene.store.away = {"away": ReplyLost("cut"), "back": None}[step]
        elif step == "refusing":
            self.scene.store.away = StoreRefused("NOPERM")
        elif step == "slow":
            self.scene.store.call_time = number / 20
        elif self.slots:
            getattr(self, step)(self.slots[index % len(self.slots)], number)

    def open(self, ttl: float) -> None:
        number = len(self.slots)
        self.slots.append(self.scene.source.slots.open(a_name(str(number)), f"owner.{number}", ttl))

    def held(self, slot: LeaseRecord, _: float) -> None:
        if slot.state is LeaseState.ACQUIRING:
            self.scene.store.locks[slot.name] = Kept(slot.acquisition, self.scene.clock.now + slot.ttl, 1)
            slot.held(self.scene.clock.now + slot.ttl - drift_margin(slot.ttl))

    def renew(self, slot: LeaseRecord, _: float) -> None:
        if slot.state is LeaseState.HELD and (kept := self.scene.store.kept(slot.name)):
            kept.until = max(kept.until, self.scene.clock.now + slot.ttl)
            slot.renewed(self.scene.clock.now + slot.ttl - drift_margin(slot.ttl))

    def extend(self, slot: LeaseRecord, number: float) -> None:
        if slot.state is LeaseState.HELD and (kept := self.scene.store.kept(slot.name)):
            kept.until = max(kept.until, self.scene.clock.now + 3 * number)
            slot.renewed(self.scene.clock.now + 3 * number - drift_margin(3 * number))

    def limit(self, slot: LeaseRecord, number: float) -> None:
        if slot.state is LeaseState.HELD and not slot.max_hold_until:  # a run sets it once
            slot.set_max_hold(self.scene.clock.now + number)

    def begin(self, slot: LeaseRecord, _: float) -> None:
        if slot.state is LeaseState.HELD:
            slot.begin_release()

    def delegate(self, slot: LeaseRecord, _: float) -> None:
        if slot.state in (LeaseState.ACQUIRING, LeaseState.HELD, LeaseState.RELEASING):
            slot.delegate_release(ReleaseRequest().text)

    def clear(self, slot: LeaseRecord, _: float) -> None:
        if slot.state is not LeaseState.FREE:
            self.scene.store.locks.pop(slot.name, None)
            slot.clear()

    def lose(self, slot: LeaseRecord, _: float) -> None:
        slot.lose()

    def forget(self, slot: LeaseRecord, _: float) -> None:
        """The store loses the lock."""
        self.scene.store.locks.pop(slot.name, None)

    def doubt(self, slot: LeaseRecord, _: float) -> None:
        self.scene.doubted.add(slot.acquisition)

    def kill(self, slot: LeaseRecord, number: float) -> None:
        self.scene.killed_by[slot.acquisition] = self.scene.clock.now + number / 2

    def seen(self) -> tuple[Any, ...]:
        """Return all actions of the watchdog and their times. Requests of one tick have no order."""
        scene = self.scene
        return (
            scene.clock.now,
            Counter((renewal.acquisition, renewal.fields) for renewal in scene.store.asked),
            scene.store.withins,
            Counter(scene.lost),
            len(scene.store.ended),
            {slot.acquisition: (slot.deadline, slot.lost) for slot in self.slots if slot.state is LeaseState.HELD},
        )


NOTED = ["open", "held", "renew", "extend", "limit", "begin", "delegate", "clear", "lose", "forget"]
#: A lease of 30 s, some ticks after its acquire. Its renewal is not due for a while.
TICKS = [("tick", 0, 1.0)] * 5
HELD_30 = [("open", 4, 1.0), ("held", 0, 1.0), *TICKS]
STORE = ["away", "back", "refusing", "slow"]


def steps(names: list[str], *, most: int = 80) -> Any:
    """Histories in which most steps are ticks, and leases get held."""
    step = st.sampled_from([*names, *["tick"] * len(names), "open", "held", "held", "back", "back"])
    return st.lists(st.tuples(step, st.integers(0, 12), st.floats(0.1, 20.0)), min_size=20, max_size=most)


def compare(history: list[tuple[str, int, float]]) -> None:
    ours, scanned = Twin(FakeSource()), Twin(ScannedSource())
    for number, step in enumerate(history):
        ours.do(*step)
        scanned.do(*step)
        assert ours.seen() == scanned.seen(), f"step {number}: {step}"
        first = ours.scene.source.first_deadline()
        if step[0] == "tick":
            assert first == scanned.scene.source.first_deadline()


@pytest.mark.invariant("watchdog-renews", "lost-lease-is-reported")
@given(history=steps([*NOTED, *STORE]))
@example(history=[*HELD_30, ("limit", 0, 0.3), *TICKS])
@example(history=[*HELD_30, ("begin", 0, 1.0), *[("tick", 2, 20.0)] * 30])
@example(history=[*HELD_30, ("delegate", 0, 1.0), *TICKS])
def test_schedule_alone_gives_the_renewals_and_losses_of_a_full_scan(history: list[tuple[str, int, float]]) -> None:
    """Expected: the same renewals, losses and releases at the same ticks, without any look in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewal_schedule, "IN_TURN", 0)
        compare(history)


@given(history=steps([*NOTED, *STORE, "doubt", "kill"]))
def test_few_leases_are_watched_as_by_a_full_scan(history: list[tuple[str, int, float]]) -> None:
    """Also what no call announces: doubt, and a kill for a hard time limit."""
    compare(history)


@pytest.mark.parametrize("change", ["doubt", "kill"])
def test_change_without_an_announcement_is_found_in_turn(change: str) -> None:
    """Expected of 1,000 leases: within ten ticks, a hundred in each."""
    twin = Twin(FakeSource())
    for number in range(10 * IN_TURN):
        twin.open(30.0)
        twin.held(twin.slots[number], 0)
    twin.scene.run(1.0)
    getattr(twin, change)(twin.slots[777], 0.0)
    twin.scene.run(10 * TICK)
    if change == "doubt":
        assert [renewal.acquisition for renewal in twin.scene.store.asked] == ["owner.777"]
    else:
        assert [lost[0] for lost in twin.scene.lost] == ["owner.777"]


@pytest.mark.parametrize("released", [0, 10_000])
def test_change_in_a_lease_opened_during_a_turn_is_found_in_10_s(released: int) -> None:
    """Expected: 50 ticks, also if the leases whose turn it is are released, which leaves few in the table."""
    source = FakeSource()
    schedule = RenewalSchedule(source.slots)
    old = [source.slots.open(a_name(str(number)), f"old.{number}", 3600.0) for number in range(10_000)]
    for record in old:
        record.held(4600.0)
    schedule.due_records(1000.0, 1000.0)  # the turn begins
    opened = source.slots.open(a_name(), "opened", 3600.0)
    opened.held(4600.0)
    schedule.due_records(1000.0, 1000.0)  # plans it
    for record in old[:released]:
        record.clear()
    ticks = next(tick for tick in itertools.count(1) if opened in schedule.due_records(1000.0, 1000.0))
    assert ticks <= 10 / TICK


def test_record_that_was_not_noted_is_found_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an exception had interrupted the note: the lease is renewed all the same."""
    scene = WatchdogScene()
    monkeypatch.setattr(scene.source.slots, "changed", list)
    slot = scene.hold(ttl=3.0)
    scene.run(30)
    assert slot.deadline > scene.clock.now + 1.5
    assert not scene.lost


# Cost


def test_tick_with_nothing_due_looks_at_few_of_many_leases() -> None:
    """Expected of 2,500 leases: the hundred whose turn it is."""
    scene = WatchdogScene()
    for number in range(2_500):
        scene.hold(str(number))
    scene.run(TICK)
    for _ in range(10):
        looked = scene.source.due_records(scene.clock.now, scene.clock.now)
        assert len(looked) == IN_TURN
    assert not scene.store.asked


@pytest.mark.parametrize("ttl", [3.0, 9.0, 30.0])
def test_leases_that_are_due_at_once_are_renewed_in_several_ticks_in_time(
    ttl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: each before half of its ttl is over, and in no tick more than the ticks until then require."""
    monkeypatch.setattr(renewal_schedule, "RENEWALS", 10)
    monkeypatch.setattr(renewal_schedule, "IN_TURN", 0)  # a record whose turn it is would be renewed too
    scene = WatchdogScene()
    slots = [scene.hold(str(number), ttl=ttl) for number in range(400)]
    most, began = 0, scene.clock.now
    late = dict.fromkeys((slot.acquisition for slot in slots), began)
    for _ in range(round(3 * ttl / TICK)):
        asked = len(scene.store.asked)
        scene.clock.now += TICK
        scene.watchdog.tick()
        renewed = scene.store.asked[asked:]
        most = max(most, len(renewed))
        for renewal in renewed:
            assert scene.clock.now - late[renewal.acquisition] <= ttl / 2 + TICK
            late[renewal.acquisition] = scene.clock.now
    assert all(scene.clock.now - renewed_at <= ttl / 2 + TICK for renewed_at in late.values())
    share = -(-400 // max(1, int(ttl / 6 / TICK) - 1))
    assert most <= max(10, share) + 10 + 400 // TURN_FRACTION
    assert not scene.lost


def test_lease_that_ends_soon_does_not_wait_for_many_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: 500 leases of an hour that are due do not put off the renewals of one second, and are spread."""
    monkeypatch.setattr(renewal_schedule, "RENEWALS", 10)
    monkeypatch.setattr(renewal_schedule, "IN_TURN", 0)
    scene = WatchdogScene()
    for number in range(500):
        scene.hold(str(number), ttl=3600.0)
    scene.clock.now += 1199.0
    short = scene.hold("short", ttl=1.0)
    for _ in range(200):
        asked = len(scene.store.asked)
        scene.run(TICK)
        assert short.deadline > scene.clock.now + 0.3
        assert len(scene.store.asked) - asked <= 10 + 1 + 501 // TURN_FRACTION
    assert not scene.lost
    assert len({renewal.acquisition for renewal in scene.store.asked}) == 501


def test_unanswered_call_takes_back_no_renewal_of_the_call_before_it() -> None:
    """Expected of 600 leases that end soon: 500 were confirmed and live on, 100 are reported."""
    scene = WatchdogScene()
    slots = [scene.hold(str(number), ttl=3.0) for number in range(600)]
    scene.clock.now = min(slot.deadline for slot in slots) - 0.5
    scene.store.failures = [None, ReplyLost("cut")]
    scene.store.away = ReplyLost("cut")
    scene.watchdog.tick()
    assert len(scene.lost) == 100
    assert sum(slot.deadline > scene.clock.now + 1 for slot in slots) == 500


def test_freed_leases_of_a_long_ttl_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal_schedule, "SPARE", 20)
    source = FakeSource()
    schedule = RenewalSchedule(source.slots)
    for number in range(1_000):
        slot = source.slots.open(a_name(str(number)), f"owner.{number}", 3600.0)
        slot.held(4600.0)
        schedule.due_records(1000.0, 1000.0)
        slot.clear()
    assert len(schedule._looks) <= 21
    assert len(schedule._deadlines) <= 21


def test_no_record_is_missed_that_another_thread_opens() -> None:
    """Expected: of 4 x 3,000 records that threads open during looks, each is planned or looked at."""
    source = FakeSource()
    schedule = RenewalSchedule(source.slots)
    slots: list[LeaseRecord] = []

    def work(worker: int) -> None:
        for number in range(3_000):
            slot = source.slots.open(a_name(), f"{worker}.{number}", 30.0)
            slot.held(1030.0)
            if number % 3:
                slot.begin_release()
                slot.clear()
            else:
                slots.append(slot)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewal_schedule, "IN_TURN", 0)
        patch.setattr(renewal_schedule, "TURN_FRACTION", 10**9)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            schedule.due_records(1000.0, 1000.0)
        schedule.due_records(1000.0, 1000.0)
        due = {record.acquisition for record in schedule.due_records(1020.0, 1020.0)}
        due |= {record.acquisition for record in itertools.chain(schedule.due_records(1030.0, 1030.0))}
    assert due == {slot.acquisition for slot in slots}
