"""The watchdog's wait for answers, and the cost of a refusal. Tick by tick, on a clock of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_dlock.errors import ReplyLost, StoreRefused
from celery_dlock.keys.key_spec import LockName
from celery_dlock.locking.lease_table import LeaseRecord, LeaseState
from celery_dlock.locking.watchdog import TICK, Watchdog
from celery_dlock.options.durability import PRIMARY, Durability
from celery_dlock.runtime import PATIENT_TIMEOUTS, WATCHDOG_TIMEOUT
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Released, Renewal
from tests.unit.fakes import FakeStore, Kept, WatchdogScene, a_name

PATIENT = max(PATIENT_TIMEOUTS)


@dataclass(frozen=True)
class Call:
    """One call of the watchdog: with which patience, and how long the shortest lease had to live then."""

    patience: float
    left: float


class WaitingStore(FakeStore):
    """One server as it is seen with one patience: what takes longer is unanswered after that time."""

    def __init__(self, scene: PatientScene, patience: float) -> None:
        super().__init__(scene.clock)
        self.scene = scene
        self.patience = patience
        self.locks = scene.store.locks

    def _call(self, within: float | None = None) -> None:
        scene = self.scene
        patience = self.patience if within is None else min(within, self.patience)
        leases = [slot.deadline for slot in scene.slots if slot.state is LeaseState.HELD and not slot.lost]
        scene.made.append(Call(patience, min(leases) - scene.clock.now if leases else 0.0))
        scene.clock.now += min(patience, scene.answers_in)
        if scene.answers_in > patience:
            raise ReplyLost("no answer")

    def release(
        self, name: LockName, acquisition: str, ending: ReleaseRequest, durability: Durability = PRIMARY
    ) -> Released:
        if acquisition in self.scene.refused:
            self._call()
            raise StoreRefused("WRONGTYPE")
        released = super().release(name, acquisition, ending, durability)
        self.scene.ends.append((acquisition, ending))
        return released


class PatientScene(WatchdogScene):
    """A watchdog as the runtime makes it: one hasty store, and more patient ones."""

    def __init__(self) -> None:
        super().__init__()
        self.answers_in = 0.01
        self.made: list[Call] = []
        self.slots: list[LeaseRecord] = []
        self.refused: set[str] = set()
        self.ends: list[tuple[str, ReleaseRequest]] = []
        self.watchdog = Watchdog(
            WaitingStore(self, WATCHDOG_TIMEOUT),
            self.clock,
            WATCHDOG_TIMEOUT,
            self._lost,
            patient={patience: WaitingStore(self, patience) for patience in PATIENT_TIMEOUTS},
        )
        self.watchdog._loop.running.take()  # so no thread starts
        self.watchdog.watch(self.source)

    def holds(self, *ttls: float) -> list[LeaseRecord]:
        made = [self.hold(f"{len(self.slots) + index}", ttl=ttl) for index, ttl in enumerate(ttls)]
        self.slots += made
        return made

    def leave(self, text: str, *, ttl: float = 30.0) -> LeaseRecord:
        """A release that did not get through."""
        slot = self.hold(text, ttl=ttl)
        slot.delegate_release(ReleaseRequest(final=True, requester=text).text)
        return slot

    def kept_at(self, name: LockName) -> Kept | None:
        return self.store.kept(name)


@pytest.fixture
def scene() -> PatientScene:
    return PatientScene()


# Patience


def test_while_nothing_ends_soon_the_watchdog_is_patient(scene: PatientScene) -> None:
    """A store that answers in 2.9 s, every time, costs no lease of 30 s."""
    (slot,) = scene.holds(30.0)
    scene.answers_in = 2.9
    for _ in range(10):
        scene.run(10)
        assert slot.deadline > scene.clock.now + 10
    assert {call.patience for call in scene.made} == {PATIENT}
    assert not scene.lost


def test_near_the_end_it_is_hasty(scene: PatientScene) -> None:
    """The store is away: each try is shorter than the one before, so that there is always another one."""
    scene.holds(30.0)
    scene.answers_in = 1000.0
    while not scene.lost:
        scene.run(TICK)
    patiences = [call.patience for call in scene.made]
    assert patiences == sorted(patiences, reverse=True)
    assert set(patiences) == {WATCHDOG_TIMEOUT, *PATIENT_TIMEOUTS}
    # Before the first failure three tries must fit, then two ...
    tries = [3, *[2] * (len(scene.made) - 1)]
    for call, fit in zip(scene.made, tries, strict=True):
        assert call.patience == WATCHDOG_TIMEOUT or call.left >= fit * call.patience
    # ... and it is never hasty without need: with the next longer patience they would not fit.
    longer = dict(zip((WATCHDOG_TIMEOUT, *PATIENT_TIMEOUTS), PATIENT_TIMEOUTS, strict=False))
    for call, fit in zip(scene.made, tries, strict=True):
        assert call.patience == PATIENT or call.left < fit * longer[call.patience] + TICK + 1e-6


@pytest.mark.invariant("slow-answers-lose-no-lease")
def test_one_stalled_answer_of_a_slow_store_costs_no_lease_of_8_s(scene: PatientScene) -> None:
    """Expected: the next try waits for as long as the stalled one, because the store always takes a second."""
    (slot,) = scene.holds(8.0)
    scene.answers_in = 1000.0
    while not scene.made:
        scene.run(TICK)
    scene.answers_in = 1.0
    scene.run(20)
    assert [call.patience for call in scene.made[:2]] == [1.5, 1.5]
    assert slot.deadline > scene.clock.now
    assert not scene.lost


@pytest.mark.parametrize("ttl", [1.0, 1.2])
def test_a_short_lease_is_never_waited_for_patiently(scene: PatientScene, ttl: float) -> None:
    (slot,) = scene.holds(ttl)
    scene.run(20)
    assert slot.deadline > scene.clock.now
    assert {call.patience for call in scene.made} == {WATCHDOG_TIMEOUT}


def test_one_short_lease_makes_the_watchdog_hasty_for_all(scene: PatientScene) -> None:
    """All are renewed by one thread, so what a long lease can wait for a short one cannot."""
    scene.holds(30.0, 1.0)
    scene.run(15)
    assert {call.patience for call in scene.made} == {WATCHDOG_TIMEOUT}


def test_a_lease_that_is_lost_already_makes_nobody_hasty(scene: PatientScene) -> None:
    _, short = scene.holds(30.0, 1.0)
    short.lose()
    scene.run(15)
    assert {call.patience for call in scene.made if call.left > 3 * PATIENT + TICK} == {PATIENT}


def told_late(scene: PatientScene, ends: dict[str, float]) -> list[str]:
    return [f"{who}: {told - ends[who]:.2f} s after its end" for who, _, told in scene.lost if told > ends[who]]


@given(
    ttls=st.lists(st.sampled_from([1.0, 1.5, 2.0, 4.0, 7.0, 10.0, 30.0, 120.0]), min_size=1, max_size=4),
    answered_until=st.floats(0.0, 15.0),
    left=st.booleans(),
)
@example(ttls=[1.0, 4.0], answered_until=6.875, left=False)
@example(ttls=[1.0], answered_until=0.0, left=True)
def test_a_lease_is_told_lost_before_its_end_whatever_the_mix(
    *, ttls: list[float], answered_until: float, left: bool
) -> None:
    """The store stops answering at some moment. Every holder learns of the loss while it still holds.

    With `left`, releases wait for the store too: they must not take the time that the living need.
    """
    scene = PatientScene()
    slots = scene.holds(*ttls)
    scene.run(answered_until)
    assert not scene.lost
    ends = {slot.acquisition: slot.deadline for slot in slots}
    scene.answers_in = 1000.0
    if left:
        scene.slots.append(scene.leave("left"))
    while len(scene.lost) < len(slots) and scene.clock.now < max(ends.values()) + 5:
        scene.run(TICK)
    assert len(scene.lost) == len(slots)
    assert not told_late(scene, ends)


# Refusals


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_refused_release_ends_nobody_elses_turn(scene: PatientScene, position: int) -> None:
    """Another program overwrote one key. All other locks are freed in the same tick."""
    left = [scene.leave(text) for text in "abc"]
    bad = left.pop(position)
    scene.refused.add(bad.acquisition)
    scene.watchdog.tick()
    assert [slot.state for slot in left] == [LeaseState.FREE] * 2
    assert bad.state is LeaseState.RELEASE_DELEGATED
    assert [acquisition for acquisition, _ in scene.ends] == [slot.acquisition for slot in left]


def test_a_refused_release_costs_no_renewal(scene: PatientScene) -> None:
    bad = scene.leave("bad", ttl=3600.0)
    scene.refused.add(bad.acquisition)
    (slot,) = scene.holds(1.0)
    scene.run(10)
    assert slot.deadline > scene.clock.now
    assert not scene.lost


def test_a_refused_release_is_logged_once_and_given_up_after_its_ttl(
    scene: PatientScene, caplog: pytest.LogCaptureFixture
) -> None:
    """After its ttl the lock cannot be there any more."""
    bad = scene.leave("bad", ttl=30.0)
    scene.refused.add(bad.acquisition)
    scene.run(29)
    assert bad.state is LeaseState.RELEASE_DELEGATED
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"cannot release {bad.name} yet, retrying: " in caplog.text
    assert "WRONGTYPE" in caplog.text
    scene.run(2)
    assert bad.state is LeaseState.FREE
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    made = len(scene.made)
    scene.run(5)
    assert len(scene.made) == made
    assert len(caplog.records) == 2
    assert not scene.watchdog._release_failed


def test_a_release_that_is_refused_no_more_is_carried_out_with_its_ending(scene: PatientScene) -> None:
    bad = scene.leave("bad")
    scene.refused.add(bad.acquisition)
    scene.run(5)
    scene.refused.clear()
    scene.run(TICK)
    assert scene.ends == [("owner.bad", ReleaseRequest(final=True, requester="bad"))]
    assert bad.state is LeaseState.FREE
    assert scene.kept_at(a_name("bad")) is None


def test_an_unanswered_release_stops_the_round(scene: PatientScene) -> None:
    """The store is away: the others would wait for its timeout one by one."""
    left = [scene.leave(text) for text in "abc"]
    scene.answers_in = 1000.0
    scene.watchdog.tick()
    assert len(scene.made) == 1
    assert [slot.state for slot in left] == [LeaseState.RELEASE_DELEGATED] * 3


def test_an_unanswered_renewal_stops_the_round_too(scene: PatientScene) -> None:
    """No lease can wait for a second timeout."""
    scene.holds(4.0)
    scene.clock.now += 2
    scene.leave("left")
    scene.answers_in = 1000.0
    scene.watchdog.tick()
    assert len(scene.made) == 1


def test_an_unanswered_release_is_never_given_up(scene: PatientScene, caplog: pytest.LogCaptureFixture) -> None:
    """Its marks outlive the lock: once_per holds also where the store was away for longer than the ttl."""
    slot = scene.leave("x", ttl=5.0)
    scene.answers_in = 1000.0
    scene.run(60)
    assert slot.state is LeaseState.RELEASE_DELEGATED
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    scene.answers_in = 0.01
    scene.run(TICK)
    assert scene.ends == [("owner.x", ReleaseRequest(final=True, requester="x"))]


def test_a_refused_renewal_is_no_answer_of_the_others(scene: PatientScene) -> None:
    """A renewal that is refused as a whole is tried again at the next tick, until the end comes near."""
    (slot,) = scene.holds(4.0)
    hasty = scene.watchdog._stores[WATCHDOG_TIMEOUT]
    renew, refusals = hasty.renew, 3

    def refusing(renewals: list[Renewal], within: float | None = None) -> list[bool]:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise StoreRefused("NOPERM")
        return renew(renewals, within)

    for store in scene.watchdog._stores.values():
        store.renew = refusing  # type: ignore[method-assign,assignment]  # all of them are one server
    scene.run(3)
    assert refusals == 0
    assert slot.deadline > scene.clock.now + 2
    assert not scene.lost
