"""The start of a run: the state STARTED after QUEUED, and the lock of a run that keeps its delivery."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import build_tracer

from celery_dlock import singleton_task
from celery_dlock.messaging.message import PROPERTY, Delivery, RawMessage
from celery_dlock.messaging.wire import WIRE_VERSION
from celery_dlock.store.model import AcquireRequest, Identity
from celery_dlock.task import execution
from celery_dlock.task.execution import Execution
from celery_dlock.task.outcomes import NotRepublished
from tests.unit.fakes import a_name

#: Headers of which this version reads nothing: options that it does not know, and a due time of another form.
NEWER_HEADERS = {
    "task": "newer.post",
    "id": "id1",
    "dlock_call": {"task": "newer.post", "options": '{"option_of_tomorrow": 1}'},
    "dlock_tick": "of tomorrow",
    "dlock": {"wire": WIRE_VERSION + 1, "identity": Identity("id1").digest},
}
NOT_QUEUED = {"rank_us": None, "grant_id": "", "is_copy": False, "newer_wire": 0}


def a_run(*, queues: bool = True, tracked: bool = False, refused: str = "", flagged: bool = False, **of: Any) -> Any:
    run: Any = object.__new__(Execution)
    run.task = SimpleNamespace(name="app.pay", stores_started=tracked)
    run.request = SimpleNamespace(id="id1", delivery_info={"redelivered": flagged})
    run.delivery = SimpleNamespace(**{**NOT_QUEUED, **of})
    run.refused_because = refused
    run.queues = queues
    return run


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ids: list[str] = []
    monkeypatch.setattr(execution, "store_started", lambda task, request: ids.append(request.id))
    return ids


@pytest.mark.invariant("queued-state-hides-no-end")
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, False),
        ({"grant_id": "t"}, True),
        ({"is_copy": True}, True),
        ({"flagged": True}, True),
        ({"refused": "held by another"}, True),
        ({"queues": False, "is_copy": True, "flagged": True}, False),
        ({"queues": False, "tracked": True}, True),
    ],
    ids=str,
)
def test_started_is_stored_where_queued_may_have_been(facts: dict[str, Any], expected: bool, stored: list[str]) -> None:
    """Any other call costs the result backend nothing more."""
    a_run(**facts)._store_started()
    assert stored == (["id1"] if expected else [])


@pytest.mark.parametrize("facts", [{"grant_id": "t"}, {"grant_id": "t", "tracked": True}], ids=str)
def test_body_runs_though_its_start_cannot_be_stored(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(execution, "store_started", fails)
    a_run(**facts)._store_started()
    assert "app.pay[id1] runs, but its state STARTED cannot be stored: gone" in caplog.text


def test_soft_limit_while_the_start_is_stored_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(execution, "store_started", limited)
    with pytest.raises(SoftTimeLimitExceeded):
        a_run(grant_id="t")._store_started()


def test_run_that_keeps_its_delivery_asks_again_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run()
    run.options, run.rank_us = SimpleNamespace(is_simple=True), None
    asked, slept = [], []

    def ask(_name: Any, request: AcquireRequest) -> None:
        asked.append(request.rank_us)
        run.rank_us = 7
        if len(asked) < 3:
            raise NotRepublished(len(asked))

    run._try_acquire = ask
    monkeypatch.setattr(execution, "acquire_request", lambda _run: SimpleNamespace(rank_us=None, _replace=replaced))
    monkeypatch.setattr(execution.time, "sleep", slept.append)
    run._acquire(a_name())
    assert (asked, slept) == ([None, 7, 7], [1, 2])


def replaced(**facts: Any) -> SimpleNamespace:
    return SimpleNamespace(**facts)


@pytest.mark.invariant("newer-wire-is-left-alone")
def test_message_of_a_newer_worker_is_republished_though_its_options_are_unknown() -> None:
    app = Celery("newer", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url="memory://", task_default_queue="newer")  # all apps of a process share memory://
    ran: list[int] = []

    @singleton_task(app=app, name="newer.post", once_per="tick")
    def post(n: int) -> None:
        ran.append(n)

    raw = RawMessage(json.dumps([[7], {}, {}]), "application/json", "utf-8", NEWER_HEADERS, {}, "newer")
    delivery = Delivery("owner1", 0.0, 0.0, False, tuple(raw), newer_wire=WIRE_VERSION + 1)
    request = {"id": "id1", "properties": {PROPERTY: tuple(delivery)}, "delivery_info": {}, "hostname": "here"}
    app.finalize()
    build_tracer(post.name, post, app=app)("id1", (7,), {}, request)
    with app.connection_for_read() as connection, connection.SimpleQueue("newer") as queue:
        republished = queue.get(block=False)
    assert {name: republished.headers[name] for name in NEWER_HEADERS} == NEWER_HEADERS
    assert not ran
