"""A body that outlives its hard time limit keeps its lock: in most pools nothing enforces the limit."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environments.worker import Row, WorkerEnvironment, running_environment
from tests.support.polling import eventually

pytestmark = pytest.mark.slow

#: How the body of each pool goes on for 30 s. Under gevent it catches the ``Timeout`` that is raised in it.
WAYS = {"prefork": "beat", "threads": "beat", "solo": "beat", "eventlet": "beat", "gevent": "stubborn"}
LIMIT, TTL = 4.0, 3.0
#: A limit that ended the lease 10 s later would free the lock by then.
WATCHED = LIMIT + 10.0 + TTL + 1.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path, "tests.support.apps.endings") as running:
        yield running


@pytest.mark.invariant("unenforced-limit-keeps-the-lock")
def test_hard_limit_not_enforced_keeps_lock_until_body_ends(environment: WorkerEnvironment) -> None:
    """Prefork enforces it by a timer that stands still while its worker connects to the broker."""
    rows = [Row(pool, "early_brief", way, "", {"time_limit": LIMIT}) for pool, way in WAYS.items()]
    for row in rows:
        environment.start("-Q", row.name, pool=row.name, concurrency=1)
    for row in rows:
        environment.send(row, queue=row.name)
    for row in rows:
        environment.wait_for_body(row)
    environment.broker.kill()
    end = time.monotonic() + WATCHED
    keys = {row.name: environment.key(row.task, *row.args) for row in rows}
    while time.monotonic() < end:
        free = [name for name, key in keys.items() if not environment.store_client.exists(key)]
        assert not free, f"{free}: free {WATCHED - (end - time.monotonic()):.1f} s after the broker's death"
        time.sleep(0.2)
    # The bodies have not ended, so their locks had to be held. A gevent worker without a broker runs no greenlet.
    assert time.monotonic() - environment.beat("prefork") < 2.5
    environment.broker.start()
    back = time.monotonic()
    for name in keys.keys() - {"prefork"}:
        eventually(lambda name=name: environment.beat(name) > back, 10, message=f"{name}: the body has ended")
