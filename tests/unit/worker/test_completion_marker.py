"""Ends of which the broker did not hear, and a store that does not take their marks at once."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state

from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import Identity, Released
from celery_dlock.worker import completion_marker
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.request import SingletonRequest


class MarkingStore:
    """Notes what is marked, and how old it was; ``error`` is raised for each mark of which ``refuses`` is true."""

    def __init__(self) -> None:
        self.marked: list[tuple[str, int]] = []
        self.asked = 0
        self.error: Exception | None = None
        self.refuses: Any = lambda identity: True

    def inspect(self, name: LockName) -> None: ...

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        assert owner.startswith("owner of ")
        self.asked += 1
        if self.error is not None and self.refuses(identity):
            raise self.error
        self.marked.append((identity, age_us))

    def close(self) -> None: ...


class Harness:
    def __init__(self) -> None:
        app = Celery("unheard", set_as_current=False)
        app.conf.dlock_url = "redis://nowhere.invalid/0"
        self.runtime = Runtime.of(app)
        self.store = MarkingStore()
        self.runtime.open_store = lambda timeout: self.store  # type: ignore[assignment, method-assign, return-value]
        self.deliveries = DeliveryRegistry.of(app)
        self.deliveries.completion_marker.is_polled = True
        self.app = app

    def request(self, name: str = "id", *, told: bool = False, kind: Any = None) -> Any:
        """A late-acknowledged one whose end is stored, and that Celery was asked to acknowledge."""
        request: Any = object.__new__(kind or Request)
        request._app = self.app
        request._dlock_deliveries = DeliveryRegistry.of(self.app)
        channel = SimpleNamespace(closed=False, connection=object())
        request._message = Message(acknowledged=told, channel=channel)
        request.id = name
        request.acknowledged = True
        request._dlock_accepted_at = request.dlock_delivered = time.monotonic()
        request.dlock_owner = f"owner of {name}"
        return request


class Message(SimpleNamespace):
    def ack(self) -> None: ...


class Request(SingletonRequest):
    task = SimpleNamespace(name="task")
    dlock_lock = shared_name("name")  # type: ignore[assignment]

    @property
    def dlock_identity(self) -> Identity:
        return Identity(self.id)


class WholeRequest(SingletonRequest):
    dlock_lock = shared_name("name")  # type: ignore[assignment]
    dlock_identity = Request.dlock_identity  # type: ignore[assignment]
    task = SimpleNamespace(name="task")  # type: ignore[assignment]


def digests(*names: str) -> list[str]:
    return [Identity(name).digest for name in names]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(completion_marker, "RETRY_DELAY", 0.05)
    return Harness()


@pytest.mark.parametrize("error", [StoreUnavailable("away"), OSError(24, "Too many open files")])
def test_a_mark_that_the_store_did_not_take_is_tried_again_after_a_rest(harness: Harness, error: Exception) -> None:
    """Whatever it raised: Celery's event loop would end with it."""
    harness.store.error = error
    request = harness.request()
    request.dlock_ack_lost = True
    request.dlock_completed()
    harness.deliveries.completion_marker.run_round()
    assert (harness.store.asked, harness.store.marked) == (1, [])
    harness.store.error = None
    time.sleep(completion_marker.RETRY_DELAY)
    harness.deliveries.completion_marker.run_round()
    assert [identity for identity, _ in harness.store.marked] == digests("id")
    assert harness.store.marked[0][1] >= completion_marker.RETRY_DELAY * 1e6


def test_a_store_that_is_away_costs_the_event_loop_one_try_for_each_rest(harness: Harness) -> None:
    """Not a timeout for each end."""
    harness.store.error = StoreUnavailable("away")
    for number in range(20):
        request = harness.request(str(number))
        request.dlock_ack_lost = True
        request.dlock_completed()
    assert harness.store.asked == 1
    harness.store.error = None
    time.sleep(completion_marker.RETRY_DELAY)
    harness.deliveries.completion_marker.run_round()
    assert sorted(identity for identity, _ in harness.store.marked) == sorted(digests(*map(str, range(20))))


def test_a_mark_that_is_refused_does_not_stand_in_the_way_of_others(harness: Harness) -> None:
    harness.store.error, refused = StoreUnavailable("not this one"), Identity("0").digest
    harness.store.refuses = lambda identity: identity == refused
    for number in range(3):
        request = harness.request(str(number))
        request.dlock_ack_lost = True
        request.dlock_completed()
    time.sleep(completion_marker.RETRY_DELAY)
    for _ in range(2):
        harness.deliveries.completion_marker.run_round()
        time.sleep(completion_marker.RETRY_DELAY)
    assert sorted(identity for identity, _ in harness.store.marked) == sorted(digests("1", "2"))


