"""A soft limit may strike between any two steps of a run with a lock file (``on_store_error="local"``)."""

import logging
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_dlock import singleton_task
from celery_dlock.locking import owner
from celery_dlock.locking.lock_files import LockFiles
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import Requester
from celery_dlock.task import execution
from tests.contract.test_interruptions import Strike, run

UNREACHABLE = "redis://127.0.0.1:1"


def made(url: str, run_dir: Path) -> Celery:
    app = Celery("interruptions", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dlock_url=url, dlock_run_dir=str(run_dir))
    # The test is the watchdog's scheduler: its thread never starts.
    assert Runtime.of(app).watchdog._loop.running.acquire(blocking=False)
    return app


@pytest.mark.invariant("interruption-leaks-no-lock")
@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
@pytest.mark.timeout(300)  # all CPU, and a busy machine has little of it
@pytest.mark.parametrize("store", ["up", "away"])
def test_a_soft_limit_at_any_line_leaves_no_lock_file_locked(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, store: str
) -> None:
    caplog.set_level(logging.CRITICAL)
    app = made(redis_url if store == "up" else UNREACHABLE, tmp_path / "run")
    leases: list[tuple[int, bool, bool]] = []

    @singleton_task(app=app, bind=True, key="{number}", name=f"interruptions.{store}", on_store_error="local")
    def work(self: Any, number: int) -> None:
        leases.append((number, self.lease.local, self.lease.held))

    app.finalize()
    work.__trace__ = build_tracer(work.name, work, app=app)
    runtime = Runtime.of(app)
    settings = runtime.settings
    others = LockFiles(settings.run_dir, settings.prefix, settings.locations, runtime.clock)
    struck = 0
    while True:
        strike = Strike(at=struck)
        run(work, struck, strike)
        assert (strike.where, runtime.lock_files._held) == (strike.where, {})
        name = work.lock_spec.name_of((struck,), {})
        refusal = others.acquire(name, "other", "other", Requester("", "", "", "0"))
        assert (strike.where, refusal) == (strike.where, None)
        others.release(name, "other", "other")
        assert (strike.where, execution.running(), owner.entered()) == (strike.where, None, None)
        if store == "up":
            runtime.watchdog.run_round()
        if not strike.where:
            break
        struck += 1
    assert struck > 150
    assert {lease[1:] for lease in leases} == {(False, True) if store == "up" else (True, False)}
    assert [file.name for file in (tmp_path / "run").iterdir()] == []
