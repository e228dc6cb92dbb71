"""The watchdog, round by round, on a clock and a store of its own: no thread, no server, no sleep."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import pytest

from celery_dlock.errors import ReplyLost, StoreUnavailable
from celery_dlock.locking import watchdog
from celery_dlock.locking.lease import drift_margin
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.watchdog import ROUND
from celery_dlock.runtime import PATIENT_TIMEOUTS
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.utils import threads as native
from tests.unit.fakes import FakeSource, WatchdogHarness, a_name


@pytest.fixture
def harness() -> WatchdogHarness:
    return WatchdogHarness()


# Renewal


@pytest.mark.parametrize("ttl", [1.0, 3.0, 30.0, 3600.0])
def test_a_lease_is_renewed_at_a_third_of_its_ttl(harness: WatchdogHarness, ttl: float) -> None:
    harness.hold(ttl=ttl)
    first, second = harness.asked_at(rounds=math.ceil(ttl / ROUND))[:2]
    # A round later at most, and earlier by no more than the margin.
    assert ttl / 3 - drift_margin(ttl) <= first <= ttl / 3 + ROUND
    assert ttl / 3 - drift_margin(ttl) <= second - first <= ttl / 3 + ROUND


def test_long_round_renews_leases_that_become_due_during_it(harness: WatchdogHarness) -> None:
    """Expected of rounds that begin each 0.5 s: a lease of 1.8 s is renewed in each, and not in every second one."""
    harness.hold("often", ttl=0.3)  # something is due in each
    record = harness.hold("x", ttl=1.8)
    harness.store.call_time = 0.3
    sent = []
    for _ in range(12):
        harness.clock.now += ROUND
        now, before = harness.clock.now, record.deadline
        harness.watchdog.run_round()
        sent += [now] if record.deadline > before else []
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert len(gaps) >= 9
    assert max(gaps) == pytest.approx(0.5)


def test_lease_that_ends_in_failing_rounds_is_told_lost_in_time(harness: WatchdogHarness) -> None:
    """Whatever the store's client raises; the thread logs it and goes on."""
    record = harness.hold(ttl=3.0)
    harness.store.away = RuntimeError("unforeseen")  # type: ignore[assignment]
    while not harness.lost:
        harness.clock.now += ROUND
        with contextlib.suppress(RuntimeError):
            harness.watchdog.run_round()
        assert harness.clock.now < record.deadline
    assert record.lost


def test_a_lease_that_is_kept_lives_for_ever(harness: WatchdogHarness) -> None:
    record = harness.hold(ttl=1.0)
    for _ in range(100):
        harness.run(ROUND)
        assert record.deadline > harness.clock.now + 0.3
        kept = harness.store.kept(a_name())
        assert kept
        assert record.deadline < kept.until
    assert not harness.lost


def test_the_deadline_counts_from_before_the_request_was_sent(harness: WatchdogHarness) -> None:
    record = harness.hold(ttl=30.0)
    harness.clock.now += 15
    sent = harness.clock.now
    harness.store.call_time = 4.0
    harness.watchdog.run_round()
    assert harness.clock.now == sent + 4.0
    assert record.deadline == pytest.approx(sent + 30 - drift_margin(30))


@pytest.mark.invariant("lease-deadline-precedes-request")
@pytest.mark.parametrize("error", [StoreUnavailable("away"), ReplyLost("cut")])
def test_the_deadline_moves_only_after_the_store_said_yes(harness: WatchdogHarness, error: StoreUnavailable) -> None:
    record = harness.hold(ttl=30.0)
    before = record.deadline
    harness.store.away = error
    harness.run(15)
    assert record.deadline == before
    harness.store.away = None
    harness.run(ROUND)
    assert record.deadline > before + 10
    assert not harness.lost


def test_a_renewal_never_moves_an_extended_deadline_back(harness: WatchdogHarness) -> None:
    record = harness.hold(ttl=30.0)
    record.renewed(harness.clock.now + 500)
    far = record.deadline
    harness.doubted.add(record.acquisition)  # so that it is renewed now
    harness.watchdog.run_round()
    assert harness.store.asked
    assert record.deadline == far


