"""The watchdog, tick by tick, on a clock and a store of its own: no thread, no server, no sleep."""

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
from celery_dlock.locking.watchdog import TICK
from celery_dlock.runtime import PATIENT_TIMEOUTS
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.utils import threads as native
from tests.unit.fakes import FakeSource, WatchdogScene, a_name


@pytest.fixture
def scene() -> WatchdogScene:
    return WatchdogScene()


# Renewal


@pytest.mark.parametrize("ttl", [1.0, 3.0, 30.0, 3600.0])
def test_a_lease_is_renewed_at_a_third_of_its_ttl(scene: WatchdogScene, ttl: float) -> None:
    scene.hold(ttl=ttl)
    first, second = scene.asked_at(ticks=math.ceil(ttl / TICK))[:2]
    # A tick later at most, and earlier by no more than the margin.
    assert ttl / 3 - drift_margin(ttl) <= first <= ttl / 3 + TICK
    assert ttl / 3 - drift_margin(ttl) <= second - first <= ttl / 3 + TICK


def test_long_round_renews_leases_that_become_due_during_it(scene: WatchdogScene) -> None:
    """Expected of rounds that begin each 0.5 s: a lease of 1.8 s is renewed in each, and not in every second one."""
    scene.hold("often", ttl=0.3)  # something is due in each
    slot = scene.hold("x", ttl=1.8)
    scene.store.call_time = 0.3
    sent = []
    for _ in range(12):
        scene.clock.now += TICK
        now, before = scene.clock.now, slot.deadline
        scene.watchdog.tick()
        sent += [now] if slot.deadline > before else []
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert len(gaps) >= 9
    assert max(gaps) == pytest.approx(0.5)


def test_lease_that_ends_in_failing_rounds_is_told_lost_in_time(scene: WatchdogScene) -> None:
    """Whatever the store's client raises; the thread logs it and goes on."""
    slot = scene.hold(ttl=3.0)
    scene.store.away = RuntimeError("unforeseen")  # type: ignore[assignment]
    while not scene.lost:
        scene.clock.now += TICK
        with contextlib.suppress(RuntimeError):
            scene.watchdog.tick()
        assert scene.clock.now < slot.deadline
    assert slot.lost


def test_a_lease_that_is_kept_lives_for_ever(scene: WatchdogScene) -> None:
    slot = scene.hold(ttl=1.0)
    for _ in range(100):
        scene.run(TICK)
        assert slot.deadline > scene.clock.now + 0.3
        kept = scene.store.kept(a_name())
        assert kept
        assert slot.deadline < kept.until
    assert not scene.lost


def test_the_deadline_counts_from_before_the_request_was_sent(scene: WatchdogScene) -> None:
    slot = scene.hold(ttl=30.0)
    scene.clock.now += 15
    sent = scene.clock.now
    scene.store.call_time = 4.0
    scene.watchdog.tick()
    assert scene.clock.now == sent + 4.0
    assert slot.deadline == pytest.approx(sent + 30 - drift_margin(30))


@pytest.mark.invariant("lease-deadline-precedes-request")
@pytest.mark.parametrize("error", [StoreUnavailable("away"), ReplyLost("cut")])
def test_the_deadline_moves_only_after_the_store_said_yes(scene: WatchdogScene, error: StoreUnavailable) -> None:
    slot = scene.hold(ttl=30.0)
    before = slot.deadline
    scene.store.away = error
    scene.run(15)
    assert slot.deadline == before
    scene.store.away = None
    scene.run(TICK)
    assert slot.deadline > before + 10
    assert not scene.lost


def test_a_renewal_never_moves_an_extended_deadline_back(scene: WatchdogScene) -> None:
    slot = scene.hold(ttl=30.0)
    slot.renewed(scene.clock.now + 500)
    far = slot.deadline
    scene.doubted.add(slot.acquisition)  # so that it is renewed now
    scene.watchdog.tick()
    assert scene.store.asked
    assert slot.deadline == far


