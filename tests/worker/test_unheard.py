"""A message whose acknowledgement the broker did not hear is delivered again, and does not run again."""

import pytest
import redis

from tests.conftest import WORKERS
from tests.servers import Server
from tests.waiting import eventually
from tests.workers import Urls, loaded_app, running_worker

APP = "tests.apps.unheard"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unheard")
    with Server(folder / "server") as server:
        urls = Urls(server.url(0), server.url(1), server.url(2))
        with loaded_app(APP, urls) as tasks, running_worker(APP, folder=folder, urls=urls) as worker:
            yield tasks, worker, server


@pytest.mark.parametrize("end", ["", "fail"])
@pytest.mark.parametrize("name", ["early", "late"])
def test_a_message_whose_acknowledgement_is_not_heard_runs_once(made, request, name, end):
    """Acknowledged at its start, too: else a send whose broker's connection breaks just then goes out twice."""
    tasks, worker, server = made
    request.node.stash[WORKERS] = [worker]
    n, unheard_before = f"{name}-{end}", worker.log().count("Couldn't ack")
    with redis.Redis.from_url(server.url(0)) as broker:
        tasks.notes.set("deaf", 1)
        result = getattr(tasks, name).delay(n, end)
        result.get(timeout=10, propagate=False)
        # At its start or at its end.
        eventually(lambda: worker.log().count("Couldn't ack") > unheard_before, 10)
        eventually(lambda: not tasks.early.lock_for(n).locked(), 10)
        tasks.notes.delete("deaf")
        worker.wait_for_log(rf"{result.id}\] is a duplicate", 30)
        eventually(lambda: not broker.llen("celery") and not broker.hlen("unacked"), 10)
    assert tasks.notes.lrange("ran", 0, -1).count(n) == 1
    assert result.state == ("FAILURE" if end else "SUCCESS")


@pytest.mark.parametrize("name", ["early", "late"])
def test_those_that_are_heard_are_not_marked(made, request, name):
    """A mark costs the main process a connection and a script."""
    tasks, worker, server = made
    request.node.stash[WORKERS] = [worker]
    with server.client() as client:
        before = client.info("stats")["total_connections_received"]
        for number in range(20):
            getattr(tasks, name).delay(f"{name} {number}").get(timeout=10)
        eventually(lambda: not client.hlen("unacked"), 10)
        assert client.info("stats")["total_connections_received"] - before < 10
