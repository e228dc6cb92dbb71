"""A setting that cannot be used ends a worker with one line, in whatever log it has, and a status that says so."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, singleton_task
from celery_dlock.worker import SingletonStep
from tests.support.processes import ROOT

SECONDS = 60.0  # a loaded machine

REFUSED = {
    "sentinel://:s3cret@h": "dlock_url: cannot keep locks at 'sentinel://h'; dlock_transport_options={'master_name'",
    # Also with one pool child: the main process renews its locks.
    "memory://": "dlock_url='memory://' with the pool celery.concurrency.prefork: its processes would not",
    # Only who makes a connection of it can tell.
    "redis://:s3cret@h?sockettimeout=3": "dlock_url: cannot keep locks at 'redis://h'; redis-py knows no option 's",
}


@pytest.mark.invariant("unusable-setting-ends-the-worker")
@pytest.mark.core
@pytest.mark.parametrize(("url", "said"), REFUSED.items())
def test_a_setting_that_cannot_be_used_ends_the_worker_with_one_line(url: str, said: str, tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    facts = {
        "DLOCK_TEST_BROKER_URL": "memory://",
        "DLOCK_TEST_RESULT_URL": "redis://localhost",
        "DLOCK_TEST_CONF": json.dumps({"dlock_url": url}),
        "DLOCK_TEST_QUEUE": "no",
        "PYTHONPATH": str(ROOT),
        "C_FORCE_ROOT": "1",
    }
    app = "tests.support.apps.topologies"
    pool = "prefork" if url == "memory://" else "solo"
    command = ["-W", "ignore", "-m", "celery", "-A", app, "worker", "-P", pool, "-c", "1", "-f", str(log)]
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | facts, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == os.EX_CONFIG
    (line,) = log.read_text().splitlines()
    assert re.search(r"CRITICAL.* the worker does not start: ", line)
    assert said in line
    assert "Traceback" not in done.stderr
    assert "s3cret" not in line + done.stderr + done.stdout


def test_a_skip_result_that_cannot_be_stored_is_refused_at_the_start() -> None:
    """Not first by the skip itself, which would fail and name neither the task nor the option."""
    app = Celery("within", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.dlock_url = "redis://localhost"  # not asked yet

    @singleton_task(app=app, name="shop.bill", skip_result=object)
    def bill() -> None: ...

    worker = type("Embedded", (), {"app": app})()
    expected = "expected a value that result_serializer='json' can store, but "
    with pytest.raises(InvalidLockOptions, match=rf"task 'shop\.bill': invalid skip_result=.*: {expected}"):
        SingletonStep(worker).include_if(worker)


def test_embedded_worker_with_a_refused_setting_raises() -> None:
    app = Celery("within", broker="memory://", set_as_current=False)
    app.conf.dlock_tll = 1

    @singleton_task(app=app)
    def any_task() -> None: ...

    worker = type("Embedded", (), {"app": app})()
    with pytest.raises(InvalidLockOptions, match="unknown setting 'dlock_tll'"):
        SingletonStep(worker).include_if(worker)
