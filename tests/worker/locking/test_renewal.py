"""Whatever holds up a body, its worker's watchdog renews the lock until the body ends."""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.redis.keys import LockKeys
from tests.support.environments.worker import WorkerEnvironment, running_environment
from tests.support.polling import eventually
from tests.support.processes import kill_session, spawn

APP = "tests.support.apps.keeping"
TTL = 3.0
LONG = 1.7 * TTL

#: Who has to be kept by which pool's worker, and what the body does meanwhile.
BODIES = {
    "prefork, the child holds its interpreter": ("prefork", "hold"),
    "prefork, warm shutdown": ("prefork", "sleep"),
    "solo, sleeping": ("solo", "sleep"),
    "threads, spinning": ("threads", "spin"),
    "gevent, spinning": ("gevent", "spin"),
    "eventlet, spinning": ("eventlet", "spin"),
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path_factory.mktemp("keeping"), APP) as running:
        yield running


@pytest.fixture(scope="module")
def kept(environment: WorkerEnvironment) -> None:
    """All the bodies at once, each in a worker of its own; two more, of which one is stopped, share another."""
    queues = {name: re.sub(r"\W+", "-", name) for name in BODIES}
    workers = {
        name: environment.start("-Q", queues[name], pool=pool, concurrency=1) for name, (pool, _) in BODIES.items()
    }
    environment.start()
    for name, (_, way) in BODIES.items():
        environment.app.brief.apply_async((name, way, LONG), queue=queues[name])
    environment.app.brief.delay("stopped", "sleep", LONG)
    environment.app.nested.delay("nested", LONG)
    psutil.Process(environment.mark("stopped", "start").pid).suspend()
    for name in BODIES:
        environment.mark(name, "start")
    workers["prefork, warm shutdown"].signal(signal.SIGTERM)
    environment.mark("nested", "start")


def check_kept(environment: WorkerEnvironment, key: str, name: str) -> None:
    """The lock of that body was never free while it ran, for longer than its ttl, and is free after it."""
    start, end = environment.mark(name, "start").at, environment.mark(name, "return", within=60).at
    assert end - start > 1.6 * TTL
    freed = eventually(lambda: environment.log.freed(key, start), message=f"{name}: still locked")
    assert 0 <= freed - end <= 1.0


@pytest.mark.invariant("watchdog-renews", "busy-interpreter-keeps-the-lock")
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", BODIES)
def test_a_lock_is_renewed_until_its_body_ends(environment: WorkerEnvironment, name: str) -> None:
    check_kept(environment, environment.key("brief", name, BODIES[name][1], LONG), name)
    if BODIES[name][1] == "hold":
        (gap,) = [float(word.split()[1]) for word in environment.words(name) if word.startswith("gap")]
        assert gap > 1.2 * TTL, "the interpreter was not held; the test tests nothing"


@pytest.mark.invariant("dead-owner-is-released", "stopped-process-keeps-or-reports")
@pytest.mark.usefixtures("kept")
def test_a_stopped_child_keeps_its_lock(environment: WorkerEnvironment) -> None:
    key, start = environment.key("brief", "stopped", "sleep", LONG), environment.mark("stopped", "start")
    environment.wait_for_renewal(key, start.at + 1.6 * TTL)
    psutil.Process(start.pid).resume()
    check_kept(environment, key, "stopped")


@pytest.mark.usefixtures("kept")
def test_locks_entered_in_a_body_are_renewed_and_released_if_the_body_forgets_them(
    environment: WorkerEnvironment,
) -> None:
    check_kept(environment, environment.key("nested", "nested", LONG), "nested")
    check_kept(environment, LockKeys.of("dlock", shared_name("other nested")).lock, "nested")
    assert "counts (2, 2)" in environment.words("nested")


@pytest.mark.invariant("watchdog-renews", "broker-outage-loses-no-lock")
@pytest.mark.core
def test_an_outage_of_the_broker_longer_than_the_ttl_loses_no_lock(tmp_path: Path) -> None:
    with running_environment(tmp_path, APP) as environment:
        environment.start()
        environment.app.brief.delay("outage", "sleep", LONG)
        start = environment.mark("outage", "start").at
        environment.broker.kill()
        environment.wait_for_renewal(environment.key("brief", "outage", "sleep", LONG), start + 1.2 * TTL)
        environment.broker.start()
        check_kept(environment, environment.key("brief", "outage", "sleep", LONG), "outage")
        # And the worker is back.
        environment.app.brief.delay("after the outage", "sleep", 0)
        environment.mark("after the outage", "return")


def test_an_embedded_test_worker_renews_and_ends(tmp_path: Path) -> None:
    with running_environment(tmp_path, APP) as environment:
        command = [sys.executable, "-m", "tests.support.apps.embedded", "embedded", str(LONG)]
        process = spawn(command, tmp_path / "embedded.log", environ=environment.urls.environ())
        try:
            check_kept(environment, environment.key("brief", "embedded", "sleep", LONG), "embedded")
            assert process.wait(20) == 0, (tmp_path / "embedded.log").read_text()
        finally:
            kill_session(process)
