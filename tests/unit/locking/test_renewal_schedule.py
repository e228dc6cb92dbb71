"""The renewal schedule finds what a look at every record finds, in the same round, and looks at few."""

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
from celery_dlock.locking.lease_table import LeaseRecord, LeaseState, LocalLeaseRecord
from celery_dlock.locking.renewal_schedule import IN_TURN, TURN_FRACTION, RenewalSchedule
from celery_dlock.locking.watchdog import ROUND
from celery_dlock.runtime import PATIENT_TIMEOUTS
from celery_dlock.store.base import ReleaseRequest
from tests.unit.fakes import FakeSource, Kept, WatchdogHarness, a_name

TTLS = (1.0, 1.5, 3.0, 9.0, 30.0)


class ScannedSource(FakeSource):
    """The same process without a schedule: the watchdog looks at every record in every round."""

    def due_records(self, now: float, until: float) -> Sequence[LeaseRecord]:
        return self.records()

    def first_deadline(self) -> float:
        return min((record.deadline for record in self.held()), default=float("inf"))


class Twin:
    """One process with its watchdog. The test does the same to two of them."""

    def __init__(self, source: FakeSource) -> None:
        self.harness = WatchdogHarness(patient=PATIENT_TIMEOUTS, source=source)
        self.records: list[LeaseRecord] = []

    def do(self, step: str, index: int, number: float) -> None:
        if step == "open":
            self.open(TTLS[index % len(TTLS)])
        elif step == "round":
            self.harness.clock.now += ROUND * (1 + index % 3 if number > 10 else 1)
            self.harness.watchdog.run_round()
        elif step in {"away", "back"}:
            self.harness.store.away = {"away": ReplyLost("cut"), "back": None}[step]
        elif step == "refusing":
            self.harness.store.away = StoreRefused("NOPERM")
        elif step == "slow":
            self.harness.store.call_time = number / 20
        elif self.records:
            getattr(self, step)(self.records[index % len(self.records)], number)

    def open(self, ttl: float) -> None:
        number = len(self.records)
        self.records.append(self.harness.source.lease_table.open(a_name(str(number)), f"owner.{number}", ttl))

    def held(self, record: LeaseRecord, _: float) -> None:
        if record.state is LeaseState.ACQUIRING:
            self.harness.store.locks[record.name] = Kept(record.acquisition, self.harness.clock.now + record.ttl, 1)
            record.held(self.harness.clock.now + record.ttl - drift_margin(record.ttl))

    def renew(self, record: LeaseRecord, _: float) -> None:
        if record.state is LeaseState.HELD and (kept := self.harness.store.kept(record.name)):
            kept.until = max(kept.until, self.harness.clock.now + record.ttl)
            record.renewed(self.harness.clock.now + record.ttl - drift_margin(record.ttl))

    def extend(self, record: LeaseRecord, number: float) -> None:
        if record.state is LeaseState.HELD and (kept := self.harness.store.kept(record.name)):
            kept.until = max(kept.until, self.harness.clock.now + 3 * number)
            record.renewed(self.harness.clock.now + 3 * number - drift_margin(3 * number))

    def limit(self, record: LeaseRecord, number: float) -> None:
        if record.state is LeaseState.HELD and not record.max_hold_until:  # a run sets it once
            record.set_max_hold(self.harness.clock.now + number)

    def begin(self, record: LeaseRecord, _: float) -> None:
        if record.state is LeaseState.HELD:
            record.begin_release()

    def delegate(self, record: LeaseRecord, _: float) -> None:
        if record.state in (LeaseState.ACQUIRING, LeaseState.HELD, LeaseState.RELEASING):
            record.delegate_release(ReleaseRequest().text)

    def clear(self, record: LeaseRecord, _: float) -> None:
        if record.state is not LeaseState.FREE:
            self.harness.store.locks.pop(record.name, None)
            record.clear()

    def lose(self, record: LeaseRecord, _: float) -> None:
        record.lose()

    def forget(self, record: LeaseRecord, _: float) -> None:
        """The store loses the lock."""
        self.harness.store.locks.pop(record.name, None)

    def doubt(self, record: LeaseRecord, _: float) -> None:
        self.harness.doubted.add(record.acquisition)

    def kill(self, record: LeaseRecord, number: float) -> None:
        self.harness.killed_by[record.acquisition] = self.harness.clock.now + number / 2

    def seen(self) -> tuple[Any, ...]:
        """Return all actions of the watchdog and their times. Requests of one round have no order."""
        harness = self.harness
        return (
            harness.clock.now,
            Counter((renewal.acquisition, renewal.fields) for renewal in harness.store.asked),
            harness.store.withins,
            Counter(harness.lost),
            len(harness.store.ended),
            {
                record.acquisition: (record.deadline, record.lost)
                for record in self.records
                if record.state is LeaseState.HELD
            },
        )


