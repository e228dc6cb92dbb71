"""A worker's start warns of tasks that have lock options but run without a lock."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from celery.signals import celeryd_after_setup

from celery_dlock import LockOptions, SingletonTask, singleton_task
from tests.support.processes import ROOT

#: A program whose worker ends once it is ready.
PROGRAM = """
from celery import Celery
from celery.exceptions import WorkerShutdown
from celery.signals import worker_ready
from celery_dlock import LockOptions

app = Celery("forgotten", broker="memory://")

@app.task(name="shop.bill", lock_options=LockOptions(ttl=5))
def bill(): ...

@worker_ready.connect
def end(**_facts):
    raise SystemExit

app.worker_main(["worker", "-P", "solo"])
"""
SECONDS = 60.0  # a loaded machine


def bill() -> None: ...


def told(app: Celery, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        celeryd_after_setup.send(sender="here", instance=SimpleNamespace(app=app), conf=app.conf)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def app() -> Celery:
    return Celery("forgotten", set_as_current=False)


@pytest.mark.core
def test_plain_task_with_lock_options_as_keywords_is_warned_of(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    app.task(name="shop.stray", on_conflict="skip", max_hold=5)(bill)
    app.task(name="shop.own", key="of the user", scope="of the user")(bill)
    app.finalize()
    (warning,) = told(app, caplog)
    assert warning == (
        "Task shop.stray has the lock options max_hold, on_conflict but runs without a lock, because its base is not "
        "SingletonTask. Use @singleton_task"
    )


@pytest.mark.core
def test_worker_without_singleton_tasks_warns_of_a_missing_base() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "C_FORCE_ROOT": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    (line,) = [line for line in done.stderr.splitlines() if "shop.bill" in line and "WARNING" in line]
    assert line.endswith(
        "Task shop.bill has lock_options but runs without a lock, because its base is not SingletonTask. "
        "Use @app.task(base=SingletonTask, lock_options=...), or @singleton_task"
    )


def test_each_unlocked_task_is_logged_once(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    class Classed(Task):  # type: ignore[type-arg]
        name = "shop.classed"
        lock_options = LockOptions()

    app.task(name="shop.bill", lock_options=LockOptions())(bill)
    app.register_task(Classed())
    assert [line.split()[1] for line in told(app, caplog)] == ["shop.bill", "shop.classed"]


@pytest.mark.parametrize("options", [{"name": "shop.outer"}, {"name": "shop.outer", "bind": True}])
def test_task_decorator_above_singleton_task_is_reported_with_the_hidden_task(
    app: Celery, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    app.task(**options)(singleton_task(app=app, name="shop.bill")(bill))
    (line,) = told(app, caplog)
    assert line == (
        "Task shop.outer calls the task shop.bill directly, which takes no lock. Use @singleton_task alone, "
        "without another task decorator above it"
    )


def test_singleton_and_plain_tasks_cause_no_warning(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    singleton_task(app=app, name="shop.bill")(bill)
    app.task(base=SingletonTask, name="shop.other", lock_options=LockOptions())(bill)
    app.task(name="shop.plain")(bill)
    app.task(name="shop.odd", lock_options={"mine": 1})(bill)
    assert told(app, caplog) == []