def test_many_leases_are_renewed_in_one_call(harness: WatchdogHarness) -> None:
    records = [harness.hold(str(number)) for number in range(500)]
    calls = harness.store.calls
    harness.run(10.2)
    assert harness.store.calls == calls + 1
    assert len(harness.store.asked) == 500
    assert all(record.deadline > harness.clock.now + 29 for record in records)


@pytest.mark.parametrize("state", [LeaseState.ACQUIRING, LeaseState.RELEASING])
def test_a_record_whose_owner_is_just_coming_or_going_is_left_alone(
    harness: WatchdogHarness, state: LeaseState
) -> None:
    record = harness.source.lease_table.open(a_name(), "owner.1", 30.0)
    if state is LeaseState.RELEASING:
        record.begin_release()
    assert harness.watchdog.run_round()
    assert harness.store.calls == 0


# Loss


def test_a_refused_lease_is_told_lost_once_and_asked_for_no_more(harness: WatchdogHarness) -> None:
    record = harness.hold()
    harness.store.lose(a_name())
    harness.run(60)
    assert [(who, why) for who, why, _ in harness.lost] == [("owner.x", "the store no longer knows it")]
    assert record.lost
    assert len(harness.store.asked) == 1


def test_a_lease_released_while_its_renewal_is_under_way_is_not_lost(harness: WatchdogHarness) -> None:
    record = harness.hold()
    harness.clock.now += 15
    renew = harness.store.renew

    def released_meanwhile(renewals: object, within: float | None = None) -> list[bool]:
        record.begin_release()
        harness.store.lose(a_name())
        return renew(renewals, within)  # type: ignore[arg-type]

    harness.store.renew = released_meanwhile  # type: ignore[method-assign]
    harness.watchdog.run_round()
    assert len(harness.store.asked) == 1
    assert not harness.lost
    assert not record.lost


@pytest.mark.invariant("lost-lease-is-reported")
@pytest.mark.parametrize("ttl", [1.0, 1.5, 2.0, 3.0, 10.0, 30.0, 600.0])
@pytest.mark.parametrize("answered_until", [0.0, 0.3, 0.9, 2.4])
@pytest.mark.parametrize("patient", [(), PATIENT_TIMEOUTS], ids=["hasty", "patient"])
@pytest.mark.parametrize("also", ["nothing else", "an end", "a longer lease"])
def test_a_lease_that_comes_unanswered_is_told_lost_before_its_end(
    ttl: float, answered_until: float, patient: tuple[float, ...], also: str
) -> None:
    """The store stops answering, so each call takes the whole timeout. The holder learns of it while it still holds."""
    harness = WatchdogHarness(patient=patient)
    record = harness.hold(ttl=ttl)
    if also == "a longer lease":
        harness.hold("longer", ttl=ttl * 10)
    harness.run(answered_until)
    end = record.deadline
    if also == "an end":
        harness.hold("left").delegate_release(ReleaseRequest().text)
    harness.store.away, harness.store.call_time = ReplyLost("no answer"), harness.timeout
    while not harness.lost and harness.clock.now < end + 10:
        harness.run(ROUND)
    ((who, why, told),) = harness.lost
    assert who == "owner.x"
    assert why.startswith("no renewal was confirmed before its deadline: ")
    assert record.lost
    assert told <= end, f"told {told - end:.2f} s after the end"
    # ... and not so early that a short outage costs leases that could still be saved.
    assert told >= end - 2 * (harness.timeout + ROUND) - 0.2
    harness.run(min(10, ttl))
    assert [lost[0] for lost in harness.lost] == ["owner.x"]