NOTED = ["open", "held", "renew", "extend", "limit", "begin", "delegate", "clear", "lose", "forget"]
#: A lease of 30 s, some rounds after its acquire. Its renewal is not due for a while.
ROUNDS = [("round", 0, 1.0)] * 5
HELD_30 = [("open", 4, 1.0), ("held", 0, 1.0), *ROUNDS]
STORE = ["away", "back", "refusing", "slow"]


def steps(names: list[str], *, most: int = 80) -> Any:
    """Histories in which most steps are rounds, and leases get held."""
    step = st.sampled_from([*names, *["round"] * len(names), "open", "held", "held", "back", "back"])
    return st.lists(st.tuples(step, st.integers(0, 12), st.floats(0.1, 20.0)), min_size=20, max_size=most)


def compare(history: list[tuple[str, int, float]]) -> None:
    ours, scanned = Twin(FakeSource()), Twin(ScannedSource())
    for number, step in enumerate(history):
        ours.do(*step)
        scanned.do(*step)
        assert ours.seen() == scanned.seen(), f"step {number}: {step}"
        first = ours.harness.source.first_deadline()
        if step[0] == "round":
            assert first == scanned.harness.source.first_deadline()


@pytest.mark.invariant("watchdog-renews", "lost-lease-is-reported")
@given(history=steps([*NOTED, *STORE]))
@example(history=[*HELD_30, ("limit", 0, 0.3), *ROUNDS])
@example(history=[*HELD_30, ("begin", 0, 1.0), *[("round", 2, 20.0)] * 30])
@example(history=[*HELD_30, ("delegate", 0, 1.0), *ROUNDS])
def test_schedule_alone_gives_the_renewals_and_losses_of_a_full_scan(history: list[tuple[str, int, float]]) -> None:
    """Expected: the same renewals, losses and releases in the same rounds, without any look in turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renewal_schedule, "IN_TURN", 0)
        compare(history)


@given(history=steps([*NOTED, *STORE, "doubt", "kill"]))
def test_few_leases_are_watched_as_by_a_full_scan(history: list[tuple[str, int, float]]) -> None:
    """Also what no call announces: doubt, and a kill for a hard time limit."""
    compare(history)


@pytest.mark.parametrize("change", ["doubt", "kill"])
def test_change_without_an_announcement_is_found_in_turn(change: str) -> None:
    """Expected of 1,000 leases: within ten rounds, a hundred in each."""
    twin = Twin(FakeSource())
    for number in range(10 * IN_TURN):
        twin.open(30.0)
        twin.held(twin.records[number], 0)
    twin.harness.run(1.0)
    getattr(twin, change)(twin.records[777], 0.0)
    twin.harness.run(10 * ROUND)
    if change == "doubt":
        assert [renewal.acquisition for renewal in twin.harness.store.asked] == ["owner.777"]
    else:
        assert [lost[0] for lost in twin.harness.lost] == ["owner.777"]


@pytest.mark.parametrize("released", [0, 10_000])
def test_change_in_a_lease_opened_during_a_turn_is_found_in_10_s(released: int) -> None:
    """Expected: 50 rounds, also if the leases whose turn it is are released, which leaves few in the table."""
    source = FakeSource()
    schedule = RenewalSchedule(source.lease_table)
    old = [source.lease_table.open(a_name(str(number)), f"old.{number}", 3600.0) for number in range(10_000)]
    for record in old:
        record.held(4600.0)
    schedule.due_records(1000.0, 1000.0)  # the turn begins
    opened = source.lease_table.open(a_name(), "opened", 3600.0)
    opened.held(4600.0)
    schedule.due_records(1000.0, 1000.0)  # plans it
    for record in old[:released]:
        record.clear()
    rounds = next(number for number in itertools.count(1) if opened in schedule.due_records(1000.0, 1000.0))
    assert rounds <= 10 / ROUND


def test_record_that_was_not_noted_is_found_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an exception had interrupted the note: the lease is renewed all the same."""
    harness = WatchdogHarness()
    monkeypatch.setattr(harness.source.lease_table, "changed", list)
    record = harness.hold(ttl=3.0)
    harness.run(30)
    assert record.deadline > harness.clock.now + 1.5
    assert not harness.lost


# Cost


def test_round_with_nothing_due_looks_at_few_of_many_leases() -> None:
    """Expected of 2,500 leases: the hundred whose turn it is."""
    harness = WatchdogHarness()
    for number in range(2_500):
        harness.hold(str(number))
    harness.run(ROUND)
    for _ in range(10):
        looked = harness.source.due_records(harness.clock.now, harness.clock.now)
        assert len(looked) == IN_TURN
    assert not harness.store.asked


