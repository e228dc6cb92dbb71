"""The crash record that a worker writes, and when. It uses fakes; tests/contract tests on a server what is freed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlock.counters.meter import Counts
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.lease_table import LeaseRecord, LocalLeaseTable
from celery_dlock.runtime import NO_WORKER
from celery_dlock.store.model import Grant, Released
from celery_dlock.store.redis.keys import node_key
from celery_dlock.worker.crash_record import HeldLease, HostIdentity, ProcessIdentity, WorkerRecord
from celery_dlock.worker.crash_recovery import ROUND, CrashRecovery
from tests.unit.fakes import FakeClock

ME = WorkerRecord.of_this_process() or pytest.fail("this system does not tell processes apart")
NODE = "celery@host"


class FakeNotes:
    """The part of a store that keeps notes. ``away``: every call fails so."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []
        self.others: dict[str, str] = {}
        self.away: Exception | None = None

    def close(self) -> None:
        pass

    def worker_records(self, node: str) -> dict[str, str]:
        assert node == NODE
        return dict(self.others)

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        if self.away is not None:
            raise self.away
        assert (node, worker) == (NODE, ME.worker_id)
        self.written.append((text, life_ms))


class Harness:
    """One worker's notes. No thread: the test looks."""

    def __init__(self) -> None:
        self.clock, self.store, self.lease_table = FakeClock(), FakeNotes(), LocalLeaseTable()
        self.watchdog = SimpleNamespace(held=())
        settings = SimpleNamespace(prefix="dlock", timeout=3.0)
        self.runtime: Any = SimpleNamespace(
            counts=Counts(),
            clock=self.clock,
            watchdog=self.watchdog,
            settings=settings,
            worker=NO_WORKER,
            open_store=lambda timeout: self.store,
        )
        self.notes = CrashRecovery(self.runtime, NODE, lambda: True, ME)

    def hold(self, text: str, ttl: float = 30.0) -> LeaseRecord:
        record = self.lease_table.open(shared_name(text), f"owner.{text}", ttl)
        record.held(self.clock.now + ttl)
        return record

    def looks(self, times: int) -> int:
        """Look so often; how many times that wrote."""
        before = len(self.store.written)
        for _ in range(times):
            self.clock.now += ROUND
            self.watchdog.held = self.lease_table.records()
            self.notes.save_record()
        return len(self.store.written) - before

    @property
    def noted(self) -> WorkerRecord:
        note = WorkerRecord.from_text(self.store.written[-1][0])
        assert note is not None
        return note


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_who_holds_nothing_notes_nothing(harness: Harness) -> None:
    assert harness.looks(100) == 0


def test_what_is_held_at_one_look_only_costs_nothing(harness: Harness) -> None:
    for number in range(20):
        record = harness.hold(f"brief {number}")
        assert harness.looks(1) == 0
        record.clear()


def test_what_is_held_at_two_looks_is_noted_once(harness: Harness) -> None:
    record = harness.hold("x")
    assert [harness.looks(1) for _ in range(5)] == [0, 1, 0, 0, 0]
    assert harness.noted == ME._replace(leases=(HeldLease(record.name, "owner.x", 30.0, ME.main),))


def test_a_note_grows_with_what_is_held_and_is_not_written_for_what_ends(harness: Harness) -> None:
    first, second = harness.hold("x"), harness.hold("y")
    assert harness.looks(2) == 1
    first.clear()
    assert harness.looks(5) == 0
    harness.hold("z")
    assert harness.looks(5) == 1
    assert {kept.acquisition for kept in harness.noted.leases} == {"owner.y", "owner.z"}
    assert second.ttl == 30.0


def test_a_note_is_taken_away_when_nothing_is_held_any_more(harness: Harness) -> None:
    record = harness.hold("x")
    harness.looks(2)
    record.clear()
    assert harness.looks(5) == 1
    assert harness.store.written[-1] == ("", 0)


def test_a_note_lives_twice_the_longest_ttl_and_is_written_again_after_half_of_that(harness: Harness) -> None:
    record = harness.hold("x", ttl=30.0)
    harness.hold("y", ttl=5.0)
    harness.looks(2)
    assert harness.store.written[-1][1] == pytest.approx(60_000, abs=100)
    record.renewed(harness.clock.now + 30.0)
    assert harness.looks(round(29.0 / ROUND)) == 0
    assert harness.looks(round(2.0 / ROUND)) == 1


