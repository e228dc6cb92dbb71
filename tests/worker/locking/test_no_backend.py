"""Without a result backend: what cannot be had of results is said plainly, and no call ends by an error of Celery's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from celery_dlock import singleton_task
from tests.support.processes import ROOT

#: A program whose worker ends once it is ready.
PROGRAM = """
import sys
from celery import Celery
from celery.signals import worker_ready
from celery_dlock import singleton_task

app = Celery("resultless", broker="memory://", backend=sys.argv[1] or None)
app.conf.dlock_url = sys.argv[2]

@singleton_task(app=app, name="shop.one", once_per=60, on_used="return")
def one(): ...

@singleton_task(app=app, name="shop.two", once_per=60, on_used="return")
def two(): ...

@singleton_task(app=app, name="shop.three", once_per=60)
def three(): ...

@worker_ready.connect
def end(**_facts):
    raise SystemExit

app.worker_main(["worker", "-P", "solo"])
"""
SECONDS = 60.0  # a loaded machine


@pytest.fixture
def app(redis_url: str) -> Celery:
    made = Celery("resultless", broker="memory://", set_as_current=False)
    made.conf.dlock_url = redis_url
    return made


def bill(number: int) -> int:
    return number


def test_used_name_without_a_result_backend_is_skipped_with_a_warning(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    task = singleton_task(app=app, name="shop.bill", once_per=60, on_used="return")(bill)
    first = task.apply((1,)).id
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        assert task.apply((1,)).state == "REVOKED"
    [record] = caplog.records
    assert record.getMessage().endswith(
        f"cannot return the result of {first} (on_used='return') and is skipped: no result backend is configured"
    )


@pytest.mark.parametrize("chosen", [{}, {"task_id": "second"}])
def test_refused_publish_without_a_backend_returns_the_first_id(app: Celery, chosen: dict[str, Any]) -> None:
    """This holds for a call with an id of its own too: without a backend, its end cannot be waited for."""
    task = singleton_task(app=app, name="shop.bill", unique="queued")(bill)
    first = task.apply_async((1,), task_id="first")
    assert task.apply_async((1,), **chosen).id == first.id == "first"


@pytest.mark.parametrize("backend", ["", "cache+memory://"])
def test_worker_start_warns_of_tasks_without_results_to_return(backend: str, redis_url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, backend, redis_url]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    told = [line.partition("] ")[2] for line in done.stderr.splitlines() if "on_used" in line]
    why = "no result is stored (no result backend, or ignore_result), so a call of a used name is skipped"
    line = f"on_used='return' of shop.one, shop.two has no effect: {why}"
    assert told == ([] if backend else [line])
    assert "Traceback" not in done.stderr