def test_many_leases_are_renewed_in_one_call(scene: WatchdogScene) -> None:
    slots = [scene.hold(str(number)) for number in range(500)]
    calls = scene.store.calls
    scene.run(10.2)
    assert scene.store.calls == calls + 1
    assert len(scene.store.asked) == 500
    assert all(slot.deadline > scene.clock.now + 29 for slot in slots)


@pytest.mark.parametrize("state", [LeaseState.ACQUIRING, LeaseState.RELEASING])
def test_a_slot_whose_owner_is_just_coming_or_going_is_left_alone(scene: WatchdogScene, state: LeaseState) -> None:
    slot = scene.source.slots.open(a_name(), "owner.1", 30.0)
    if state is LeaseState.RELEASING:
        slot.begin_release()
    assert scene.watchdog.tick()
    assert scene.store.calls == 0


# Loss


def test_a_refused_lease_is_told_lost_once_and_asked_for_no_more(scene: WatchdogScene) -> None:
    slot = scene.hold()
    scene.store.lose(a_name())
    scene.run(60)
    assert [(who, why) for who, why, _ in scene.lost] == [("owner.x", "the store no longer knows it")]
    assert slot.lost
    assert len(scene.store.asked) == 1


def test_a_lease_released_while_its_renewal_is_under_way_is_not_lost(scene: WatchdogScene) -> None:
    slot = scene.hold()
    scene.clock.now += 15
    renew = scene.store.renew

    def released_meanwhile(renewals: object, within: float | None = None) -> list[bool]:
        slot.begin_release()
        scene.store.lose(a_name())
        return renew(renewals, within)  # type: ignore[arg-type]

    scene.store.renew = released_meanwhile  # type: ignore[method-assign]
    scene.watchdog.tick()
    assert len(scene.store.asked) == 1
    assert not scene.lost
    assert not slot.lost


@pytest.mark.invariant("lost-lease-is-reported")
@pytest.mark.parametrize("ttl", [1.0, 1.5, 2.0, 3.0, 10.0, 30.0, 600.0])
@pytest.mark.parametrize("answered_until", [0.0, 0.3, 0.9, 2.4])
@pytest.mark.parametrize("patient", [(), PATIENT_TIMEOUTS], ids=["hasty", "patient"])
@pytest.mark.parametrize("also", ["nothing else", "an end", "a longer lease"])
def test_a_lease_that_comes_unanswered_is_told_lost_before_its_end(
    ttl: float, answered_until: float, patient: tuple[float, ...], also: str
) -> None:
    """The store stops answering, so each call takes the whole timeout. The holder learns of it while it still holds."""
    scene = WatchdogScene(patient=patient)
    slot = scene.hold(ttl=ttl)
    if also == "a longer lease":
        scene.hold("longer", ttl=ttl * 10)
    scene.run(answered_until)
    end = slot.deadline
    if also == "an end":
        scene.hold("left").delegate_release(ReleaseRequest().text)
    scene.store.away, scene.store.call_time = ReplyLost("no answer"), scene.timeout
    while not scene.lost and scene.clock.now < end + 10:
        scene.run(TICK)
    ((who, why, told),) = scene.lost
    assert who == "owner.x"
    assert why.startswith("no renewal was confirmed before its deadline: ")
    assert slot.lost
    assert told <= end, f"told {told - end:.2f} s after the end"
    # ... and not so early that a short outage costs leases that could still be saved.
    assert told >= end - 2 * (scene.timeout + TICK) - 0.2
    scene.run(min(10, ttl))
    assert [lost[0] for lost in scene.lost] == ["owner.x"]