@pytest.mark.parametrize(
    ("ttl", "expected"), [(1.0, 0.4), (3.0, 0.4), (4.0, 0.7), (10.0, 1.5), (30.0, 3.0), (3600.0, 3.0)]
)
def test_a_slow_store_is_waited_for_as_long_as_no_lease_ends_soon(ttl: float, expected: float) -> None:
    """At a third of the ttl: the longest of the timeouts that fits three times into what is left."""
    harness = WatchdogHarness(patient=PATIENT_TIMEOUTS)
    harness.hold(ttl=ttl)
    harness.store.away, harness.store.call_time = ReplyLost("no answer"), harness.timeout
    harness.clock.now += ttl / 3
    before = harness.clock.now
    harness.watchdog.run_round()
    assert harness.store.asked
    assert harness.clock.now - before == pytest.approx(expected)


def test_where_one_lease_ends_soon_nobody_waits_long() -> None:
    harness = WatchdogHarness(patient=PATIENT_TIMEOUTS)
    harness.hold("long", ttl=3600.0)
    harness.hold("short", ttl=1.0)
    harness.store.away, harness.store.call_time = ReplyLost("no answer"), harness.timeout
    harness.clock.now += 0.4
    before = harness.clock.now
    harness.watchdog.run_round()
    assert harness.clock.now - before == pytest.approx(0.4)


def test_one_lost_lease_does_not_stop_the_others(harness: WatchdogHarness) -> None:
    records = [harness.hold(text) for text in "abc"]
    harness.store.lose(a_name("b"))
    harness.run(45)
    assert [record.lost for record in records] == [False, True, False]
    assert [record.deadline > harness.clock.now + 15 for record in records] == [True, False, True]


# Word


@pytest.mark.invariant("duplicate-delivery-is-no-conflict")
def test_a_doubtful_acquisition_leaves_word_in_the_next_round_and_only_once(harness: WatchdogHarness) -> None:
    record = harness.hold()
    harness.doubted.add(record.acquisition)
    harness.watchdog.run_round()
    kept = harness.store.kept(a_name())
    assert kept
    assert kept.notes == {"dup": "1"}
    harness.run(5)
    assert len(harness.store.asked) == 1


def test_word_that_the_store_did_not_hear_is_left_again(harness: WatchdogHarness) -> None:
    record = harness.hold()
    harness.doubted.add(record.acquisition)
    harness.store.away = ReplyLost("cut")
    harness.watchdog.run_round()
    harness.store.away = None
    harness.watchdog.run_round()
    assert [renewal.fields for renewal in harness.store.asked] == [(("dup", "1"),)] * 2
    assert not harness.lost


def test_an_acquisition_without_doubt_leaves_no_word(harness: WatchdogHarness) -> None:
    harness.hold()
    harness.run(12)
    assert [renewal.fields for renewal in harness.store.asked] == [()]


# The thread


def test_a_round_says_whether_there_is_anything_to_keep(harness: WatchdogHarness) -> None:
    """A child is watched as long as it lives; this process only while it holds something."""
    assert harness.watchdog.run_round() is False
    record = harness.hold()
    assert harness.watchdog.run_round() is True
    record.clear()
    assert harness.watchdog.run_round() is False
    child = FakeSource(child=True)
    harness.watchdog.watch(child)
    assert harness.watchdog.run_round() is True
    child.dead = True
    assert harness.watchdog.run_round() is False


def test_watching_twice_is_watching_once(harness: WatchdogHarness) -> None:
    harness.watchdog.watch(harness.source)
    harness.hold()
    harness.run(10.2)
    assert len(harness.store.asked) == 1


