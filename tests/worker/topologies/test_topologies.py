"""The core of what a worker does, with locks under Sentinel, in a Cluster and on Redlock."""

import json
import os
import signal
import time
from contextlib import ExitStack, contextmanager

import pytest
from celery.exceptions import TaskRevokedError

from tests.support.environ import environment
from tests.support.environments.policies import PolicyEnvironment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.topologies import MASTER_NAME
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.topologies"

pytestmark = pytest.mark.usefixtures("show_logs")


def _conf(kind, request):
    if kind == "sentinel":
        url = request.getfixturevalue("sentinel_set").lock_url()
        return {"dlock_url": url, "dlock_transport_options": {"master_name": MASTER_NAME}}
    if kind == "cluster":
        return {"dlock_url": request.getfixturevalue("cluster_set").lock_url()}
    # Without the delay, because such servers would grant nothing for a ttl from their first start on.
    return {"dlock_url": request.getfixturevalue("redlock_set").lock_urls()[:3], "dlock_restart_delay": 0}


@contextmanager
def _staged(conf, folder, *, queue):
    ours = {"DLOCK_TEST_CONF": json.dumps(conf), "DLOCK_TEST_QUEUE": "yes" if queue else "no"}
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        urls = Urls(server.url(0), server.url(1), "")
        stack.enter_context(environment(ours))
        tasks = stack.enter_context(loaded_app(APP, urls))
        made = PolicyEnvironment(server, urls, tasks, folder)
        made.workers = [stack.enter_context(running_worker(APP, folder=folder, urls=urls, concurrency=4))]
        yield made


@pytest.fixture(scope="module", params=["sentinel", "cluster", "redlock"])
def stage(request, tmp_path_factory):
    conf = _conf(request.param, request)
    with _staged(conf, tmp_path_factory.mktemp(request.param), queue=request.param != "redlock") as made:
        yield made


def test_the_lock_is_taken_before_the_body_and_free_when_its_result_is_there(stage):
    n = stage.fresh()
    with stage.hold(stage.tasks.skips, n) as holding:
        assert stage.locked(stage.tasks.skips, n)
        assert stage.tasks.skips.lock_for(n).holder().task_id == holding.id
        assert holding.end() is True
    stage.free(stage.tasks.skips, n, within=1.0)
    assert stage.tasks.skips.delay(n).get(timeout=15) is True


def test_skip_a_second_call_ends_revoked_while_the_first_is_inside(stage):
    n = stage.fresh()
    with stage.hold(stage.tasks.skips, n), pytest.raises(TaskRevokedError, match=r"held by topologies\.skips"):
        stage.tasks.skips.delay(n).get(timeout=15)
    assert stage.overlaps(n) == 1


def test_retry_a_second_call_runs_when_the_first_has_left(stage):
    n = stage.fresh()
    holding = stage.hold(stage.tasks.retries, n)
    second = stage.tasks.retries.delay(n)
    stage.wait_for_line(second.id, "is republished")
    holding.end()
    assert second.get(timeout=15) is True
    assert stage.overlaps(n) == 1


def test_wait_the_second_is_woken_by_the_release(stage):
    n = stage.fresh()
    holding = stage.hold(stage.tasks.waits, n)
    second = stage.tasks.waits.delay(n)
    # Its slot is taken: the task has started, its body has not.
    eventually(lambda: second.state == "STARTED" or stage.lines(second.id, "received"))
    holding.end()
    assert second.get(timeout=15) is True
    left = next(fact["at"] for fact in stage.history(n=n, what="out"))
    entered = stage.history(n=n, what="in", id=second.id)[0]["at"]
    assert 0 < entered - left < 1.0
    tokens = [fact["token"] for fact in stage.history(n=n, what="in")]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("stage", ["sentinel", "cluster"], indirect=True)  # Redlock refuses it
def test_queue_those_that_wait_run_one_by_one_in_the_order_of_their_sending(stage):
    n = stage.fresh()
    holding = stage.hold(stage.tasks.queues, n)
    others = []
    for _ in range(3):
        others.append(stage.tasks.queues.delay(n))
        stage.wait_for_line(others[-1].id, "is parked")
    holding.end()
    assert [other.get(timeout=20) for other in others] == [True, True, True]
    assert [fact["id"] for fact in stage.history(n=n, what="in")] == [holding.id, *(other.id for other in others)]
    assert stage.overlaps(n) == 1


def test_a_killed_child_frees_its_lock_within_a_second(stage):
    n = stage.fresh()
    stage.tasks.skips.delay(n, f"{n}-never")
    (inside,) = stage.entered(n=n)
    assert stage.locked(stage.tasks.skips, n)
    os.kill(inside["pid"], signal.SIGKILL)
    died = seen = time.monotonic()

    def free():
        nonlocal seen
        looked = time.monotonic()
        if stage.locked(stage.tasks.skips, n):
            seen = looked
        return seen < looked

    eventually(free, 10)
    assert seen - died < 1.0


def test_a_lease_of_three_seconds_is_renewed_until_its_body_ends(stage):
    n = stage.fresh()
    with stage.hold(stage.tasks.short, n) as holding:
        token = stage.tasks.short.lock_for(n).holder().token
        until = time.monotonic() + 4.5
        seen = set()
        while time.monotonic() < until:
            holder = stage.tasks.short.lock_for(n).holder()
            seen.add(holder and holder.token)
            time.sleep(0.2)
        assert seen == {token}
        assert holding.end() is True
