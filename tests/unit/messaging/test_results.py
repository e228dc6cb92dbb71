"""Calls to the result backend. tests/worker/canvas/test_canvas.py has their effects in canvases."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, Task, states
from celery.app.task import Context
from celery.backends.base import Backend, DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import TaskRevokedError

from celery_dlock.messaging import results
from celery_dlock.messaging.results import END_WITHIN, has_end, store_queued, store_revoked, try_end

pytestmark = pytest.mark.core


class Recording(DisabledBackend):
    calls: list[str]
    addresses: list[str]

    def store_result(self, task_id: str, result: Any, state: str, *_: Any, **given: Any) -> Any:
        self.calls.append(f"{state} {task_id} {result}")
        self.addresses.append(given["request"].reply_to)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        self.calls.append(f"part {request.id} of {request.group}: {state} {result}")


class Unreachable(DisabledBackend):
    def store_result(self, *_: Any, **__: Any) -> Any:
        raise ConnectionError("gone")


def later(task_id: str, **options: Any) -> dict[str, Any]:
    return {"task": "elsewhere", "options": {"task_id": task_id, **options}}


def skip(backend: DisabledBackend, **request: Any) -> TaskRevokedError:
    """Skips `a`, which is a member of a chord `g` as the later member `b` of its chain is."""
    task = type("Skipped", (Task,), {"name": "skipped", "backend": backend})()
    task.bind(Celery(set_as_current=False))
    steps = {"tasks": [later("c"), later("d")]}
    body = {"task": "celery.chain", "subtask_type": "chain", "kwargs": steps, "options": {}}
    chain = [later("b", chord=body, group_id="g")]
    error = TaskRevokedError("why")
    store_revoked(task, Context(id="a", group="g", chord=body, chain=chain, **request), error)
    return error


def test_every_result_is_stored_once_and_before_any_part_is_returned() -> None:
    # A part that completes the chord makes Celery look up what is stored, and wait for what is not.
    backend = Recording(Celery(set_as_current=False))
    backend.calls, backend.addresses = [], []
    skip(backend)
    stored, parts = backend.calls[:4], backend.calls[4:]
    assert sorted(stored) == ["REVOKED a why", "REVOKED b why", "REVOKED c why", "REVOKED d why"]
    assert parts == ["part a of g: REVOKED why", "part b of g: REVOKED why"]


@pytest.mark.parametrize("listed", [True, False])
def test_header_of_a_chord_that_is_never_sent_ends_and_returns_no_part(listed: bool) -> None:
    """Some result backends fail the body of a chord that they do not know."""
    backend = Recording(Celery(set_as_current=False))
    backend.calls, backend.addresses = [], []
    body = later("body")
    header: Any = [later("x", chord=body, group_id="g"), later("y", chord=body, group_id="g")]
    if not listed:
        header = {"task": "celery.group", "subtask_type": "group", "kwargs": {"tasks": header}, "options": {}}
    facts = {"header": header, "body": body}
    chord = {"task": "celery.chord", "subtask_type": "chord", "kwargs": facts, "options": {"task_id": "chord"}}
    store_revoked(task_with(backend), Context(id="a", chain=[chord]), TaskRevokedError("why"))
    assert sorted(backend.calls) == [f"REVOKED {name} why" for name in ("a", "body", "x", "y")]


def test_without_a_result_backend_nothing_is_stored() -> None:
    assert str(skip(DisabledBackend(Celery(set_as_current=False)))) == "why"


def test_an_error_of_the_result_backend_is_raised() -> None:
    with pytest.raises(ConnectionError, match="gone"):
        skip(Unreachable(Celery(set_as_current=False)))


def test_an_eager_task_leaves_the_result_backend_alone() -> None:
    assert str(skip(Unreachable(Celery(set_as_current=False)), is_eager=True)) == "why"


@pytest.mark.parametrize("copied", [True, False])
def test_without_a_result_backend_a_message_waits_without_a_state(copied: bool) -> None:
    app = Celery("stateless", broker="memory://", set_as_current=False)

    @app.task(name="waits", lazy=False)
    def task() -> None: ...

    store_queued(task, Context(id="a"), 1, "held", copied=copied)


def test_ends_of_followers_without_a_reply_address_go_to_that_of_the_skipped_task() -> None:
    """Over `rpc://`, an end without an address is sent nowhere."""
    backend = Recording(Celery(set_as_current=False))
    backend.calls, backend.addresses = [], []
    skip(backend, reply_to="client")
    assert backend.addresses == ["client"] * 4


# Ends that the result backend does not take

TASK: Any = SimpleNamespace(name="app.pay")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The naps on a clock that nothing else moves."""
    naps: list[float] = []
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: sum(naps), sleep=naps.append))
    return naps


def failing(*errors: Exception) -> Callable[[], None]:
    """A function that raises these errors, one in each call, and then succeeds."""
    left = list(errors)

    def store() -> None:
        if left:
            raise left.pop(0)

    return store