def test_an_acknowledgement_that_fails_between_the_look_and_the_note_is_marked(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pool of threads, the end is reported outside of Celery's event loop."""
    request = harness.request()

    def fails_here(*_: Any) -> bool:
        request.dlock_ack_lost = True
        if request.dlock_end_stored:
            harness.deliveries.completion_marker.mark(request)
        return False

    monkeypatch.setattr("celery_dlock.worker.request.channel_is_gone", fails_here)
    request.dlock_completed()
    harness.deliveries.completion_marker.run_round()
    assert [identity for identity, _ in harness.store.marked] == digests("id")


@pytest.mark.parametrize("held", [True, False])
def test_an_end_by_the_death_of_its_child_is_marked_if_the_watchdog_freed_its_lock(
    harness: Harness, *, held: bool
) -> None:
    """Else it may be parked, or published again, and is to run."""
    request = harness.request()
    request.dlock_ack_lost = True
    request.dlock_process_died()
    harness.deliveries.completion_marker.run_round()
    assert harness.store.asked == 0
    record = SimpleNamespace(acquisition="owner of id.1", name=Request.dlock_lock, ending="")
    harness.deliveries.freed(record, Released(ours=held, duplicate_seen=False))  # type: ignore[arg-type]  # what is asked of it here
    harness.deliveries.completion_marker.run_round()
    assert [identity for identity, _ in harness.store.marked] == (digests("id") if held else [])


@pytest.mark.parametrize("why", ["not acknowledged", "put back", "heard"])
def test_what_comes_back_to_run_or_was_heard_is_not_marked(harness: Harness, why: str) -> None:
    request = harness.request(told=why == "heard")
    request.acknowledged = why != "not acknowledged"
    request.dlock_requeued = why == "put back"
    request.dlock_completed()
    request._message.channel.closed = True
    harness.deliveries.completion_marker.run_round()
    assert harness.store.asked == 0


@pytest.mark.parametrize("died", [False, True])
def test_an_end_is_dated_by_the_start_of_its_body(harness: Harness, *, died: bool) -> None:
    """A message that its sender, or a body that died, sent anew meanwhile is another."""
    request = harness.request()
    request.dlock_ack_lost = True
    request._dlock_accepted_at -= 10.0
    if died:
        request.dlock_process_died()
        record = SimpleNamespace(acquisition="owner of id.1", name=Request.dlock_lock, ending="")
        harness.deliveries.freed(record, Released(ours=True, duplicate_seen=False))  # type: ignore[arg-type]  # what is asked of it here
        harness.deliveries.completion_marker.run_round()
    else:
        request.dlock_completed()
    [(_, age_us)] = harness.store.marked
    assert age_us == pytest.approx(10_000_000, abs=500_000)


@pytest.mark.parametrize(("told", "expected"), [(59, []), (61, ["id"])])
def test_an_end_of_which_the_broker_hears_after_its_visibility_timeout_is_marked(
    harness: Harness, told: float, expected: list[str]
) -> None:
    """It has delivered the message again."""
    object.__setattr__(harness.runtime.settings, "doubtful_after", 60.0)
    request = harness.request()
    request.acknowledged = False
    request._on_ack, request._connection_errors = lambda *_: None, ()  # Celery's callback sends later
    request.acknowledge()
    request.dlock_delivered -= told
    request.dlock_completed()
    request.message.ack()
    assert [identity for identity, _ in harness.store.marked] == digests(*expected)


@pytest.mark.parametrize("why", ["", "a cold shutdown", "cancelled"])
def test_a_death_that_may_have_stored_no_end_is_not_marked(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Celery ends nothing in a cold shutdown. The broker delivers again what it cancels."""
    request = harness.request(kind=WholeRequest)
    request.dlock_ack_lost = True
    request._already_cancelled = why == "cancelled"
    monkeypatch.setattr(state, "should_terminate", 1 if why == "a cold shutdown" else None)
    request._dlock_died()
    record = SimpleNamespace(acquisition="owner of id.1", name=Request.dlock_lock, ending="")
    harness.deliveries.freed(record, Released(ours=True, duplicate_seen=False))  # type: ignore[arg-type]  # what is asked of it here
    harness.deliveries.completion_marker.run_round()
    assert [identity for identity, _ in harness.store.marked] == ([] if why else digests("id"))


def test_while_the_worker_does_not_consume_an_end_is_marked_at_once(harness: Harness) -> None:
    """No acknowledgement arrives between the break of a connection and the next one."""
    harness.deliveries.consumes = lambda: False
    harness.request().dlock_completed()
    assert [identity for identity, _ in harness.store.marked] == digests("id")


def test_when_the_connection_breaks_what_waits_to_be_acknowledged_is_marked(harness: Harness) -> None:
    """Not those whose acknowledgement arrived, nor those whose failure was seen: they are marked already."""
    heard, failed, waiting = (harness.request(name) for name in ("heard", "failed", "waiting"))
    for request in (heard, failed, waiting):
        request.dlock_completed()
    heard.message.acknowledged = failed.dlock_ack_lost = True
    harness.deliveries.completion_marker.connection_broke()
    assert [identity for identity, _ in harness.store.marked] == digests("waiting")
