"""A cold shutdown (SIGQUIT) kills bodies; what it does to their messages."""

import signal
from pathlib import Path

import pytest

from tests.apps.losing_stage import losing_stage
from tests.conftest import WORKERS
from tests.waiting import eventually


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_late_acknowledged_message_whose_body_a_green_pool_killed_runs_again(
    tmp_path: Path, pool: str, request: pytest.FixtureRequest
) -> None:
    """Celery alone takes the killed body for a success and acknowledges it."""
    with losing_stage(tmp_path) as stage:
        body = stage.begin(pool, "late", 30.0)
        first = stage.workers.pop(pool)
        first.signal(signal.SIGQUIT)
        eventually(lambda: not first.running, 15)
        request.node.stash[WORKERS] = [first, stage.worker(pool)]
        assert body.result.get(timeout=15) == "done"
        assert [word for word, _ in stage.words(body.row)] == ["start", "GreenletExit", "start", "return"]