def test_an_error_in_one_round_does_not_end_the_thread(
    harness: WatchdogHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease_record = harness.hold()
    harness.source.lease_table.forget(lease_record)  # type: ignore[arg-type]  # nothing to keep, but for what the rounds say
    rounds: Iterator[Exception | bool] = iter([ZeroDivisionError(), True, KeyError(), True])

    def run_round() -> bool:
        outcome = next(rounds, False)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(harness.watchdog, "run_round", run_round)
    monkeypatch.setattr(harness.watchdog, "_busy", lambda: False)
    monkeypatch.setattr(native, "sleep", lambda seconds: None)
    harness.watchdog._loop.running.release()
    harness.watchdog._loop.run()
    assert [record.message for record in caplog.records] == ["the watchdog failed in one round, continuing"] * 2
    assert harness.store.closed


def test_a_watchdog_that_ends_looks_once_more_for_what_came_after_its_last_look(
    harness: WatchdogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], None]] = []
    monkeypatch.setattr(native, "start_daemon", started.append)
    monkeypatch.setattr(native, "sleep", lambda seconds: None)
    looks: list[str] = []

    def run_round() -> bool:
        looks.append("look")
        return False

    monkeypatch.setattr(harness.watchdog, "run_round", run_round)
    record = harness.hold()
    harness.watchdog.wake()
    assert not started, "it runs: nobody starts a second one"
    close = harness.watchdog._loop._close

    def close_and_release() -> None:
        close()
        if len(looks) > watchdog.IDLE_ROUNDS:
            record.clear()

    monkeypatch.setattr(harness.watchdog._loop, "_close", close_and_release)
    harness.watchdog._loop.running.release()
    harness.watchdog._loop.run()
    assert len(looks) == 2 * watchdog.IDLE_ROUNDS
    assert not started, "the same thread goes on"


def test_watchdog_that_cannot_be_started_is_started_at_the_next_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One "can't start new thread" must not end all renewals of the process."""
    harness = WatchdogHarness()
    harness.watchdog._loop.running.release()
    started: list[Callable[[], None]] = []

    def start(target: Callable[[], None]) -> None:
        started.append(target)
        if len(started) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native, "start_daemon", start)
    assert not harness.watchdog.watch(harness.source)
    assert harness.watchdog.watch(harness.source)
    assert len(started) == 2


def test_watchdog_says_when_it_looked_and_nothing_once_it_ends(
    harness: WatchdogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.hold()
    harness.watchdog.run_round()
    assert harness.source.lease_table.scanned_at == harness.clock.now
    looked, harness.clock.now = harness.clock.now, harness.clock.now + 20
    monkeypatch.setattr(harness.watchdog, "_renew", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        harness.watchdog.run_round()
    assert harness.source.lease_table.scanned_at == looked, "a round that failed has renewed nothing"
    harness.watchdog._close()
    assert harness.source.lease_table.scanned_at == 0.0


@pytest.mark.invariant("lost-lease-is-reported")
def test_watchdog_whose_rounds_fail_tells_of_leases_that_end(
    harness: WatchdogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by an error of a driver that is not the store's."""
    record = harness.hold(ttl=3.0)

    def fail(*_: object) -> list[bool]:
        raise ZeroDivisionError

    monkeypatch.setattr(harness.store, "renew", fail)
    while not record.lost and harness.clock.now < record.deadline:
        harness.clock.now += ROUND
        with contextlib.suppress(ZeroDivisionError):
            harness.watchdog.run_round()
    ((_, reason, at),) = harness.lost
    assert reason == "no renewal was confirmed before its deadline: the watchdog failed: ZeroDivisionError"
    assert at < record.deadline


def test_watchdog_whose_look_at_one_process_fails_renews_the_leases_of_others(
    harness: WatchdogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FakeSource(child=True)
    harness.watchdog._sources.insert(0, broken)
    record = harness.hold(ttl=3.0)
    monkeypatch.setattr(broken, "is_dead", lambda: 1 / 0)
    before = record.deadline
    harness.clock.now += 1.1
    with pytest.raises(ZeroDivisionError):
        harness.watchdog.run_round()
    assert record.deadline > before
    assert (harness.source.lease_table.scanned_at, broken.lease_table.scanned_at) == (harness.clock.now, 0.0)


def test_watchdog_whose_stop_of_a_body_fails_tells_of_the_loss(harness: WatchdogHarness) -> None:
    record = harness.hold()
    record.on_stop(lambda reason: 1 / 0)
    harness.store.lose(a_name())
    harness.clock.now += 11
    with pytest.raises(ZeroDivisionError):
        harness.watchdog.run_round()
    assert [acquisition for acquisition, _, _ in harness.lost] == [record.acquisition]