@pytest.mark.parametrize(
    ("ttl", "expected"), [(1.0, 0.4), (3.0, 0.4), (4.0, 0.7), (10.0, 1.5), (30.0, 3.0), (3600.0, 3.0)]
)
def test_a_slow_store_is_waited_for_as_long_as_no_lease_ends_soon(ttl: float, expected: float) -> None:
    """At a third of the ttl: the longest of the timeouts that fits three times into what is left."""
    scene = WatchdogScene(patient=PATIENT_TIMEOUTS)
    scene.hold(ttl=ttl)
    scene.store.away, scene.store.call_time = ReplyLost("no answer"), scene.timeout
    scene.clock.now += ttl / 3
    before = scene.clock.now
    scene.watchdog.tick()
    assert scene.store.asked
    assert scene.clock.now - before == pytest.approx(expected)


def test_where_one_lease_ends_soon_nobody_waits_long() -> None:
    scene = WatchdogScene(patient=PATIENT_TIMEOUTS)
    scene.hold("long", ttl=3600.0)
    scene.hold("short", ttl=1.0)
    scene.store.away, scene.store.call_time = ReplyLost("no answer"), scene.timeout
    scene.clock.now += 0.4
    before = scene.clock.now
    scene.watchdog.tick()
    assert scene.clock.now - before == pytest.approx(0.4)


def test_one_lost_lease_does_not_stop_the_others(scene: WatchdogScene) -> None:
    slots = [scene.hold(text) for text in "abc"]
    scene.store.lose(a_name("b"))
    scene.run(45)
    assert [slot.lost for slot in slots] == [False, True, False]
    assert [slot.deadline > scene.clock.now + 15 for slot in slots] == [True, False, True]


# Word


@pytest.mark.invariant("duplicate-delivery-is-no-conflict")
def test_a_doubtful_acquisition_leaves_word_at_the_next_tick_and_only_once(scene: WatchdogScene) -> None:
    slot = scene.hold()
    scene.doubted.add(slot.acquisition)
    scene.watchdog.tick()
    kept = scene.store.kept(a_name())
    assert kept
    assert kept.notes == {"dup": "1"}
    scene.run(5)
    assert len(scene.store.asked) == 1


def test_word_that_the_store_did_not_hear_is_left_again(scene: WatchdogScene) -> None:
    slot = scene.hold()
    scene.doubted.add(slot.acquisition)
    scene.store.away = ReplyLost("cut")
    scene.watchdog.tick()
    scene.store.away = None
    scene.watchdog.tick()
    assert [renewal.fields for renewal in scene.store.asked] == [(("dup", "1"),)] * 2
    assert not scene.lost


def test_an_acquisition_without_doubt_leaves_no_word(scene: WatchdogScene) -> None:
    scene.hold()
    scene.run(12)
    assert [renewal.fields for renewal in scene.store.asked] == [()]


# The thread


def test_a_tick_says_whether_there_is_anything_to_keep(scene: WatchdogScene) -> None:
    """A child is watched as long as it lives; this process only while it holds something."""
    assert scene.watchdog.tick() is False
    slot = scene.hold()
    assert scene.watchdog.tick() is True
    slot.clear()
    assert scene.watchdog.tick() is False
    child = FakeSource(child=True)
    scene.watchdog.watch(child)
    assert scene.watchdog.tick() is True
    child.dead = True
    assert scene.watchdog.tick() is False


def test_watching_twice_is_watching_once(scene: WatchdogScene) -> None:
    scene.watchdog.watch(scene.source)
    scene.hold()
    scene.run(10.2)
    assert len(scene.store.asked) == 1