@pytest.mark.parametrize("ttl", [3.0, 9.0, 30.0])
def test_leases_that_are_due_at_once_are_renewed_in_several_rounds_in_time(
    ttl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expected: each before half of its ttl is over, and in no round more than the rounds until then require."""
    monkeypatch.setattr(renewal_schedule, "RENEWALS", 10)
    monkeypatch.setattr(renewal_schedule, "IN_TURN", 0)  # a record whose turn it is would be renewed too
    harness = WatchdogHarness()
    records = [harness.hold(str(number), ttl=ttl) for number in range(400)]
    most, began = 0, harness.clock.now
    late = dict.fromkeys((record.acquisition for record in records), began)
    for _ in range(round(3 * ttl / ROUND)):
        asked = len(harness.store.asked)
        harness.clock.now += ROUND
        harness.watchdog.run_round()
        renewed = harness.store.asked[asked:]
        most = max(most, len(renewed))
        for renewal in renewed:
            assert harness.clock.now - late[renewal.acquisition] <= ttl / 2 + ROUND
            late[renewal.acquisition] = harness.clock.now
    assert all(harness.clock.now - renewed_at <= ttl / 2 + ROUND for renewed_at in late.values())
    share = -(-400 // max(1, int(ttl / 6 / ROUND) - 1))
    assert most <= max(10, share) + 10 + 400 // TURN_FRACTION
    assert not harness.lost


def test_lease_that_ends_soon_does_not_wait_for_many_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: 500 leases of an hour that are due do not put off the renewals of one second, and are spread."""
    monkeypatch.setattr(renewal_schedule, "RENEWALS", 10)
    monkeypatch.setattr(renewal_schedule, "IN_TURN", 0)
    harness = WatchdogHarness()
    for number in range(500):
        harness.hold(str(number), ttl=3600.0)
    harness.clock.now += 1199.0
    short = harness.hold("short", ttl=1.0)
    for _ in range(200):
        asked = len(harness.store.asked)
        harness.run(ROUND)
        assert short.deadline > harness.clock.now + 0.3
        assert len(harness.store.asked) - asked <= 10 + 1 + 501 // TURN_FRACTION
    assert not harness.lost
    assert len({renewal.acquisition for renewal in harness.store.asked}) == 501


def test_unanswered_call_takes_back_no_renewal_of_the_call_before_it() -> None:
    """Expected of 600 leases that end soon: 500 were confirmed and live on, 100 are reported."""
    harness = WatchdogHarness()
    records = [harness.hold(str(number), ttl=3.0) for number in range(600)]
    harness.clock.now = min(record.deadline for record in records) - 0.5
    harness.store.failures = [None, ReplyLost("cut")]
    harness.store.away = ReplyLost("cut")
    harness.watchdog.run_round()
    assert len(harness.lost) == 100
    assert sum(record.deadline > harness.clock.now + 1 for record in records) == 500


def test_freed_leases_of_a_long_ttl_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal_schedule, "SPARE", 20)
    source = FakeSource()
    schedule = RenewalSchedule(source.lease_table)
    for number in range(1_000):
        record = source.lease_table.open(a_name(str(number)), f"owner.{number}", 3600.0)
        record.held(4600.0)
        schedule.due_records(1000.0, 1000.0)
        record.clear()
    assert len(schedule._looks) <= 21
    assert len(schedule._deadlines) <= 21


def test_record_that_becomes_held_during_a_look_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal_schedule, "IN_TURN", 0)
    monkeypatch.setattr(renewal_schedule, "TURN_FRACTION", 10**9)
    source = FakeSource()
    schedule = RenewalSchedule(source.lease_table)
    for number in range(5):  # older ones, which are looked at in turn before it
        source.lease_table.open(a_name(), f"older.{number}", 3600.0).held(4600.0)
    record = source.lease_table.open(a_name(), "owner.1", 30.0)
    plan = schedule._plan

    def plan_while_it_is_taken(records: Sequence[LocalLeaseRecord]) -> None:
        plan(records)
        record.held(1030.0)

    with monkeypatch.context() as patch:
        patch.setattr(schedule, "_plan", plan_while_it_is_taken)
        schedule.due_records(1000.0, 1000.0)
    schedule.due_records(1000.0, 1000.0)
    assert record in schedule.due_records(1020.0, 1020.0)


def test_no_record_is_missed_that_another_thread_opens() -> None:
    """Expected: of 4 x 3,000 records that threads open during looks, each is planned or looked at."""
    source = FakeSource()
    schedule = RenewalSchedule(source.lease_table)
    lease_records: list[LeaseRecord] = []

    def work(worker: int) -> None:
        for number in range(3_000):
            lease_record = source.lease_table.open(a_name(), f"{worker}.{number}", 30.0)
            lease_record.held(1030.0)
            if number % 3:
                lease_record.begin_release()
                lease_record.clear()
            else:
                lease_records.append(lease_record)

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
    assert due == {lease_record.acquisition for lease_record in lease_records}
