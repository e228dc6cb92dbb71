"""The choice of the worker that looks for queues that are due, and its interval."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_dlock.counters.meter import Counts
from celery_dlock.errors import ReplyTimeout, StoreRefused, StoreUnavailable
from celery_dlock.keys.key_spec import LockName
from celery_dlock.messaging.receive_order import ReceiveOrder
from celery_dlock.store.base import QueueStepResult
from celery_dlock.store.model import Grant
from celery_dlock.worker.queue_sweeper import (
    BROKER_FAILURE_PAUSE,
    CLUSTER_SWEEP_INTERVAL,
    LEASE_MARGIN,
    MAX_TAKEOVER_DELAY,
    PRESENCE_INTERVAL,
    ROUND,
    SWEEP_INTERVAL,
    QueueSweeper,
)
from tests.unit.fakes import FakeClock

NAME = LockName("n:x", 7)


class Leases:
    """A store with leases of sweepers, which counts the scripts that it is asked to run."""

    clustered = False

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.leases: dict[tuple[str, str], tuple[str, float]] = {}
        self.found: list[LockName] = []
        self.swept = QueueStepResult()
        self.lease_error: StoreUnavailable | None = None
        self.due_error: StoreUnavailable | None = None
        self.looks: list[float] = []
        self.noted: list[tuple[float, str]] = []
        self.scripts: Counter[str] = Counter()

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        self.scripts["sweep_lease"] += 1
        if self.lease_error is not None:
            raise self.lease_error
        holder, until = self.leases.get((broker, duty), ("", 0.0))
        if holder != worker and until > self.clock.now:
            return max(1, round((until - self.clock.now) * 1000))
        self.leases[broker, duty] = worker, self.clock.now + life_ms / 1000
        return 0

    def dead_letters_at(self, name: LockName) -> str:
        return f"dead:{name}"

    def announce_workers(self, broker: str, life_ms: int) -> None:
        self.scripts["announce_workers"] += 1
        self.noted.append((self.clock.now, broker))

    def list_due_queues(self, *_asked: object) -> list[LockName]:
        self.scripts["list_due_queues"] += 1
        self.looks.append(self.clock.now)
        if self.due_error is not None:
            raise self.due_error
        return self.found

    def sweep(self, *_asked: object) -> QueueStepResult:
        self.scripts["sweep"] += 1
        return self.swept


class Harness:
    """Workers of one store; each round of their sweepers' threads is made by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = Leases(self.clock)
        self.receive_order = ReceiveOrder()

    def worker(self, broker: str = "memory://") -> QueueSweeper:
        runtime: Any = SimpleNamespace(
            counts=Counts(),
            app=Celery("sweeping", broker=broker, set_as_current=False),
            clock=self.clock,
            settings=SimpleNamespace(timeout=1.0, prefix="dlock", grant_timeout=60.0, grant_attempts=5, broker=None),
            open_store=lambda _timeout: self.store,
            monitored_as=lambda: None,
            receive_order=self.receive_order,
        )
        marker = SimpleNamespace(run_round=lambda: None)
        deliveries: Any = SimpleNamespace(runtime=runtime, newly_revoked=list, completion_marker=marker)
        return QueueSweeper(deliveries, lambda call: call(), lambda: True)

    def pass_time(self, workers: list[QueueSweeper], seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            for worker in workers:
                worker._sweep_due()
            self.clock.now += ROUND


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.mark.invariant("one-sweeper-per-broker")
def test_ten_idle_workers_send_at_most_30_scripts_a_second_in_all(harness: Harness) -> None:
    harness.pass_time([harness.worker() for _ in range(10)], seconds=20)
    assert harness.store.scripts.total() <= 20 * 30
    assert set(harness.store.scripts) == {"sweep_lease", "list_due_queues", "announce_workers"}


@pytest.mark.invariant("debounce-runs-the-newest-call")
def test_lock_is_swept_when_its_last_debounced_call_is_due(harness: Harness) -> None:
    """The time counts from the parking of the last call, which a pool child records."""
    worker = harness.worker()

    def sweeps_after(seconds: float) -> int:
        harness.clock.now += seconds
        worker._sweep_debounced()
        return harness.store.scripts["sweep"]

    worker.sweep_after(1, NAME, 5.0)
    assert sweeps_after(60) == 0  # not parked yet
    harness.receive_order.record(1, 10)
    worker.sweep_after(2, NAME, 5.0)
    harness.receive_order.record(2, 20)
    assert (sweeps_after(0), sweeps_after(4.9), sweeps_after(0.2), sweeps_after(60)) == (0, 0, 1, 1)


@pytest.mark.invariant("one-sweeper-per-broker")
@pytest.mark.parametrize("pause", [SWEEP_INTERVAL, CLUSTER_SWEEP_INTERVAL])
def test_sweep_goes_on_within_two_seconds_when_the_sweeping_worker_dies(harness: Harness, pause: float) -> None:
    harness.store.clustered = pause == CLUSTER_SWEEP_INTERVAL
    workers = [harness.worker() for _ in range(5)]
    while workers:
        harness.pass_time(workers, seconds=3)
        died = harness.clock.now
        (holder, _), *_ = harness.store.leases.values()
        workers = [worker for worker in workers if worker._worker != holder]
        harness.pass_time(workers, seconds=3)
        looks = [look for look in harness.store.looks if look >= died]
        allowed = pause + LEASE_MARGIN + MAX_TAKEOVER_DELAY + 2 * ROUND
        assert not workers or looks[0] - harness.store.looks[-len(looks) - 1] <= allowed < 2


@pytest.mark.invariant("sweep-failures-stay-local")
@pytest.mark.parametrize(
    ("error", "clustered"),
    [(StoreRefused("no memory"), False), (StoreRefused("no right"), True), (ReplyTimeout("its node is down"), True)],
)
def test_workers_sweep_without_the_sweep_lease_when_it_cannot_be_taken(
    harness: Harness, error: StoreUnavailable, clustered: bool
) -> None:
    """It saves work only; in a Cluster it is on one node of several."""
    harness.store.lease_error, harness.store.clustered = error, clustered
    harness.worker()._sweep_due()
    assert harness.store.looks


def test_store_that_does_not_answer_is_asked_once_in_a_round(harness: Harness) -> None:
    harness.store.lease_error = ReplyTimeout("away")
    with pytest.raises(ReplyTimeout):
        harness.worker()._sweep_due()
    assert harness.store.scripts == {"announce_workers": 1, "sweep_lease": 1}


def test_worker_looks_again_at_once_when_something_was_due(harness: Harness) -> None:
    worker = harness.worker()
    harness.store.found = [NAME]
    harness.pass_time([worker], seconds=1)
    assert harness.store.scripts["sweep"] == harness.store.scripts["list_due_queues"] == pytest.approx(1 / ROUND, abs=1)


@pytest.mark.invariant("one-sweeper-per-broker")
def test_worker_leaves_the_sweep_to_others_when_its_broker_takes_no_message(harness: Harness) -> None:
    first, second = harness.worker(), harness.worker()
    first._publisher.publish_next = lambda *_given: False  # type: ignore[method-assign]
    harness.store.found = [NAME]
    first._sweep_due()
    harness.store.found = []
    harness.pass_time([first, second], seconds=BROKER_FAILURE_PAUSE + 1)
    ((holder, _),) = harness.store.leases.values()
    assert holder == second._worker


def test_message_that_no_worker_of_its_broker_published_is_an_error(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    worker = harness.worker()
    harness.store.found = [NAME]
    harness.store.swept = QueueStepResult(dead_letter="identity", foreign_broker=True)
    worker._sweep_due()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "among the dead letters of dead:n:x" in record.getMessage()
    assert "set dlock_broker" in record.getMessage()


def test_waiter_that_the_store_refuses_to_take_out_is_kept_and_stops_no_other(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end is stored, and it would run once its lock's key is repaired."""
    worker, out = harness.worker(), []

    def remove_waiter(_name: LockName, identity: str, _reason: str) -> None:
        if identity == "refused":
            raise StoreRefused("a key was overwritten")
        out.append(identity)

    worker._publisher.remove_waiter = remove_waiter  # type: ignore[method-assign]
    for identity in ("refused", "a", "b"):
        worker.discard_waiter(NAME, identity)
    for _ in range(3):
        worker._do_left_work()
    assert out == ["a", "b"]
    assert [waiter[1] for waiter in worker._waiters_to_remove] == ["refused"]
    assert caplog.messages[0] == f"{NAME}: a waiter that has ended is still queued, retrying: a key was overwritten"


def test_waiters_to_be_taken_out_are_kept_until_the_store_answers(harness: Harness) -> None:
    """Otherwise, a waiter whose result is stored is granted the lock later, and runs."""
    worker, asked = harness.worker(), []
    worker._deliveries.newly_revoked = lambda: [(NAME, "revoked")] if not asked else []  # type: ignore[method-assign]
    worker.discard_waiter(NAME, "gone")
    errors = [StoreUnavailable("away"), KeyError("broken"), None, None]

    def take_out(_name: LockName, identity: str, reason: str) -> None:
        asked.append((identity, reason))
        if (error := errors.pop(0)) is not None:
            raise error

    worker._publisher.remove_waiter = take_out  # type: ignore[method-assign]
    worker._do_left_work()
    assert asked == [("gone", "")]
    with pytest.raises(KeyError):
        worker._do_left_work()
    worker._do_left_work()
    assert asked[1:] == [("revoked", "revoked while it waited"), ("gone", "")]
    assert not worker._waiters_to_remove


@pytest.mark.invariant("foreign-messages-block-no-name")
def test_worker_notes_that_it_runs_also_between_slow_publications(harness: Harness) -> None:
    """Else workers of another broker make its messages dead letters while its own broker does not answer."""
    worker = harness.worker()
    harness.pass_time([worker], seconds=2 * PRESENCE_INTERVAL + 1)
    assert len(harness.store.noted) == 3
    assert {broker for _, broker in harness.store.noted} == {worker._publisher.broker}

    def carry(*_given: object) -> bool:
        harness.clock.now += PRESENCE_INTERVAL + 10
        return False

    worker._publisher.publish_next = carry  # type: ignore[method-assign]
    harness.store.found = 3 * [NAME]
    harness.store.noted.clear()
    worker._next_sweep = worker._next_presence = 0.0
    worker._sweep_due()
    worker.hand_off(NAME, Grant("a", "entry"))
    worker._do_left_work()
    assert len(harness.store.noted) == 1 + 3 + 1


def test_workers_of_another_broker_sweep_for_themselves(harness: Harness) -> None:
    """A worker publishes to its own broker only."""
    workers = [harness.worker(), harness.worker("memory://elsewhere")]
    for worker in workers:
        worker._sweep_due()
    assert harness.store.scripts["list_due_queues"] == 2


def test_one_of_the_workers_without_queues_looks_for_waiters(harness: Harness) -> None:
    workers = [harness.worker() for _ in range(10)]
    for worker in workers:
        worker._sweeps = False
        worker._check_for_waiters()
    assert harness.store.scripts == {"sweep_lease": 10, "list_due_queues": 1}
    harness.store.found = [NAME]
    harness.clock.now += 31
    for worker in workers:
        worker._check_for_waiters()
    assert [worker._sweeps for worker in workers] == [True] + 9 * [False]


def test_store_that_refuses_every_command_is_logged_once(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The lease of the sweep only saves work, so its refusal alone does not stop a sweep and is not logged."""
    worker = harness.worker()
    worker.start_sweeping()
    for error in (StoreRefused("NOPERM"), None, StoreRefused("NOPERM")):
        harness.store.lease_error = harness.store.due_error = error
        for _ in range(20):
            worker._run_round()
            harness.clock.now += SWEEP_INTERVAL
    told = [record.getMessage() for record in caplog.records]
    assert told == ["queues are not swept, retrying every 0.1 s: NOPERM"] * 2


def test_lost_grant_and_dead_letter_are_counted_once_each(harness: Harness) -> None:
    worker = harness.worker()
    counts = worker._runtime.counts
    counts.start([])
    harness.store.swept = QueueStepResult(lost_grant=True, dead_letter="x")
    worker._sweep(NAME)
    assert counts.meter is not None
    samples = {found.name: sum(one.value for one in samples) for found, samples in counts.meter.read()}
    assert (samples["lost_grants"], samples["dead_letters"]) == (1, 1)