def test_a_lease_that_was_extended_is_noted_for_as_long(harness: Harness) -> None:
    record = harness.hold("x", ttl=5.0)
    record.renewed(harness.clock.now + 300.0)
    harness.looks(2)
    assert harness.store.written[-1][1] == pytest.approx(600_000, abs=1000)


def test_a_note_that_failed_is_tried_again_at_the_next_look(harness: Harness) -> None:
    harness.hold("x")
    harness.looks(1)
    harness.store.away = OSError("away")
    with pytest.raises(OSError, match="away"):
        harness.looks(1)
    harness.store.away = None
    assert harness.looks(1) == 1


def test_a_thousand_new_locks_at_each_look_are_noted_every_two_seconds(harness: Harness) -> None:
    for number in range(1000):
        harness.hold(f"{number}")
    wrote = harness.looks(2)
    for number in range(50):
        harness.hold(f"more {number}")
        wrote += harness.looks(1)
    assert wrote == 1 + 50 * ROUND // 2.0


def test_those_who_live_are_looked_for_as_long_as_the_longest_ttl_that_they_noted(harness: Harness) -> None:
    living = ME._replace(
        main=ProcessIdentity(ME.main.pid, ME.main.started), leases=(_kept("x", 20.0), _kept("y", 10.0))
    )
    harness.store.others = {"another of this process": living.text}
    harness.notes.release_dead_leases()
    for _ in range(2):
        harness.clock.now += 9.9
        harness.notes.release_dead_leases()
        assert harness.notes._predecessors
    harness.clock.now += 0.3
    harness.notes.release_dead_leases()
    assert not harness.notes._predecessors


def _kept(text: str, ttl: float) -> HeldLease:
    return HeldLease(shared_name(text), f"owner.{text}", ttl, ME.main)


# The note as text


def test_a_note_survives_as_text() -> None:
    note = WorkerRecord(
        HostIdentity("m", "b", "pid:[1]", "time:[2]"), ProcessIdentity(7, 8), (_kept("x", 1.5), _kept("y", 30.0))
    )
    assert WorkerRecord.from_text(note.text) == note


def test_two_workers_of_one_node_have_notes_of_their_own() -> None:
    host = HostIdentity("m", "b", "pid:[1]", "time:[2]")
    notes = [
        WorkerRecord(host, ProcessIdentity(7, 8)),
        WorkerRecord(host, ProcessIdentity(7, 9)),
        WorkerRecord(host, ProcessIdentity(8, 8)),
        WorkerRecord(host._replace(boot="c"), ProcessIdentity(7, 8)),
        WorkerRecord(host._replace(pids="pid:[3]"), ProcessIdentity(7, 8)),
    ]
    assert len({note.worker_id for note in notes}) == 5


def test_a_node_has_one_key_of_printable_text_in_a_bucket() -> None:
    key = node_key("dlock", "wörker {1}@host")
    assert key == node_key("dlock", "wörker {1}@host") != node_key("dlock", "wörker {2}@host")
    assert key.startswith("dlock:{")
    assert key.isascii()
    assert key.count("{") == 1
    assert " " not in key


class HandingOff:
    """The worker of the app, which can publish the messages of that app only."""

    def __init__(self) -> None:
        self.published: list[Grant | None] = []

    def hand_off(self, name: LockName, grant: Grant | None) -> None:
        self.published.append(grant)


@pytest.mark.parametrize("of_another_app", [False, True])
def test_waiter_of_another_app_is_left_to_the_workers_of_that_app(*, of_another_app: bool) -> None:
    harness, grant, worker = Harness(), Grant("identity", "message", "1"), HandingOff()
    dead = ME._replace(main=ProcessIdentity(ME.main.pid, ME.main.started - 1))
    lease = _kept("x", 30.0)._replace(holder=dead.main)
    harness.store.others = {dead.worker_id: dead._replace(leases=(lease,)).text}
    harness.runtime.worker = worker
    store: Any = harness.store
    store.release = lambda *_: Released(ours=True, duplicate_seen=False, granted=grant)
    store.save_worker_record = lambda *_: None
    other = (store, harness.runtime.watchdog) if of_another_app else None
    CrashRecovery(harness.runtime, NODE, lambda: True, ME, other).release_dead_leases()
    assert worker.published == ([] if of_another_app else [grant])
