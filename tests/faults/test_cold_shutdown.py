"""A cold shutdown (SIGQUIT) kills bodies; what it does to their messages."""

import signal
from pathlib import Path

import pytest

from tests.conftest import WORKERS
from tests.support.environments.losing import losing_environment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker


@pytest.mark.invariant("shutdown-keeps-locks")
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_late_acknowledged_message_whose_body_a_green_pool_killed_runs_again(
    tmp_path: Path, pool: str, request: pytest.FixtureRequest
) -> None:
    """Celery alone takes the killed body for a success and acknowledges it."""
    with losing_environment(tmp_path) as environment:
        body = environment.begin(pool, "late", 30.0)
        first = environment.workers.pop(pool)
        request.node.stash[WORKERS] = [first]
        first.signal(signal.SIGQUIT)
        eventually(lambda: not first.running, 40)
        request.node.stash[WORKERS] = [first, environment.worker(pool)]
        assert body.result.get(timeout=15) == "done"
        assert [word for word, _ in environment.words(body.row)] == ["start", "GreenletExit", "start", "return"]


@pytest.mark.invariant("deduplicated-copy-is-acknowledged")
@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_early_message_with_lost_ack_runs_again_if_a_green_pool_killed_its_body(
    tmp_path: Path, pool: str, request: pytest.FixtureRequest
) -> None:
    """Celery takes the killed body for a success. It has no end, and none will ever be known if it is marked."""
    with Server(tmp_path / "server") as server:
        urls = Urls(server.url(0), server.url(1), server.url(2))
        with loaded_app("tests.support.apps.lost_acks", urls) as tasks:
            tasks.notes.set("deaf", 1)
            tasks.notes.set("stay", 1)
            with running_worker("tests.support.apps.lost_acks", folder=tmp_path, urls=urls, pool=pool) as first:
                request.node.stash[WORKERS] = [first]
                result = tasks.early.delay("killed", "stay")
                first.wait_for_log("Couldn't ack")
                eventually(lambda: tasks.notes.lrange("ran", 0, -1) == ["killed"], 10)
                first.signal(signal.SIGQUIT)
                eventually(lambda: not first.running, 40)
            tasks.notes.delete("deaf", "stay")
            with running_worker("tests.support.apps.lost_acks", folder=tmp_path, urls=urls, pool=pool) as second:
                request.node.stash[WORKERS] = [first, second]
                with tasks.app.connection_for_read() as connection:
                    for tag in server.client(0).hkeys("unacked"):
                        connection.default_channel.qos.restore_by_tag(tag)
                assert result.get(timeout=40) == "killed"
                assert tasks.notes.lrange("ran", 0, -1) == ["killed", "killed"]
