"""The end of a call whose body was killed, while the result backend does not answer."""

from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlock import CallSkipped
from celery_dlock.utils.threads import SerialExecutor
from celery_dlock.worker import request as request_module
from celery_dlock.worker.body_kill import KilledBody
from celery_dlock.worker.request import SingletonRequest
from tests.support.polling import eventually
from tests.unit.fakes import a_name


@pytest.mark.invariant("ends-are-tried-again")
@pytest.mark.parametrize(
    ("fails", "acks_late", "did", "tried"),
    [
        (0, False, ["task-revoked", "acknowledge"], 1),
        (1, False, ["acknowledge"], 2),
        (1, True, ["reject"], 1),
    ],
)
def test_end_of_a_killed_body_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, fails: int, acks_late: bool, did: list[str], tried: int
) -> None:
    """Celery's thread does not wait for it. A message that is acknowledged late is ended by its next delivery."""
    tries: list[int] = []
    done: list[str] = []

    def store(*_: object) -> None:
        tries.append(1)
        if len(tries) <= fails:
            raise ConnectionError("gone")

    monkeypatch.setattr(request_module, "has_end", lambda *_: False)
    monkeypatch.setattr(request_module, "store_revoked", store)
    monkeypatch.setattr(request_module, "report_stopped", lambda *_: CallSkipped("replaced"))
    request: Any = SimpleNamespace(
        task=SimpleNamespace(name="shop.deploy", acks_late=acks_late),
        id="older",
        dlock_owner="owner1",
        _context=None,
        _dlock_deliveries=SimpleNamespace(body_killer=SimpleNamespace(ends=SerialExecutor())),
        acknowledge=lambda: done.append("acknowledge"),
        reject=lambda requeue: done.append("reject"),  # its name counts
        send_event=lambda kind, **_: done.append(kind),
    )
    SingletonRequest._dlock_end_killed(request, KilledBody(a_name(), "newer"))
    assert done == did
    eventually(lambda: len(tries) == tried)
