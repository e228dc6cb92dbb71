"""A claim and the broker's redelivery."""

import pytest

from tests.support.environments.claiming import Claims, urls_of
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import loaded_app, running_worker

APP = "tests.support.apps.claiming"
WAIT = 20


@pytest.mark.invariant("claim-follows-its-message", "claim-survives-the-worker")
def test_claims_survive_a_worker_that_requeues_its_messages(tmp_path):
    """A warm shutdown puts what was prefetched back, and the broker delivers it again."""
    with Server(tmp_path / "server") as server, loaded_app(APP, urls_of(server)) as tasks:
        claims = Claims(server, tasks)
        with running_worker(APP, folder=tmp_path, urls=urls_of(server), concurrency=1) as worker:
            blocker = tasks.busy.delay("back")
            claims.wait_at("back")
            first = tasks.queued.delay("back")
            eventually(lambda: f"[{first.id}] received" in worker.log())
            worker.signal(15)
            worker.wait_for_log("Warm shutdown")
            claims.open("back")
            worker.process.wait(30)
        assert tasks.queued.delay("back").id == first.id
        with running_worker(APP, folder=tmp_path, urls=urls_of(server), concurrency=1):
            assert first.get(timeout=WAIT) == "back"
            claims.wait_free(tasks.queued, "back")
        assert blocker.ready()