@pytest.mark.invariant("ends-are-tried-again")
def test_end_is_stored_as_soon_as_the_result_backend_takes_it(slept: list[float]) -> None:
    assert try_end(TASK, "id1", failing(ConnectionError("gone"), TimeoutError("slow")))
    assert slept == [0.1, 0.2]


@pytest.mark.invariant("ends-are-tried-again")
def test_end_that_is_not_taken_in_time_is_an_error_with_the_task_id(
    slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    assert try_end(TASK, "id1", failing(*[ConnectionError("gone")] * 1000)) is False
    assert END_WITHIN - 1 < sum(slept) <= END_WITHIN
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "Task app.pay[id1] has ended, but its end cannot be stored" in record.getMessage()


@pytest.mark.invariant("ends-are-tried-again")
def test_end_that_is_tried_again_later_is_a_warning(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    assert try_end(TASK, "id1", failing(ConnectionError("gone")), 0, gives_up=False) is None
    assert ([record.levelname for record in caplog.records], slept) == (["WARNING"], [])


def test_end_of_a_malformed_canvas_is_tried_once(slept: list[float], caplog: pytest.LogCaptureFixture) -> None:
    assert try_end(TASK, "id1", failing(KeyError("tasks")), gives_up=False) is False
    assert ([record.levelname for record in caplog.records], slept) == (["ERROR"], [])


def test_soft_limit_while_an_end_is_stored_is_raised() -> None:
    with pytest.raises(SoftTimeLimitExceeded):
        try_end(TASK, "id1", failing(SoftTimeLimitExceeded()))


# QUEUED


class Stated(Backend):
    """A backend that keeps one state and cannot compare."""

    stored: str = states.PENDING

    def get_state(self, task_id: str) -> str:
        return self.stored

    def store_result(self, task_id: str, result: Any, state: str, *_: Any, **__: Any) -> Any:
        self.stored = state


@pytest.mark.invariant("queued-state-hides-no-end")
@pytest.mark.parametrize("state", sorted(states.ALL_STATES))
def test_queued_state_of_a_copy_does_not_replace_an_end(state: str) -> None:
    backend = Stated(Celery(set_as_current=False))
    backend.stored = state
    store_queued(task_with(backend), Context(id="a"), 1, "held", copied=True)
    assert backend.stored == (state if state in states.READY_STATES else "QUEUED")


@pytest.mark.invariant("queued-state-hides-no-end")
@pytest.mark.parametrize("state", [None, *sorted(states.ALL_STATES)])
@pytest.mark.parametrize("copied", [True, False])
def test_queued_state_over_redis_does_not_replace_an_end(redis_url: str, state: str | None, copied: bool) -> None:
    backend = redis_backend(redis_url)
    if state is not None:
        backend.store_result("a", ValueError("why") if state in states.EXCEPTION_STATES else 5, state)
    store_queued(task_with(backend), Context(id="a"), 7, "held", copied=copied)
    kept = state in states.READY_STATES
    assert backend.get_state("a") == (state if kept else "QUEUED")
    if not kept:
        assert backend.get_task_meta("a")["result"] == {"position": 7, "reason": "held"}
        assert 0 < backend.client.ttl(backend.get_key_for_task("a")) <= 60


@pytest.mark.invariant("queued-state-hides-no-end")
def test_end_that_is_stored_while_queued_is_stored_over_redis_stays(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the state was read, and before QUEUED is written."""
    backend, another = redis_backend(redis_url), redis_backend(redis_url)
    multi, times = redis.client.Pipeline.multi, []

    def end_first(pipe: Any) -> None:
        if not times:
            times.append(1)
            another.store_result("a", ValueError("failed"), states.FAILURE)
        multi(pipe)

    monkeypatch.setattr(redis.client.Pipeline, "multi", end_first)
    store_queued(task_with(backend), Context(id="a"), 1, "held", copied=False)
    assert (times, backend.get_state("a")) == ([1], states.FAILURE)


@pytest.mark.parametrize(("copied", "sent"), [(False, ["QUEUED"]), (True, [])])
def test_end_over_rpc_is_unknown_so_a_copy_sends_no_queued_state(
    copied: bool, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    backend = RPCBackend(Celery(broker="memory://", set_as_current=False))
    monkeypatch.setattr(backend, "store_result", lambda _id, _meta, state, **_: told.append(state))
    monkeypatch.setattr(backend, "get_task_meta", None)  # it would read the replies of this process
    task = task_with(backend)
    store_queued(task, Context(id="a", reply_to="client"), 1, "held", copied=copied)
    assert (told, has_end(task, "a")) == (sent, False)


def task_with(backend: Any) -> Any:
    app = SimpleNamespace(tasks={})
    return SimpleNamespace(app=app, name="app.pay", backend=backend, ignore_result=False, store_eager_result=False)


def redis_backend(url: str) -> Any:
    app = Celery(backend=url, set_as_current=False)
    app.conf.result_expires = 60
    return app.backend