def test_an_error_in_one_round_does_not_end_the_thread(
    scene: WatchdogScene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slot = scene.hold()
    scene.source.slots.forget(slot)  # type: ignore[arg-type]  # nothing to keep, but for what the rounds say
    rounds: Iterator[Exception | bool] = iter([ZeroDivisionError(), True, KeyError(), True])

    def tick() -> bool:
        outcome = next(rounds, False)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(scene.watchdog, "tick", tick)
    monkeypatch.setattr(scene.watchdog, "_busy", lambda: False)
    monkeypatch.setattr(native, "sleep", lambda seconds: None)
    scene.watchdog._loop.running.drop()
    scene.watchdog._loop.run()
    assert [record.message for record in caplog.records] == ["the watchdog failed in one round, continuing"] * 2
    assert scene.store.closed


def test_a_watchdog_that_ends_looks_once_more_for_what_came_after_its_last_look(
    scene: WatchdogScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Callable[[], None]] = []
    monkeypatch.setattr(native, "start_daemon", started.append)
    monkeypatch.setattr(native, "sleep", lambda seconds: None)
    looks: list[str] = []

    def tick() -> bool:
        looks.append("look")
        return False

    monkeypatch.setattr(scene.watchdog, "tick", tick)
    slot = scene.hold()
    scene.watchdog.wake()
    assert not started, "it runs: nobody starts a second one"
    close = scene.watchdog._loop._close

    def close_and_release() -> None:
        close()
        if len(looks) > watchdog.IDLE_TICKS:
            slot.clear()

    monkeypatch.setattr(scene.watchdog._loop, "_close", close_and_release)
    scene.watchdog._loop.running.drop()
    scene.watchdog._loop.run()
    assert len(looks) == 2 * watchdog.IDLE_TICKS
    assert not started, "the same thread goes on"


def test_watchdog_that_cannot_be_started_is_started_at_the_next_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """One "can't start new thread" must not end all renewals of the process."""
    scene = WatchdogScene()
    scene.watchdog._loop.running.drop()
    started: list[Callable[[], None]] = []

    def start(target: Callable[[], None]) -> None:
        started.append(target)
        if len(started) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native, "start_daemon", start)
    assert not scene.watchdog.watch(scene.source)
    assert scene.watchdog.watch(scene.source)
    assert len(started) == 2


def test_watchdog_says_when_it_looked_and_nothing_once_it_ends(
    scene: WatchdogScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.hold()
    scene.watchdog.tick()
    assert scene.source.slots.scanned_at == scene.clock.now
    looked, scene.clock.now = scene.clock.now, scene.clock.now + 20
    monkeypatch.setattr(scene.watchdog, "_renew", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scene.watchdog.tick()
    assert scene.source.slots.scanned_at == looked, "a round that failed has renewed nothing"
    scene.watchdog._close()
    assert scene.source.slots.scanned_at == 0.0


@pytest.mark.invariant("lost-lease-is-reported")
def test_watchdog_whose_rounds_fail_tells_of_leases_that_end(
    scene: WatchdogScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by an error of a driver that is not the store's."""
    slot = scene.hold(ttl=3.0)

    def fail(*_: object) -> list[bool]:
        raise ZeroDivisionError

    monkeypatch.setattr(scene.store, "renew", fail)
    while not slot.lost and scene.clock.now < slot.deadline:
        scene.clock.now += TICK
        with contextlib.suppress(ZeroDivisionError):
            scene.watchdog.tick()
    ((_, reason, at),) = scene.lost
    assert reason == "no renewal was confirmed before its deadline: the watchdog failed: ZeroDivisionError"
    assert at < slot.deadline


def test_watchdog_whose_look_at_one_process_fails_renews_the_leases_of_others(
    scene: WatchdogScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FakeSource(child=True)
    scene.watchdog._sources.insert(0, broken)
    slot = scene.hold(ttl=3.0)
    monkeypatch.setattr(broken, "is_dead", lambda: 1 / 0)
    before = slot.deadline
    scene.clock.now += 1.1
    with pytest.raises(ZeroDivisionError):
        scene.watchdog.tick()
    assert slot.deadline > before
    assert (scene.source.slots.scanned_at, broken.slots.scanned_at) == (scene.clock.now, 0.0)


def test_watchdog_whose_stop_of_a_body_fails_tells_of_the_loss(scene: WatchdogScene) -> None:
    slot = scene.hold()
    slot.on_stop(lambda reason: 1 / 0)
    scene.store.lose(a_name())
    scene.clock.now += 11
    with pytest.raises(ZeroDivisionError):
        scene.watchdog.tick()
    assert [acquisition for acquisition, _, _ in scene.lost] == [slot.acquisition]
