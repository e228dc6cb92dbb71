"""Calls of `end_revoked` to the result backend. tests/worker/canvas/test_canvas.py has their effects in canvases."""

from typing import Any

import pytest
from celery import Celery, Task
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import TaskRevokedError

from celery_dlock.messaging.results import store_queued, store_revoked

pytestmark = pytest.mark.core


class Recording(DisabledBackend):
    calls: list[str]

    def store_result(self, task_id: str, result: Any, state: str, *_: Any, **__: Any) -> Any:
        self.calls.append(f"{state} {task_id} {result}")

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
    backend.calls = []
    skip(backend)
    stored, parts = backend.calls[:4], backend.calls[4:]
    assert sorted(stored) == ["REVOKED a why", "REVOKED b why", "REVOKED c why", "REVOKED d why"]
    assert parts == ["part a of g: REVOKED why", "part b of g: REVOKED why"]


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
