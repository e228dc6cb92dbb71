"""Each conflict counts once in ``conflicts_total``, under the outcome that the call had."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_dlock import singleton_task
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import Parked
from celery_dlock.task import outcomes, policy


def counted(app: Celery) -> dict[tuple[str, ...], float]:
    meter = Runtime.of(app).counts.meter
    assert meter is not None
    (samples,) = (samples for found, samples in meter.read() if found.name == "conflicts")
    return {sample.labels: sample.value for sample in samples if sample.value}


@pytest.mark.parametrize(
    ("decision", "answer", "outcome"),
    [
        (policy.Skip("why"), None, "skipped"),
        (policy.RetryLater(1.0, "why"), None, "retried"),
        (policy.AckParked("why"), Parked(1, 1, None, None), "queued"),
        (policy.AckParked("why", duplicate=True), Parked(1, 0, None, None), "duplicate"),
        (policy.AckParked("why"), None, "duplicate"),
        (policy.Fail("why"), None, "raised"),
        (policy.ReturnFirstResult("id", "why"), None, "returned"),
        (policy.DropDuplicate("why"), None, "duplicate"),
        (policy.RequeueDuplicate(1.0, "why"), None, "duplicate"),
    ],
)
def test_each_decision_counts_once_under_its_outcome(app: Celery, decision: Any, answer: Any, outcome: str) -> None:
    runtime = Runtime.of(app)
    runtime.counts.start(["t"])
    run: Any = SimpleNamespace(runtime=runtime, task=SimpleNamespace(name="t"))
    outcomes._count_conflict(run, answer, decision)
    assert counted(app) == {("t", outcome): 1}


@pytest.mark.parametrize(("policy_name", "outcome"), [("skip", "skipped"), ("raise", "raised"), ("skip", "waited")])
def test_call_that_meets_a_held_lock_counts_once(app: Celery, policy_name: Any, outcome: str) -> None:
    @singleton_task(app=app, name="t", key="one", on_conflict=policy_name, wait=20 if outcome == "waited" else 0)
    def task() -> None: ...

    Runtime.of(app).counts.start(["t"])
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with task.lock_for():
            taken.set()
            over.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(10)
    if outcome == "waited":
        threading.Timer(0.5, over.set).start()
    task.apply()
    over.set()
    holder.join()
    assert counted(app) == {("t", outcome): 1}
