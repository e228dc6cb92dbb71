"""The watchdog's wait for answers, and the cost of a refusal. Round by round, on a clock of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_dlock.errors import ReplyLost, StoreRefused
from celery_dlock.keys.key_spec import LockName
from celery_dlock.locking.lease_table import LeaseRecord, LeaseState
from celery_dlock.locking.watchdog import ROUND, Watchdog
from celery_dlock.runtime import PATIENT_TIMEOUTS, WATCHDOG_TIMEOUT
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Released, Renewal
from tests.unit.fakes import FakeStore, Kept, WatchdogHarness, a_name

PATIENT = max(PATIENT_TIMEOUTS)


@dataclass(frozen=True)
class Call:
    """One call of the watchdog: with which patience, and how long the shortest lease had to live then."""

    patience: float
    left: float


class WaitingStore(FakeStore):
    """One server as it is seen with one patience: what takes longer is unanswered after that time."""

    def __init__(self, harness: PatientHarness, patience: float) -> None:
        super().__init__(harness.clock)
        self.harness = harness
        self.patience = patience
        self.locks = harness.store.locks

    def _call(self, within: float | None = None) -> None:
        harness = self.harness
        patience = self.patience if within is None else min(within, self.patience)
        leases = [record.deadline for record in harness.records if record.state is LeaseState.HELD and not record.lost]
        harness.made.append(Call(patience, min(leases) - harness.clock.now if leases else 0.0))
        harness.clock.now += min(patience, harness.answers_in)
        if harness.answers_in > patience:
            raise ReplyLost("no answer")

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        if acquisition in self.harness.refused:
            self._call()
            raise StoreRefused("WRONGTYPE")
        released = super().release(name, acquisition, ending)
        self.harness.ends.append((acquisition, ending))
        return released


class PatientHarness(WatchdogHarness):
    """A watchdog as the runtime makes it: one hasty store, and more patient ones."""

    def __init__(self) -> None:
        super().__init__()
        self.answers_in = 0.01
        self.made: list[Call] = []
        self.records: list[LeaseRecord] = []
        self.refused: set[str] = set()
        self.ends: list[tuple[str, ReleaseRequest]] = []
        self.watchdog = Watchdog(
            {patience: WaitingStore(self, patience) for patience in (WATCHDOG_TIMEOUT, *PATIENT_TIMEOUTS)},
            self.clock,
            self.hooks,
        )
        self.watchdog._loop.running.acquire(blocking=False)  # so no thread starts
        self.watchdog.watch(self.source)

    def holds(self, *ttls: float) -> list[LeaseRecord]:
        made = [self.hold(f"{len(self.records) + index}", ttl=ttl) for index, ttl in enumerate(ttls)]
        self.records += made
        return made

    def leave(self, text: str, *, ttl: float = 30.0) -> LeaseRecord:
        """A release that did not get through."""
        record = self.hold(text, ttl=ttl)
        record.delegate_release(ReleaseRequest(final=True, requester=text).text)
        return record

    def kept_at(self, name: LockName) -> Kept | None:
        return self.store.kept(name)


@pytest.fixture
def harness() -> PatientHarness:
    return PatientHarness()


# Patience


def test_while_nothing_ends_soon_the_watchdog_is_patient(harness: PatientHarness) -> None:
    """A store that answers in 2.9 s, every time, costs no lease of 30 s."""
    (record,) = harness.holds(30.0)
    harness.answers_in = 2.9
    for _ in range(10):
        harness.run(10)
        assert record.deadline > harness.clock.now + 10
    assert {call.patience for call in harness.made} == {PATIENT}
    assert not harness.lost


def test_near_the_end_it_is_hasty(harness: PatientHarness) -> None:
    """The store is away: each try is shorter than the one before, so that there is always another one."""
    harness.holds(30.0)
    harness.answers_in = 1000.0
    while not harness.lost:
        harness.run(ROUND)
    patiences = [call.patience for call in harness.made]
    assert patiences == sorted(patiences, reverse=True)
    assert set(patiences) == {WATCHDOG_TIMEOUT, *PATIENT_TIMEOUTS}
    # Before the first failure three tries must fit, then two ...
    tries = [3, *[2] * (len(harness.made) - 1)]
    for call, fit in zip(harness.made, tries, strict=True):
        assert call.patience == WATCHDOG_TIMEOUT or call.left >= fit * call.patience
    # ... and it is never hasty without need: with the next longer patience they would not fit.
    longer = dict(zip((WATCHDOG_TIMEOUT, *PATIENT_TIMEOUTS), PATIENT_TIMEOUTS, strict=False))
    for call, fit in zip(harness.made, tries, strict=True):
        assert call.patience == PATIENT or call.left < fit * longer[call.patience] + ROUND + 1e-6


@pytest.mark.invariant("slow-answers-lose-no-lease")
def test_one_stalled_answer_of_a_slow_store_costs_no_lease_of_8_s(harness: PatientHarness) -> None:
    """Expected: the next try waits for as long as the stalled one, because the store always takes a second."""
    (record,) = harness.holds(8.0)
    harness.answers_in = 1000.0
    while not harness.made:
        harness.run(ROUND)
    harness.answers_in = 1.0
    harness.run(20)
    assert [call.patience for call in harness.made[:2]] == [1.5, 1.5]
    assert record.deadline > harness.clock.now
    assert not harness.lost


@pytest.mark.parametrize("ttl", [1.0, 1.2])
def test_a_short_lease_is_never_waited_for_patiently(harness: PatientHarness, ttl: float) -> None:
    (record,) = harness.holds(ttl)
    harness.run(20)
    assert record.deadline > harness.clock.now
    assert {call.patience for call in harness.made} == {WATCHDOG_TIMEOUT}


def test_one_short_lease_makes_the_watchdog_hasty_for_all(harness: PatientHarness) -> None:
    """All are renewed by one thread, so what a long lease can wait for a short one cannot."""
    harness.holds(30.0, 1.0)
    harness.run(15)
    assert {call.patience for call in harness.made} == {WATCHDOG_TIMEOUT}


def test_a_lease_that_is_lost_already_makes_nobody_hasty(harness: PatientHarness) -> None:
    _, short = harness.holds(30.0, 1.0)
    short.lose()
    harness.run(15)
    assert {call.patience for call in harness.made if call.left > 3 * PATIENT + ROUND} == {PATIENT}


def told_late(harness: PatientHarness, ends: dict[str, float]) -> list[str]:
    return [f"{who}: {told - ends[who]:.2f} s after its end" for who, _, told in harness.lost if told > ends[who]]


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
    harness = PatientHarness()
    records = harness.holds(*ttls)
    harness.run(answered_until)
    assert not harness.lost
    ends = {record.acquisition: record.deadline for record in records}
    harness.answers_in = 1000.0
    if left:
        harness.records.append(harness.leave("left"))
    while len(harness.lost) < len(records) and harness.clock.now < max(ends.values()) + 5:
        harness.run(ROUND)
    assert len(harness.lost) == len(records)
    assert not told_late(harness, ends)


# Refusals


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_refused_release_ends_nobody_elses_turn(harness: PatientHarness, position: int) -> None:
    """Another program overwrote one key. All other locks are freed in the same round."""
    left = [harness.leave(text) for text in "abc"]
    bad = left.pop(position)
    harness.refused.add(bad.acquisition)
    harness.watchdog.run_round()
    assert [record.state for record in left] == [LeaseState.FREE] * 2
    assert bad.state is LeaseState.RELEASE_DELEGATED
    assert [acquisition for acquisition, _ in harness.ends] == [record.acquisition for record in left]


def test_a_refused_release_costs_no_renewal(harness: PatientHarness) -> None:
    bad = harness.leave("bad", ttl=3600.0)
    harness.refused.add(bad.acquisition)
    (record,) = harness.holds(1.0)
    harness.run(10)
    assert record.deadline > harness.clock.now
    assert not harness.lost


def test_a_refused_release_is_logged_once_and_given_up_after_its_ttl(
    harness: PatientHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """After its ttl the lock cannot be there any more."""
    bad = harness.leave("bad", ttl=30.0)
    harness.refused.add(bad.acquisition)
    harness.run(29)
    assert bad.state is LeaseState.RELEASE_DELEGATED
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"cannot release {bad.name} yet, retrying: " in caplog.text
    assert "WRONGTYPE" in caplog.text
    harness.run(2)
    assert bad.state is LeaseState.FREE
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    made = len(harness.made)
    harness.run(5)
    assert len(harness.made) == made
    assert len(caplog.records) == 2
    assert not harness.watchdog._release_failed


def test_a_release_that_is_refused_no_more_is_carried_out_with_its_ending(harness: PatientHarness) -> None:
    bad = harness.leave("bad")
    harness.refused.add(bad.acquisition)
    harness.run(5)
    harness.refused.clear()
    harness.run(ROUND)
    assert harness.ends == [("owner.bad", ReleaseRequest(final=True, requester="bad"))]
    assert bad.state is LeaseState.FREE
    assert harness.kept_at(a_name("bad")) is None


def test_an_unanswered_release_stops_the_round(harness: PatientHarness) -> None:
    """The store is away: the others would wait for its timeout one by one."""
    left = [harness.leave(text) for text in "abc"]
    harness.answers_in = 1000.0
    harness.watchdog.run_round()
    assert len(harness.made) == 1
    assert [record.state for record in left] == [LeaseState.RELEASE_DELEGATED] * 3


def test_an_unanswered_renewal_stops_the_round_too(harness: PatientHarness) -> None:
    """No lease can wait for a second timeout."""
    harness.holds(4.0)
    harness.clock.now += 2
    harness.leave("left")
    harness.answers_in = 1000.0
    harness.watchdog.run_round()
    assert len(harness.made) == 1


def test_an_unanswered_release_is_never_given_up(harness: PatientHarness, caplog: pytest.LogCaptureFixture) -> None:
    """Its marks outlive the lock: once_per holds also where the store was away for longer than the ttl."""
    lease_record = harness.leave("x", ttl=5.0)
    harness.answers_in = 1000.0
    harness.run(60)
    assert lease_record.state is LeaseState.RELEASE_DELEGATED
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    harness.answers_in = 0.01
    harness.run(ROUND)
    assert harness.ends == [("owner.x", ReleaseRequest(final=True, requester="x"))]


def test_a_refused_renewal_is_no_answer_of_the_others(harness: PatientHarness) -> None:
    """A renewal that is refused as a whole is tried again in the next round, until the end comes near."""
    (record,) = harness.holds(4.0)
    hasty = harness.watchdog._stores[WATCHDOG_TIMEOUT]
    renew, refusals = hasty.renew, 3

    def refusing(renewals: list[Renewal], within: float | None = None) -> list[bool]:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise StoreRefused("NOPERM")
        return renew(renewals, within)

    for store in harness.watchdog._stores.values():
        store.renew = refusing  # type: ignore[method-assign,assignment]  # all of them are one server
    harness.run(3)
    assert refusals == 0
    assert record.deadline > harness.clock.now + 2
    assert not harness.lost
